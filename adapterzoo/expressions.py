"""How long a regular expression may search: known before it runs.

Names of layers in configs may be regular expressions, and configs come from strangers. Python's
`re` tries one way after the other and cannot be stopped: "(a+)+b" needs years for forty letters.
"""

from __future__ import annotations

import math
import re

_TOKEN = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|(?P<repeat>[*+]|\{\d*,?\d*\})|(?P<maybe>\?)|(?P<sign>[()|])|.",
    re.DOTALL,
)


def steps(pattern: str, length: int) -> float:
    """At most how many ways a regular expression can try on a text of this length.

    Args:
        pattern: need not be legal.
        length: of the text.

    Returns:
        Infinity where no bound is known: repeated groups, references to groups, and expressions
        with the flag x, whose blanks say nothing.
    """
    ways, repeats = 1.0, 0
    bars, last = [0], ""
    for token in _TOKEN.finditer(pattern):
        text = token[0]
        if token["repeat"]:
            # a repeated group tries its ways again and again
            if last == ")":
                return math.inf
            repeats += 1
        elif token["maybe"] and last == "(":
            text = "(?"
        elif token["maybe"]:
            # after a repeat it makes that one lazy, which changes the order of trying only
            ways *= 1 if last == "repeat" else 2
        elif text == "(":
            bars.append(0)
        elif text == "|":
            bars[-1] += 1
        elif text == ")" and len(bars) > 1:
            ways *= bars.pop() + 1
        elif re.fullmatch(r"\\[1-9]", text) or (last == "(?" and text in "P("):
            # what refers to a group, or names one: nobody needs it here
            return math.inf
        elif re.fullmatch(r"\(\?[a-zA-Z-]*", last) and re.fullmatch("[a-zA-Z-]", text):
            # a group's flags; with x a blank may stand between a group and its repeat
            if text == "x":
                return math.inf
            text = last + text
        last = "repeat" if token["repeat"] else text
    for count in bars:
        ways *= count + 1
    for i in range(repeats):
        # how the text can be shared out among them, a binomial, which may be too large for a float
        ways *= (length + 1 + i) / (i + 1)
    return max(ways, float(len(pattern)))
