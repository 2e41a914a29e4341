"""A union of any two methods is a `Stack` of the two, in a model and in files."""

import contextlib
import itertools

import pytest
import torch
from families import tiny_config, tiny_inputs
from snapshots import adapter_bits, refused
from transformers import AutoModel

from adapterzoo import AdapterConfig, ConfigUnion, Stack, init
from adapterzoo.config import config_strings
from adapterzoo.errors import CheckpointError, ConfigError

METHODS = {
    "lora": "lora[r=3]",
    "dora": "dora[r=3]",
    "boft": "boft",
    "vera": "vera[r=3,convention='adapterhub']",
    "ia3": "ia3[convention='adapterhub']",
    "seq_bn": "seq_bn[reduction_factor=4]",
    "double_seq_bn": "double_seq_bn[reduction_factor=8]",
    "par_bn": "par_bn[reduction_factor=8]",
    "mh only": "double_seq_bn[output_adapter=False,reduction_factor=8]",
    "first block": "seq_bn[leave_out=[1],reduction_factor=8]",
    "compacter": "compacter[reduction_factor=4]",
    "compacter++": "compacter++[reduction_factor=4]",
    "seq_bn_inv": "seq_bn_inv[reduction_factor=8]",
    "noreft": "noreft[r=2,dropout=0.0]",
    "prefix_tuning": "prefix_tuning_flat[prefix_length=3,convention='adapterhub']",
    "prompt_tuning": "prompt_tuning[prompt_length=2,joins='embeddings']",
}
PAIRS = [*itertools.combinations(METHODS, 2)]
# both change the input of one norm of BERT, the same embeddings, or are one in another
MEET = {
    frozenset(pair)
    for group in (("seq_bn", "first block", "compacter++", "seq_bn_inv"),)
    for pair in itertools.combinations(group, 2)
}


@pytest.fixture(scope="module")
def base():
    models = {}

    def make(family):
        if family not in models:
            torch.manual_seed(0)
            models[family] = init(AutoModel.from_config(tiny_config(family)).double().eval())
        model = models[family]
        for name in [*model.adapters_config]:
            model.delete_adapter(name)
        return model

    return make


def fill(model, name):
    """Values that only follow from shapes, so that equal adapters have equal ones."""
    for _, module in model.adapter_modules(name):
        for tensor in module.state_dict().values():
            values = torch.arange(tensor.numel(), dtype=torch.float64).add(1).sin() * 0.3
            tensor.copy_(values.view(tensor.shape))


def hidden(model, setup):
    model.set_active_adapters(setup)
    with torch.no_grad():
        return model(**tiny_inputs(model.config.model_type))[0]


@pytest.mark.parametrize("text", [name for name in config_strings if name != "union"])
def test_a_method_twice_is_a_stack_or_refused(text, base):
    model = base("bert")
    with contextlib.suppress(ConfigError):
        model.add_adapter("u", f"{text}|{text}")
    if "u" not in model.adapters_config:
        return
    for name in ("a", "b"):
        model.add_adapter(name, text)
    for name in ("u", "a", "b"):
        fill(model, name)
    torch.testing.assert_close(
        hidden(model, "u"), hidden(model, Stack("a", "b")), rtol=0, atol=1e-9
    )


# files of NoReFT do not say that they are not DiReFT
@pytest.mark.filterwarnings("ignore:adapter_config.json fits")
@pytest.mark.parametrize(("first", "second"), PAIRS, ids=["|".join(pair) for pair in PAIRS])
def test_a_union_is_a_stack(first, second, base, tmp_path):
    family = "gpt2" if {first, second} <= {"seq_bn", "compacter++", "lora", "prefix_tuning"} else (
        "bert"
    )  # fmt: skip
    model = base(family)
    one, other = AdapterConfig.load(METHODS[first]), AdapterConfig.load(METHODS[second])
    union = AdapterConfig.load(f"{METHODS[first]}|{METHODS[second]}")
    assert union == ConfigUnion(one, other)
    assert (union[0], union[1]) == (one, other)
    if family == "bert" and frozenset((first, second)) in MEET:
        with pytest.raises(ConfigError, match=r"Stack\('a', 'b'\)"):
            model.add_adapter("u", union)
        assert "u" not in model.adapters_config
        return
    for name, config in {"u": union, "a": one, "b": other}.items():
        model.add_adapter(name, config)
        fill(model, name)
    found = hidden(model, "u")
    torch.testing.assert_close(found, hidden(model, Stack("a", "b")), rtol=0, atol=1e-9)
    for name in ("a", "b", None):
        alone = hidden(model, name)
        assert found.shape != alone.shape or (found - alone).abs().max() > 1e-6
    for form in ("native", "adapterhub"):
        refusal = ""
        try:
            model.save_adapter(tmp_path / form, "u", format=form)
        except CheckpointError as error:
            refusal = str(error)
        if refusal:
            assert form == "adapterhub"
            assert "format='native'" in refusal
            continue
        model.load_adapter(tmp_path / form, load_as=form)
        assert adapter_bits(model, form) == adapter_bits(model, "u")
        assert torch.equal(hidden(model, form), found)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        # one method of adapters under one name
        ("lora[r=2]|ia3[convention='adapterhub']", "refuses unions"),
        ("double_seq_bn[output_adapter=False]|double_seq_bn[mh_adapter=False]|lora|lora[r=2]",
         "refuses unions"),
        # the cross-attention does not count
        ("seq_bn[reduction_factor=8]|seq_bn[output_adapter=False,cross_adapter=True]",
         "refuses unions"),
        ("boft|seq_bn", "not a method of adapters"),
    ],
)  # fmt: skip
def test_unions_that_adapters_refuses_are_not_written(text, says, base, tmp_path):
    model = base("t5" if "cross" in text else "bert")
    model.add_adapter("u", text)
    with refused(model, CheckpointError, says, "format='native'"):
        model.save_adapter(tmp_path / "out", "u", format="adapterhub")
    assert not (tmp_path / "out").exists()


def test_bottlenecks_of_other_blocks_are_written(base, tmp_path):
    """With leave_out adapters allows them."""
    model = base("gpt2")
    model.add_adapter("u", "seq_bn[leave_out=[0]]|par_bn[leave_out=[1]]|lora")
    fill(model, "u")
    model.save_adapter(tmp_path, "u", format="adapterhub")
    model.load_adapter(tmp_path, load_as="v")
    assert adapter_bits(model, "u") == adapter_bits(model, "v")
    assert torch.equal(hidden(model, "u"), hidden(model, "v"))
