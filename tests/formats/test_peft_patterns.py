"""Names and patterns of layers: PEFT's own functions are the judge."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key

from adapterzoo.errors import CheckpointError
from adapterzoo.formats.peft.reading import (
    by_name,
    by_path,
    exactly,
    most_common,
    values_at,
)
from adapterzoo.patterns import short_names

PATHS = [
    f"{stack}.layers.{i}.{part}"
    for stack in ("model", "tower.model")
    for i in (0, 1, 11)
    for part in ("attn.q_proj", "attn.v_proj", "mlp.proj", "mlp.fc.proj")
]
CHOSEN = st.sets(st.sampled_from(PATHS), min_size=1)
PATTERNS = st.sampled_from(
    [*PATHS, "q_proj", "proj", "fc.proj", "layers.1.attn.q_proj", r"layers\.\d+\.mlp\.proj",
     r"^model\..*v_proj", "(attn|mlp).*proj", "q.proj", "tower.*", "nothing", "[qv]_proj",
     r"model.layers.(0|11).*?proj", ""]
)  # fmt: skip


def ends_with(path, name):
    """PEFT's rule for lists of targets."""
    return path == name or path.endswith(f".{name}")


@given(CHOSEN)
def test_short_names_name_the_chosen_and_nothing_else(chosen):
    names = short_names(chosen, PATHS)
    if names is None:
        # a path of the first stack is the end of one of the second
        assert any(path in chosen and f"tower.{path}" not in chosen for path in PATHS)
        return
    assert {p for p in PATHS if any(ends_with(p, name) for name in names)} == chosen
    assert not any(name.partition(".")[0].isdigit() for name in names)


@given(CHOSEN)
def test_one_expression_names_the_chosen_and_nothing_else(chosen):
    assert {path for path in PATHS if re.fullmatch(exactly(chosen), path)} == chosen
    # also as the key of a pattern
    assert {p for p in PATHS if get_pattern_key([exactly(chosen)], p) != p} == chosen


@given(st.dictionaries(st.sampled_from(PATHS), st.integers(1, 3), min_size=1), st.integers(1, 4))
def test_patterns_give_each_path_its_value(values, favourite):
    default = most_common(values, favourite)
    assert default in values.values()
    assert default == favourite or favourite not in values.values()
    for patterns in (by_name(values, default), by_path(values, default)):
        assert {p: patterns.get(get_pattern_key(patterns, p), default) for p in values} == values
        found = values_at("rank_pattern", patterns, values)
        assert {path: found.get(path, default) for path in values} == values


@given(st.lists(PATTERNS, unique=True))
def test_patterns_are_read_as_peft_reads_them(patterns):
    numbers = {pattern: number for number, pattern in enumerate(patterns)}
    expected = {p: get_pattern_key(patterns, p) for p in PATHS}
    found = values_at("rank_pattern", numbers, PATHS)
    assert found == {p: numbers[key] for p, key in expected.items() if key in numbers}


def test_a_key_that_does_not_compile_is_refused():
    with pytest.raises(CheckpointError, match=r"alpha_pattern has the key '\(': not a regular"):
        values_at("alpha_pattern", {"q_proj": 1, "(": 2}, ["a"])


@pytest.mark.parametrize(
    "pattern",
    [r"model\.layers\.\d+\.self_attn\.(q|k|v|o)_proj", r".*layers\.(0|1|2)\.mlp\..*",
     r".*?(attn|mlp).*?proj", r"[a-z]+\.[0-9]{1,2}\.x", "(self_attn)?.q_proj", r"a\+b", "[+*]x"],
)  # fmt: skip
def test_expressions_that_people_write_run(pattern):
    values_at("rank_pattern", {pattern: 1}, [f"model.layers.{i}.mlp.up" for i in range(99)])


def test_many_keys_take_no_time():
    # one key for each layer, as EVA writes them
    paths = [f"model.layers.{i}.{part}_proj" for i in range(80) for part in "qkvogud"]
    values = {path: number for number, path in enumerate(paths)}
    assert values_at("rank_pattern", values, paths) == values
    assert len(by_name({path: n % 5 for path, n in values.items()}, 0)) == 4
