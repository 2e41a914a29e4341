"""Regular expressions in configs: those that people write run, hostile ones are refused."""

from __future__ import annotations

import math
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapterzoo import BOFTConfig, DoRAConfig, LoRAConfig
from adapterzoo.config import AdapterConfig
from adapterzoo.errors import ConfigError
from adapterzoo.patterns import ways

HOSTILE = [
    "(a*)*", "(.*a){20}", "(x+x+)+y", r"(a)\1", "(?P<a>b)(?P=a)", "a?" * 40 + "a" * 40,
    ".*" * 9 + "x", "(a|a)(a|a)" * 20, "((ab)*c)*", r"\w+" * 9, "(a|b|ab)*c",
    "a*" * 170, "a*" * 300, "(?x)(a+) +b", "(?ix:(a+) +b)",
]  # fmt: skip
WRITTEN = [
    r".*\.layers\.\d+\.self_attn\.(q|k|v|o)_proj", r".*layers\.(0|1|2)\.mlp\..*", ".*query",
    r".*(encoder|layers|h)\..*\d+\..*(query|dense|_proj|c_\w+)", "^(?:a\\.b|c\\.d)$", r"a\+b",
    "^(?:" + "|".join(rf"model\.layers\.{i}\.mlp\.up_proj" for i in range(999)) + ")$",
    "(?i).*QUERY", "(?s:.*query)",
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "field", "pattern"),
    [
        *((LoRAConfig, "target_modules", pattern) for pattern in HOSTILE),
        *((make, "exclude_modules", HOSTILE[0]) for make in (LoRAConfig, DoRAConfig)),
        *((BOFTConfig, field, HOSTILE[1]) for field in ("target_modules", "exclude_modules")),
    ],
)
def test_expressions_that_could_search_for_hours_are_refused(make, field, pattern):
    with pytest.raises(ConfigError) as caught:
        make(**{field: pattern})
    message = str(caught.value)
    assert f"{make.__name__}({field}={pattern[:80]!r}): the expression could search for" in message
    assert f"Write names of layers instead: {field}=" in message
    # the way of a file is the same
    document = {**make().to_dict(), field: pattern}
    with pytest.raises(ConfigError, match="could search for hours"):
        AdapterConfig.from_dict(document)


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_keys_of_patterns_too(field):
    for pattern in HOSTILE:
        with pytest.raises(ConfigError, match="could search for hours"):
            LoRAConfig(**{field: {"query": 4, pattern: 2}})
    # many that are fast take as long as one that is slow
    many = {".*" * 5 + f"{i}": 2 for i in range(99)}
    with pytest.raises(ConfigError, match="could search for hours"):
        LoRAConfig(**{field: many})


@pytest.mark.parametrize("pattern", WRITTEN)
def test_expressions_that_people_write_are_legal(pattern):
    for make in (LoRAConfig, DoRAConfig, BOFTConfig):
        assert make(target_modules=pattern).target_modules == pattern
    assert LoRAConfig(rank_pattern={pattern: 3}).rank_pattern == {pattern: 3}


# parts of expressions that, joined, are always legal
PART = st.sampled_from(
    ["a", "b", ".", "a*", "b+", ".*", "a?", "(a|b)", "(ab|a)?", "[ab]*?", "a{1,9}"]
)


@settings(deadline=None, derandomize=True)
@given(st.lists(PART, min_size=1, max_size=5).map("".join))
def test_what_is_bounded_comes_to_an_end(pattern):
    assert not math.isinf(ways(pattern, 30))
    start = time.process_time()
    re.fullmatch(pattern, "ab" * 14 + "x")
    # a step takes far less, on any machine; without a bound it would be hours
    assert time.process_time() - start < 2.0 + ways(pattern, 30) * 1e-5
