"""Every registered method does what every method must: the checks of `adapterzoo.testing`."""

import pytest
from architectures.small import small
from swept import all_but

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


# checks that take seconds: one of each way to act
LONG = {
    "compiles", "device_follows", "dtype_follows", "gradcheck", "identity_at_birth",
    "initial_values", "merge_equals_forward",
}  # fmt: skip
ACTING = {"lora", "dora", "double_seq_bn", "compacter", "boft", "loreft", "prefix_tuning"}
EACH = [(text, check) for text in CONFIGS for check in checks]
QUICK = [pair for pair in EACH if pair[1] not in LONG or pair[0] in ACTING]


@pytest.mark.parametrize(("text", "check"), all_but(QUICK, EACH))
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
    with pytest.raises(ConformanceError, match=r"fits no model of the suite.*'no_such_layer'"):
        check_method("lora[target_modules=['no_such_layer']]")
    with pytest.raises(ConformanceError, match=r"call report_on\. It is refused there: add"):
        report("lora[target_modules=['no_such_layer']]", kinds=("embedding", "conv1d"))
    # a config with names is not tried on embeddings
    with pytest.raises(ConformanceError, match=r"call report_on\.$"):
        report("lora[target_modules=['embed']]", kinds=["embedding"])


def test_an_unknown_check_is_an_error_with_the_near_one():
    with pytest.raises(UnknownNameError, match="Did you mean 'gradients'"):
        report("lora", only=["gradient"])
