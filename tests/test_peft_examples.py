"""The harness that runs PEFT's documented examples: what it changes, compares and counts."""

from __future__ import annotations

from typing import Any

import pytest
from peft_examples import programs, table


def test_the_import_changes_and_nothing_else() -> None:
    source = "import peft\nfrom peft import X  # from peft\n    from peft.utils import Y\npeft.Z\n"
    assert programs.changed(source, "peft") == source
    assert programs.changed(source, "adapterzoo.peft") == (
        "import adapterzoo.peft as peft\nfrom adapterzoo.peft import X  # from peft\n"
        "    from adapterzoo.peft.utils import Y\npeft.Z\n"
    )


def seen(**more: Any) -> dict[str, Any]:
    file = {"adapter_config.json": {"r": 8}, "adapter_model.safetensors": {"a": [[2, 3], 0.5]}}
    base: dict[str, Any] = {
        "counts": ["trainable params: 1,024 || all params: 2"], "losses": [1.0, 0.5],
        "tokens": [[1, 2]], "outputs": [[[2, 3], 0.25]], "files": [file],
    }  # fmt: skip
    return base | more


FILE = seen()["files"][0]


@pytest.mark.parametrize(
    "other",
    [
        seen(counts=["trainable params: 1,025 || all params: 2"]),
        seen(losses=[1.0, 0.51]),
        seen(losses=[1.0]),
        seen(tokens=[[1, 3]]),
        seen(outputs=[[[2, 3], 0.26]]),
        seen(files=[]),
        seen(files=[{**FILE, "adapter_config.json": {"r": 4}}]),
        seen(files=[{**FILE, "adapter_model.safetensors": {"b": [[2, 3], 0.5]}}]),
        seen(files=[{**FILE, "adapter_model.safetensors": {"a": [[3, 2], 0.5]}}]),
        seen(files=[{**FILE, "adapter_model.safetensors": {"a": [[2, 3], 0.6]}}]),
    ],
)
def test_each_difference_is_found(other: dict[str, Any]) -> None:
    assert not any("≠" in cell for cell in table.compare(seen(), seen()))
    assert sum("≠" in cell for cell in table.compare(seen(), other)) == 1


@pytest.mark.parametrize(
    ("theirs", "mine", "word"),
    [
        ({}, {}, "the same"),
        ({"3": ["OSError: x", ""]}, {}, "the same"),
        ({"3": ["OSError: x", ""]}, {"3": ["KeyError: x", ""]}, "the same"),
        ({"3": ["OSError: x", ""]}, {"3": ["adapterzoo.errors.HubError: x", ""]}, "refused"),
        ({}, {"3": ["adapterzoo.errors.ConfigError: x", ""]}, "refused"),
        ({}, {"3": ["ImportError: adapterzoo.peft has no 'X'", ""]}, "refused"),
        ({}, {"3": ["TypeError: an int is not a float", ""]}, "stopped"),
    ],
)
def test_outcomes_have_words(theirs: Any, mine: Any, word: str) -> None:
    rows = [{"errors": errors, "seen": seen()} for errors in (theirs, mine)]
    assert table._row(*rows)[0] == word


def test_blocks_of_pages_are_run_one_by_one() -> None:
    known = {"__name__": "x", "_library": programs, "a": 1}
    assert programs._block("b = a + 1\n", "page, block 0", known) is None
    assert known["b"] == 2
    found = programs._block("c = 1\nraise OSError(a)\n", "page, block 1", known)
    assert found == ["OSError: 1", "2"]
