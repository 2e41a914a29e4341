"""Every registered method does what every method must: the checks of `adapterzoo.testing`."""

import pytest
from architectures.small import small

from adapterzoo.config import AdapterConfig, config_strings
from adapterzoo.errors import UnknownNameError
from adapterzoo.testing import KINDS, ConformanceError, cases, check_method, checks, report

# a union is made of others: this one meets itself at no layer and at one layer
UNIONS = ("seq_bn|lora", "lora[attn_matrices=['q'],dropout=0.1]|lora[output_lora=True]")


def distinct():
    """The package's config strings, and unions; of strings for equal configs, the first."""
    found: dict[str, AdapterConfig] = {}
    for text in [*(s for s in config_strings if s != "union"), *UNIONS]:
        config = AdapterConfig.load(small(text))
        if text not in UNIONS and len(config.members) > 1:
            continue
        if type(config).__module__.startswith("adapterzoo.") and config not in found.values():
            found[text] = config
    return found


CONFIGS = distinct()


@pytest.mark.parametrize("check", checks)
@pytest.mark.parametrize("text", CONFIGS)
def test_method(text, check):
    failures = report(CONFIGS[text], only=[check])
    assert not failures, "\n".join(map(str, failures))


def test_every_kind_of_layer_is_tried():
    # a method that refuses a kind of layer would be left out without a word
    kinds = {text: {case.kind for case in cases(config)} for text, config in CONFIGS.items()}
    for text in ("prefix_tuning", "prefix_tuning_flat", "prompt_tuning"):
        assert kinds.pop(text) == {"attention"}
    assert all(found >= set(KINDS) - {"embedding"} for found in kinds.values()), kinds
    # where layers can be named
    named = {text for text, config in CONFIGS.items() if "target_modules" in dir(config)}
    assert {text for text, found in kinds.items() if "embedding" in found} <= named
    assert "embedding" in kinds["lora"]


def test_a_config_that_fits_nowhere_is_an_error():
    with pytest.raises(ConformanceError, match="fits no model of the suite"):
        check_method("lora[target_modules=['no_such_layer']]")


def test_an_unknown_check_is_an_error_with_the_near_one():
    with pytest.raises(UnknownNameError, match="Did you mean 'gradients'"):
        report("lora", only=["gradient"])
