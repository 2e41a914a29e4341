"""The page `docs/peft-files.md`: every method of PEFT in every family, in both directions.

`make peft-files` runs its cells and writes it; `test_peft_table.py` runs them again and compares.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import peft
import transformers
from peft_cells import CANNOT, NEAR_IN_FLOAT32, OK, REFUSED, WRONG, Row, is_known, run
from peft_methods import CASES, FAMILIES

PAGE = Path(__file__).parents[1] / "docs" / "peft-files.md"
# what this library will never train, by decision; the others are not here
NEVER = {
    "ADAPTION_PROMPT", "FOURIERFT", "FROD", "HRA", "LILY", "OSF", "POLY", "RANDLORA", "TINYLORA",
    "UNILORA", "VBLORA", "WAVEFT", "XLORA",
}  # fmt: skip
HERE = ["type", "with", *FAMILIES]
ALONE = ["type", "with", "trained here", *FAMILIES]
BACK = f"({OK})"

HEAD = f"""# PEFT's files

This page shows which adapters of PEFT load here and which adapters of this library load in PEFT. It
covers every config class of PEFT {peft.__version__}, with its main options, on tiny models with
random weights. `make peft-files` writes the page and runs every cell; `tests/test_peft_table.py`
runs them again and compares.

Each cell has two marks, one for each direction. The first: PEFT creates an adapter with random
values and saves it, and it is loaded here. The second: an adapter is created here from the same
PEFT config with random values and saved, and PEFT loads it; the adapter of the first mark is also
saved again here, and PEFT loads that file. The logits of both libraries must agree to 1e-10 in
float64, and to 1e-5 where a file holds a product that is rounded to float32 (PiSSA, OLoRA,
`prefix_projection`). Every adapter changes the logits by more than 1e-3. LoftQ is left out, because
PEFT needs a GPU to create it.

- {OK} equal logits. {BACK}: a loaded adapter can be saved for PEFT, but such a config cannot be
  added here.
- {REFUSED} refused by name, with a reason: see below.
- {WRONG} different logits, or an error that is not the library's.
- {CANNOT} PEFT itself cannot do it; if a second mark follows, the adapter is written here as plain
  LoRA.

"""

_SECOND = """
## Methods that only PEFT has

