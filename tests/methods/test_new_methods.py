"""(IA)³, VeRA, LoHa, LoKr, ReFT and prefix tuning in models: merges, mixed batches, formats."""

import itertools

import pytest
import torch
from families import tiny_inputs
from made import made
from snapshots import refused, same_bits, snapshot

from adapterzoo import BatchSplit, IA3Config, Stack
from adapterzoo.errors import CheckpointError, ConfigError, StateError
from adapterzoo.testing import check_method

METHODS = {
    "ia3": "ia3[alpha=1.5]",
    "vera": "vera[r=4]",
    "dvora": "dvora[r=4]",
    "loha": "loha[r=2]",
    "lokr": "lokr[r=2]",
    "loreft": "loreft[r=2,suffix_positions=2,dropout=0.0]",
    "prefix": "prefix_tuning_flat[prefix_length=3]",
    "shifted": "prefix_tuning_flat[prefix_length=2,positions='shifted']",
    "gated prefix": "prefix_tuning[prefix_length=4,bottleneck_size=5,use_gating=True]",
}
OTHERS = {
    "lora": "lora[r=4]",
    "dora": "dora[r=2]",
    "boft": "boft",
    "seq_bn": "seq_bn[reduction_factor=4]",
    "unipelt": "unipelt",
}


def hidden(model, inputs, **kwargs):
    with torch.no_grad():
        return model(**inputs, **kwargs)[0]


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5"])
@pytest.mark.parametrize("method", ["ia3", "vera", "dvora", "loha", "lokr"])
def test_a_merged_one_computes_what_the_active_one_did(method, family):
    """GPT-2's biases are scaled with its keys and values; T5's gated layers have none."""
    config = METHODS[method]
    if method != "ia3" and family == "t5":
        config = f"{method}[r=4,intermediate_lora=True,output_lora=True]"
    model, inputs = made(family, a=config), tiny_inputs(family)
    plain = {key: t.clone() for key, t in model.state_dict().items()}
    base = hidden(model, inputs)
    model.set_active_adapters("a")
    expected = hidden(model, inputs)
    assert (expected - base).abs().max() > 1e-3
    model.merge_adapter("a")
    torch.testing.assert_close(hidden(model, inputs), expected, rtol=0, atol=1e-11)
    model.reset_adapter()
    assert all(same_bits(t, plain[key]) for key, t in model.state_dict().items())


def test_an_ia3_vector_at_the_last_layer_scales_its_output():
    """Only the convention of `adapters` has one there, so `output_lora` selects it."""
    config = IA3Config(selfattn_lora=False, output_lora=True)
    assert (config.convention, IA3Config().convention) == ("adapterhub", "paper")
    assert config == IA3Config(selfattn_lora=False, output_lora=True, convention="adapterhub")
    with pytest.raises(ConfigError, match=r"convention='paper'.* Write convention='adapterhub'"):
        IA3Config(output_lora=True, convention="paper")
    model = made("bert", a=config)
    before = {key: t.clone() for key, t in model.state_dict().items()}
    vectors = {path: module.ia3_l.detach() for path, module in model.adapter_modules("a")}
    layers = ("intermediate.dense", "output.dense")
    assert {*vectors} == {f"encoder.layer.{i}.{layer}" for i in (0, 1) for layer in layers}
    model.merge_adapter("a")
    for path, vector in vectors.items():
        layer = model.get_submodule(path)
        weight, bias = vector[:, None] * before[f"{path}.weight"], vector * before[f"{path}.bias"]
        torch.testing.assert_close(layer.weight.data, weight, rtol=0, atol=1e-15)
        torch.testing.assert_close(layer.bias.data, bias, rtol=0, atol=1e-15)


@pytest.mark.parametrize("method", ["loreft", "prefix", "shifted"])
def test_what_has_no_weight_is_not_merged(method):
    model = made("bert", a=METHODS[method], b="lora")
    kind = "a Reft adapter" if method == "loreft" else "a PrefixTuning adapter"
    with refused(model, StateError, f"merge_adapter('a'): {kind}", "Keep it active instead"):
        model.merge_adapter("a")


