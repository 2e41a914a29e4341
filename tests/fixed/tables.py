"""The committed tables: how they are read, compared and written."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from . import files, names, values
from .values import is_sums, same

DATA = Path(__file__).parents[1] / "data"
# row to what computes it
PARTS = {"files": files.rows, "values": values.rows, "names": names.rows}
# levels of a table that have a line for each entry
_LEVELS = {"files": 9, "values": 2, "names": 2}


def file_of(part: str) -> Path:
    """Where a table is committed."""
    return DATA / f"fixed_{part}.json"


def read(part: str) -> dict[str, Any]:
    """The committed table."""
    found: dict[str, Any] = json.loads(file_of(part).read_text(encoding="utf-8"))
    return found


def differences(stored: Any, found: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """What is not as in the table, a line for each entry."""
    if isinstance(stored, Mapping) and isinstance(found, Mapping):
        for key in sorted({*stored, *found}):
            below = (*path, key)
            if key not in found:
                yield f"{' / '.join(below)}: gone; was {_shown(stored[key])}"
            elif key not in stored:
                yield f"{' / '.join(below)}: new; {_shown(found[key])}"
            else:
                yield from differences(stored[key], found[key], below)
    elif not same(stored, found):
        yield f"{' / '.join(path)}: {_shown(found)}; was {_shown(stored)}"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 300 else f"{text[:300]}…"


def write(part: str, found: Mapping[str, Any]) -> None:
    """Write a table; an entry that has not changed keeps its digits."""
    old = read(part) if file_of(part).exists() else {}
    table = _merged(old, found)
    file_of(part).write_text(_text(table, _LEVELS[part]) + "\n", encoding="utf-8")


def _merged(stored: Any, found: Any) -> Any:
    if isinstance(found, Mapping):
        old = stored if isinstance(stored, Mapping) else {}
        return {key: _merged(old.get(key), value) for key, value in found.items()}
    if is_sums(found):
        return stored if same(stored, found) else _rounded(found)
    return found


def _rounded(sums: list[float]) -> list[float]:
    # digits that rounding changes, counted from the norm
    digits = 12 - math.ceil(math.log10(sums[0])) if sums[0] else 0
    return [round(x, digits) for x in sums]


def _text(value: Any, levels: int, indent: str = "") -> str:
    if not (levels and isinstance(value, Mapping) and value):
        return json.dumps(value, ensure_ascii=False)
    deeper = indent + " "
    lines = (
        f"{deeper}{json.dumps(key, ensure_ascii=False)}: {_text(inner, levels - 1, deeper)}"
        for key, inner in sorted(value.items())
    )
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