These methods are refused by name in both directions. The marks are those of
[`adapterzoo convert --to lora`](cli.md#to-lora), which converts PEFT's file through an installed
PEFT. {ok}: the LoRA gives PEFT's logits, and the relative error of all weights is below {near:g}
(PEFT computes these methods in float32). {refused}: refused, because the adapter is more than a
change of weights, or PEFT cannot merge it. None of these methods can be trained here; "never" in
the third column means that this is a decision.

"""

_WHY = """
## Reasons

Each message is listed once, as it reads for one of the families, with the rows that give it. Lists
are shortened.

"""


def marks(row: Row) -> list[str]:
    """What a row shows for each family."""
    found = []
    for first, second, third in row.values():
        if third is not None or (first.mark == CANNOT and second.mark == CANNOT):
            found.append(CANNOT if third is None else third.mark)
        else:
            back = BACK if second.written and second.reason else second.mark
            found.append(f"{first.mark} {back}")
    return found


def becomes(row: Row) -> set[str]:
    """The methods that the row's files have when they are written again."""
    return {second.written for _, second, _ in row.values()} - {"", "read"}


Shown = dict[str, list[str]]
"""The marks by row, `LORA use_dora`."""


def read(page: str) -> tuple[Shown, Shown]:
    """The rows of methods that are here, and of those that only PEFT has."""
    tables: dict[int, Shown] = {len(HERE): {}, len(ALONE): {}}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")] if line[:2] == "| " else []
        if len(cells) in tables and cells[0].isupper():
            name = f"{cells[0]} {cells[1].strip('`')}".strip()
            tables[len(cells)][name] = cells[-len(FAMILIES) :]
    return tables[len(HERE)], tables[len(ALONE)]


def counts(here: Shown, alone: Shown) -> list[str]:
    """A table of the numbers of marks, from the tables."""
    titles = ["", *(f"{OK} {REFUSED} {WRONG} {CANNOT}".split())]
    lines = [titles, ["---"] * len(titles)]
    both = [cell.split() for row in here.values() for cell in row]
    directions = {
        "PEFT's files here": [cell[0] for cell in both],
        "our files in PEFT": [cell[-1].strip("()") for cell in both],
        "converted": [cell for row in alone.values() for cell in row],
    }
    for name, found in directions.items():
        lines.append([name, *(str(found.count(mark)) for mark in titles[1:])])
    return [_line(line) for line in lines]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def render(rows: dict[str, Row]) -> str:
    """The page."""
    here, alone = [HERE, ["---"] * len(HERE)], [ALONE, ["---"] * len(ALONE)]
    into: dict[str, str] = {}
    for case in CASES:
        row = rows[case.name]
        variant = f"`{case.variant}`" if case.variant else ""
        if is_known(case.kind):
            here.append([case.kind, variant, *marks(row)])
        else:
            trained = "never" if case.kind in NEVER else "no"
            alone.append([case.kind, variant, trained, *marks(row)])
        for kind in becomes(row):
            if case.kind != kind:
                into[case.kind] = kind
    tables = ["\n".join(map(_line, lines)) for lines in (here, alone)]
    numbers = "\n".join(counts(*read("\n".join(tables))))
    read_as = ", ".join(f"{kind} becomes {own}" for kind, own in sorted(into.items()))
    second = _SECOND.format(ok=OK, refused=REFUSED, near=NEAR_IN_FLOAT32)
    return (
        f"{HEAD}{numbers}\n\nSaved again as another method: {read_as}.\n\n{tables[0]}\n{second}"
        f"{tables[1]}\n{_WHY}" + "\n".join(reasons(rows)) + "\n"
    )


def reasons(rows: dict[str, Row]) -> list[str]:
    """Lines that say why cells are not green, one for each message."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for case in CASES:
        for family, (first, second, third) in rows[case.name].items():
            for what, cell in (("here", first), ("in PEFT", second), ("converted", third)):
                # a reason of PEFT, and the one for its files, say enough
                if cell is None or not cell.reason:
                    continue
                if what == "in PEFT" and first.mark in (CANNOT, REFUSED) and cell.mark != WRONG:
                    continue
                text = _short(cell.reason, case.kind)
                by = "PEFT itself" if cell.mark == CANNOT else what
                found.setdefault((by, text), {}).setdefault(case.name, []).append(family)
    merged: dict[tuple[str, str], tuple[str, dict[str, list[str]]]] = {}
    for (by, text), places in found.items():
        # the names of layers differ between families
        _, known = merged.setdefault((by, _stem(text)), (text, {}))
        for name, families in places.items():
            known.setdefault(name, []).extend(families)
    return [
        f"- {by}: `{text}` – {'; '.join(_place(*place) for place in places.items())}"
        for (by, _), (text, places) in sorted(merged.items(), key=lambda each: each[0][0])
    ]


def _stem(text: str) -> str:
    """The words of a message of ours without values; the start of another one."""
    if re.match(r"[A-Z]\w+: ", text):
        return text[:70]
    return re.sub(r"=.*[\]}…]: |'[^']*'", "", text)[:150]


def _place(name: str, families: list[str]) -> str:
    shown = f"`{name}`"
    return shown if len(families) == len(FAMILIES) else f"{shown} ({', '.join(families)})"


def _short(text: str, kind: str) -> str:
    """A message without the call, and without lists of methods."""
    text = re.sub(r"^(CheckpointError|ConfigError|SiteError|StateError): ", "", text)
    text = re.sub(r"^(load_adapter|add_adapter|save_adapter)\([^)]*\): ", "", text)
    text = re.sub(r"^adapterzoo: convert … …: ", "", text)
    text = re.sub(r"Methods of PEFT that (exist here|can be added): .*?\. ", "", text)
    text = re.sub(rf"\b{kind}\b", "…", text) if "no such method" in text else text
    text = text.replace("`", "'")
    return text if len(text) <= 400 else f"{text[:400].rpartition(' ')[0]} …"


def main() -> int:
    """Run all cells and write the page; 1 if one is wrong."""
    transformers.logging.set_verbosity_error()
    rows = {case.name: run(case) for case in CASES}
    PAGE.write_text(render(rows), encoding="utf-8")
    wrong = [
        f"{name}, {family}: {cell.reason}"
        for name, row in rows.items()
        for family, found in row.items()
        for cell in found
        if cell is not None and cell.mark == WRONG
    ]
    sys.stderr.write("".join(f"{line}\n" for line in wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
