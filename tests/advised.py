"""Follows what an error says to write: a call that fails, and its advice, run as code."""

from __future__ import annotations

import re

import pytest


def follow(row, names):
    """Run the code that fails, and then the code with the advice of its message.

    Args:
        row: the class of the error, code that fails, a pattern with a group for each advice in its
            message, code that has them as {0}, {1}, …, and pairs of texts to replace in them.
        names: what the code uses.
    """
    error, fails, pattern, works, *replaced = row
    with pytest.raises(error) as caught:
        exec(fails, names)
    text = str(caught.value)
    found = re.search(pattern, text)
    assert found is not None, text
    advice = list(found.groups())
    for old, new in replaced:
        advice = [part.replace(old, new) for part in advice]
    exec(works.format(*advice), names)
