r"""Names of layers in PEFT's configs: from patterns to layers, and back to short names.

PEFT matches the keys of `rank_pattern` and `alpha_pattern` by `(.*\.)?(key)$`, and the entries of
a list `target_modules` as ends of paths. Keys from a file are regular expressions that are not
trusted: their search time is bounded before they run.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from adapterzoo.errors import CheckpointError
from adapterzoo.patterns import fault

_T = TypeVar("_T")

# texts that match themselves, except that a dot matches any character
_PLAIN = re.compile(r"[\w.\-]*")


def values_at(field: str, patterns: Mapping[str, _T], paths: Collection[str]) -> dict[str, _T]:
    """Return the value of the first pattern that matches each path; leave out other paths.

    Args:
        field: of the config, for messages.
        patterns: PEFT's keys to values.
        paths: of layers.

    Raises:
        CheckpointError: a key is not a regular expression, or one that may search for hours.
    """
    whole = {rf"(.*\.)?({pattern})$": pattern for pattern in patterns}
    if (found_fault := fault(whole, max(map(len, paths), default=0), len(paths))) is not None:
        expression, reason = found_fault
        raise CheckpointError(
            f"{field} has the key {whole[expression][:80]!r}: {reason}. Write names of "
            f"layers as its keys: {{'q_proj': …}}."
        )
    compiled = {pattern: re.compile(expression) for expression, pattern in whole.items()}
    # most keys are names, whose last part excludes most paths without a search
    ends = {p: p.rpartition(".")[2] if _PLAIN.fullmatch(p) else "" for p in patterns}
    found: dict[str, _T] = {}
    for path in paths:
        for pattern, value in patterns.items():
            if path.endswith(ends[pattern]) and compiled[pattern].match(path):
                found[path] = value
                break
    return found


def exactly(paths: Iterable[str]) -> str:
    """Return a regular expression that matches exactly these paths."""
    return f"^(?:{'|'.join(map(re.escape, sorted(paths)))})$"


def most_common(values: Mapping[str, _T], preferred: _T) -> _T:
    """Return the preferred value if any path has it, else the most common one."""
    if preferred in values.values():
        return preferred
    counts: dict[_T, int] = {}
    for value in values.values():
        counts[value] = counts.get(value, 0) + 1
    return max(counts, key=counts.__getitem__)


def by_name(values: Mapping[str, _T], default: _T) -> dict[str, _T]:
    """Return a few keys that give paths their values, except for the default.

    A key is the name of layers that all have one value, or a regular expression for the paths
    that share it.
    """
    names: dict[str, set[_T]] = {}
    for path, value in values.items():
        names.setdefault(path.rpartition(".")[2], set()).add(value)
    keys: dict[str, _T] = {}
    rest: dict[_T, list[str]] = {}
    for path, value in values.items():
        name = path.rpartition(".")[2]
        if value == default:
            continue
        if len(names[name]) == 1:
            keys[re.escape(name)] = value
        else:
            rest.setdefault(value, []).append(path)
    return keys | {exactly(paths): value for value, paths in rest.items()}


def by_path(values: Mapping[str, _T], default: _T) -> dict[str, _T]:
    """Return the same as `by_name`, with names or whole paths as keys, for other readers."""
    keys: dict[str, _T] = {}
    for key, value in by_name(values, default).items():
        if not key.startswith("^"):
            keys[key] = value
            continue
        for path in (p for p, v in values.items() if v == value and re.match(key, p)):
            # the end of another path would name that one too
            longer = any(other.endswith(f".{path}") for other in values)
            keys[f"^{re.escape(path)}" if longer else path] = value
    return keys
