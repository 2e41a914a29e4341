"""Regular expressions in configs."""

from __future__ import annotations

import pytest

from adapterzoo import BOFTConfig, DoRAConfig, LoRAConfig
from adapterzoo.errors import ConfigError

WRITTEN = [
    r".*\.layers\.\d+\.self_attn\.(q|k|v|o)_proj", r".*layers\.(0|1|2)\.mlp\..*", ".*query",
    r".*(encoder|layers|h)\..*\d+\..*(query|dense|_proj|c_\w+)", "^(?:a\\.b|c\\.d)$", r"a\+b",
    "^(?:" + "|".join(rf"model\.layers\.{i}\.mlp\.up_proj" for i in range(999)) + ")$",
    "(?i).*QUERY", "(?s:.*query)", r"(layers\.\d+\.)+query",
]  # fmt: skip


@pytest.mark.parametrize("pattern", WRITTEN)
def test_expressions_that_people_write_are_legal(pattern):
    for make in (LoRAConfig, DoRAConfig, BOFTConfig):
        assert make(target_modules=pattern).target_modules == pattern
    assert LoRAConfig(rank_pattern={pattern: 3}).rank_pattern == {pattern: 3}


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules", "rank_pattern"])
def test_what_does_not_compile_is_refused(field):
    value = {"(": 3} if field == "rank_pattern" else "("
    with pytest.raises(ConfigError, match=rf"LoRAConfig\({field}='\('\): not a regular"):
        LoRAConfig(**{field: value})
