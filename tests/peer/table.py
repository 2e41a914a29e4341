"""Counts of what passed and failed, by kind, and the reasons: results.md."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import rules
from .facts import FACTS

HEAD = """# The peer's tests, scripts and notebooks on adapterzoo

Written by `python -m tests.peer table`; `tests/peer` says how each row was made, and
`tests/peer/rules.py` what the kinds of failures are.
"""


PROGRAMS = ("scripts", "notebooks", "pages")


def read(file: Path) -> list[dict[str, Any]]:
    """The lines of one run."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def render(folder: Path) -> str:
    """The page for all runs below a folder, `strict/bert.jsonl` and so on."""
    runs = {
        (file.parent.name, file.stem): read(file)
        for file in sorted(folder.glob("*/*.jsonl"), key=lambda file: (file.parent.name, file.stem))
    }
    tests = {key: lines for key, lines in runs.items() if key[1] not in PROGRAMS}
    lines = [HEAD, *_counts(tests), "", *_reasons(tests)]
    for name in PROGRAMS:
        if ("strict", name) in runs:
            lines += ["", *_programs(name, runs["strict", name])]
    return "\n".join(lines) + "\n"


def _counts(runs: Mapping[tuple[str, str], Sequence[dict[str, Any]]]) -> Iterator[str]:
    yield "| mode | run | passed | of | % | " + " | ".join(rules.KINDS[1:]) + " | skipped |"
    yield "| --- " * (5 + len(rules.KINDS)) + "|"
    modes = dict.fromkeys(mode for mode, _ in runs)
    for mode in modes:
        tests = {name: lines for (of, name), lines in runs.items() if of == mode}
        for name, lines in tests.items():
            yield _row(mode, name, lines)
        if len(tests) > 1:
            yield _row(f"**{mode}**", "**all**", [line for each in tests.values() for line in each])


def _row(mode: str, name: str, tests: Sequence[dict[str, Any]]) -> str:
    outcomes = Counter(test["outcome"] for test in tests)
    kinds = Counter(rules.explain(t).kind for t in tests if t["outcome"] == "failed")
    skipped = outcomes["skipped"] + kinds.pop("skipped", 0)
    passed, failed = outcomes["passed"], kinds.total()
    share = f"{100 * passed / (passed + failed):.1f}" if passed + failed else "–"
    cells = [mode, name, passed, passed + failed, share]
    cells += [*(kinds[kind] for kind in rules.KINDS[1:]), skipped]
    return "| " + " | ".join(map(str, cells)) + " |"


def _reasons(runs: Mapping[tuple[str, str], Sequence[dict[str, Any]]]) -> Iterator[str]:
    counts: dict[tuple[str, str], Counter[str]] = {}
    for (mode, _), tests in runs.items():
        for test in tests:
            if test["outcome"] == "failed":
                rule = rules.explain(test)
                counts.setdefault((rule.kind, rule.reason), Counter())[mode] += 1
    modes = list(dict.fromkeys(mode for mode, _ in runs))
    yield "| kind | why | " + " | ".join(modes) + " |"
    yield "| --- " * (2 + len(modes)) + "|"
    order = sorted(counts, key=lambda key: (rules.KINDS.index(key[0]), -counts[key].total()))
    for kind, reason in order:
        cells = [kind, reason.replace("|", "\\|")]
        cells += [str(counts[kind, reason][mode]) for mode in modes]
        yield "| " + " | ".join(cells) + " |"


def _programs(name: str, found: Sequence[dict[str, Any]]) -> Iterator[str]:
    passed = sum(program["outcome"] == "passed" for program in found)
    yield f"## The peer's {name}: {passed} of {len(found)} run to their end"
    yield ""
    columns = ["ran", "failed", "no code"] if name == "pages" else ["ran", *FACTS]
    yield "| | " + " | ".join([*columns, "why not"]) + " |"
    yield "| --- " * (len(columns) + 2) + "|"
    for program in found:
        if name == "pages":
            cells = [str(program["blocks"][column]) for column in columns]
        else:
            ran = "yes" if program["outcome"] == "passed" else "no"
            cells = [ran, *(_fact(program["facts"].get(fact, "")) for fact in FACTS)]
        why = "; ".join(_why(program))
        yield f"| {program['id'].partition('::')[2]} | {' | '.join(cells)} | {why} |"


def _why(program: Mapping[str, Any]) -> Iterator[str]:
    for failure in program["failures"]:
        rule = rules.explain({**program, "failures": [failure]})
        block = f"block {failure['subtest']}, " if "blocks" in program else ""
        yield f"{block}{rule.kind}: {rule.reason}".replace("|", "\\|")


def _fact(words: str) -> str:
    """How a fact was seen, without its numbers."""
    seen = [
        how for how in ("by a second run", "into a fresh model", "from the Hub") if how in words
    ]
    return ", ".join(seen) or ("yes" if words else "–")