PAIRS = [*itertools.combinations(METHODS, 2), *itertools.product(METHODS, OTHERS)]


@pytest.mark.parametrize("family", ["bert", "llama"])
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_each_row_of_a_mixed_batch_is_the_row_alone(pair, family):
    """Rows with one, the other, none and both of two adapters, some padded."""
    one, other = pair
    every = METHODS | OTHERS
    model = made(family, one=every[one], other=every[other])
    inputs = tiny_inputs(family, batch=5)
    setups = ["one", "other", None, Stack("one", "other"), "one"]
    mixed = hidden(model, inputs, adapter_names=setups)
    for row, setup in enumerate(setups):
        model.set_active_adapters(setup)
        alone = hidden(model, {k: t[row : row + 1] for k, t in inputs.items()})[0]
        torch.testing.assert_close(mixed[row], alone, rtol=0, atol=1e-10)
    model.set_active_adapters(BatchSplit("one", "other", batch_sizes=[3, 2]))
    split = hidden(model, inputs)
    torch.testing.assert_close(split[:1], mixed[:1], rtol=0, atol=1e-10)
    model.set_active_adapters("other")
    torch.testing.assert_close(split[3:], hidden(model, inputs)[3:], rtol=0, atol=1e-10)


def test_all_methods_share_one_batch():
    every = METHODS | OTHERS
    names = {f"a{number}": config for number, config in enumerate(every.values())}
    model, inputs = made("bert", **names), tiny_inputs("bert", batch=len(names))
    mixed = hidden(model, inputs, adapter_names=[*names])
    for row, name in enumerate(names):
        model.set_active_adapters(name)
        alone = hidden(model, {k: t[row : row + 1] for k, t in inputs.items()})[0]
        torch.testing.assert_close(mixed[row], alone, rtol=0, atol=1e-10)


# what a format cannot say: the format, the config, a word of the reason
UNSAYABLE = [
    ("adapterhub", "ia3", "paper"),
    ("adapterhub", "vera[r=4]", "paper"),
    ("adapterhub", "dvora[r=4]", "paper"),
    ("adapterhub", "prefix_tuning_flat[prefix_length=3]", "paper"),
    ("adapterhub", "prefix_tuning_flat[convention='adapterhub',positions='shifted']", "positions"),
    ("adapterhub", "prefix_tuning_flat[convention='adapterhub',dtype='float32']", "dtype"),
    ("peft", "loreft", "a ReftConfig"),
    ("peft", "dvora[r=4]", "a DvoRAConfig"),
    ("peft", "vera[r=4,convention='adapterhub']", "convention='adapterhub'"),
    ("peft", "prefix_tuning_flat[prefix_length=3]", "positions='kept'"),
    ("peft", "prefix_tuning[use_gating=True,positions='shifted']", "use_gating=True"),
    ("peft", "mam", "a BnConfig"),
    ("peft", "unipelt", "use_gating=True"),
    ("peft", "ia3|lora", "one architecture"),
    ("peft", "ia3[target_modules=['word_embeddings']]", "an embedding"),
]


@pytest.mark.parametrize(("name", "config", "word"), UNSAYABLE, ids=lambda value: str(value)[:60])
def test_what_a_format_cannot_say_is_refused_by_name(name, config, word, tmp_path):
    model = made("bert", a=config)
    before = snapshot(model)
    with pytest.raises(CheckpointError) as raised:
        model.save_adapter(tmp_path / "x", "a", format=name)
    for part in (f"save_adapter({str(tmp_path / 'x')!r})", word, "format='native'"):
        assert part in str(raised.value)
    assert not (tmp_path / "x").exists()
    assert snapshot(model) == before


def test_a_vector_for_the_input_of_a_layer_conforms():
    """Also where the input shares memory between rows, which its product with a vector does not."""
    config = IA3Config(target_modules=["q_proj"], feedforward_modules=["q_proj"])
    check_method(config, only=["identity_at_birth", "merge_equals_forward", "stacks"])
