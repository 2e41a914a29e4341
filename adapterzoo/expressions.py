"""Names of layers: the shortest ends of paths, and a bound on regular expressions in configs.

Expressions may come from untrusted files.

Python's `re` backtracks and cannot be stopped: "(a+)+b" takes years on forty letters. An expression
is refused before it runs if the number of ways to match has no known bound, or too high a one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable

# about a second for one layer with a path of this length
_MAX_WAYS = 2e8
_PATH = 64

# an escaped character, or one of a class, counts as a letter
_LETTER = re.compile(r"\\[^1-9]|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
# repeated groups, references to groups, named groups and conditions; in verbose expressions
# blanks may hide a repeat
_UNBOUNDED = re.compile(r"\)[*+{]|\\|\(\?(?:[P(]|[a-zA-Z-]*x)")


def fault(patterns: Iterable[str], length: int = _PATH, texts: int = 1) -> tuple[str, str] | None:
    """Return the first expression that is not legal and the reason; None if all are legal.

    Args:
        patterns: expressions that are tried on each text.
        length: of a text.
        texts: how many texts there are.
    """
    total = 0.0
    for pattern in patterns:
        total += ways(pattern, length) * texts
        if total > _MAX_WAYS:
            return pattern, (
                "the expression could search for hours: it repeats a group, refers to one, or has "
                "too many of '*', '+' and '?'"
            )
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            return pattern, f"not a regular expression ({error})"
    return None


def ways(pattern: str, length: int) -> float:
    """Return a bound on the ways that a regular expression tries on a text.

    Args:
        pattern: a regular expression, which need not be legal.
        length: of the text.

    Returns:
        Infinity if no bound is known.
    """
    plain = _LETTER.sub("a", pattern)
    if _UNBOUNDED.search(plain):
        return math.inf
    repeats = len(re.findall(r"[*+{]", plain))
    # a question mark after a bracket opens a kind of group, after a repeat it makes that one lazy
    maybes = len(re.findall(r"(?<![(*+}])\?", plain))
    found, bars = 2.0 ** min(maybes, 999), [0]
    for sign in re.findall(r"[(|)]", plain):
        if sign == "(":
            bars.append(0)
        elif sign == "|":
            bars[-1] += 1
        elif len(bars) > 1:
            found *= bars.pop() + 1
    found *= math.prod(count + 1.0 for count in bars)
    # the ways to divide the text among the repeats: a binomial, in floats to avoid overflow
    for i in range(repeats):
        found *= (length + 1 + i) / (i + 1)
    return max(found, float(len(pattern)))


def short_names(chosen: Collection[str], everything: Iterable[str]) -> tuple[str, ...] | None:
    """Return the shortest ends of paths that name the chosen ones and nothing else.

    Args:
        chosen: some of the paths.
        everything: all paths that an end could name.

    Returns:
        Sorted; None if a chosen path is itself the end of another one.
    """
    counts: dict[str, int] = {}
    for path in everything:
        for end in _ends(path):
            counts[end] = counts.get(end, 0) + 1
    mine: dict[str, int] = {}
    for path in chosen:
        for end in _ends(path):
            mine[end] = mine.get(end, 0) + 1
    names = set()
    for path in chosen:
        own = [end for end in _ends(path) if mine[end] == counts.get(end)]
        if not own:
            return None
        names.add(own[0])
    return tuple(sorted(names))


def _ends(path: str) -> Iterable[str]:
    parts = path.split(".")
    for start in range(len(parts) - 1, -1, -1):
        # an end that begins with a block number is hard to read
        if not start or not parts[start].isdigit():
            yield ".".join(parts[start:])
