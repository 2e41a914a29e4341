"""Matching of names and comparison of paths."""

from __future__ import annotations

import re


def tail(*names: str) -> re.Pattern[str]:
    """Return a pattern for paths that end in one of the names, each a regular expression."""
    # some models wrap each linear in a module of its own: `q_proj.linear`
    return re.compile(rf"(?:^|\.)(?:{'|'.join(names)})(?:\.linear)?$")


def parent(path: str) -> str:
    """Return the path of the module that holds the one at `path`."""
    return path.rpartition(".")[0]


def leaf(path: str) -> str:
    """Return the last name of a path."""
    return path.rpartition(".")[2]


def joined(owner: str, path: str) -> str:
    """Return the path below the root of a path below an owner; either may be empty."""
    return f"{owner}.{path}" if owner and path else owner or path


def below(path: str, root: str) -> bool:
    """Return whether the path is the root or below it."""
    return not root or path == root or path.startswith(f"{root}.")


def common(one: str, other: str) -> str:
    """Return the path of the nearest module that holds both."""
    shared: list[str] = []
    for a, b in zip(one.split("."), other.split("."), strict=False):
        if a != b:
            break
        shared.append(a)
    return ".".join(shared)


def nearness(one: str, other: str) -> int:
    """Return how many names two paths share at the start."""
    shared = common(one, other)
    return shared.count(".") + 1 if shared else 0
