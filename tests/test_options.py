"""No dead options: each field of each config changes what is built or computed, or is refused."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures.small import small
from families import tiny_config, tiny_inputs
from snapshots import bits

from adapterzoo import AutoAdapterModel, Fuse
from adapterzoo.config import AdapterConfig, architectures, config_strings
from adapterzoo.errors import AdapterZooError
from adapterzoo.heads import HeadConfig, head_types
from adapterzoo.methods.fusion import AdapterFusionConfig

# other values by the name of the field, where they are not to be guessed from the default
VALUES: dict[str, Any] = {
    "alora_invocation_tokens": [5, 6],
    "alpha_pattern": {"query": 3},
    "attn_matrices": ("k",),
    "bias": "lora_only",
    "boft_block_num": 4,
    "boft_block_size": 8,
    "convention": "peft",
    "dropout_prob": 0.5,
    "dtype": "float64",
    "embedding_size": 16,
    "exclude_modules": ["query"],
    "hidden_scale": 2.0,
    "hypercomplex_nonlinearity": "normal",
    "init_options": {"corda_method": "kpm"},
    "init_weights_seed": 7,
    "inv_adapter": "nice",
    "inv_adapter_reduction_factor": 2,
    "label2id": {"no": 0, "yes": 1},
    "layer_norm_eps": 0.5,
    "feedforward_modules": ["intermediate.dense"],
    "prompt_init": "from_string",
    "prompt_init_text": "a text",
    "layers": (1,),
    "layers_to_transform": [1],
    "leave_out": (1,),
    "logit_divisor": 2.0,
    "logit_scale": 2.0,
    "logit_softcap": 2.0,
    "modules_to_save": ["intermediate"],
    "non_linearity": "tanh",
    "oft_block_size": 8,
    "phm_c_init": "uniform",
    "combine": "prefix_after_bos",
    "joins": "embeddings",
    "pooling": "mean",
    "site_convention": "albert",
    "positions": "shifted",
    "rank_pattern": {"query": 2},
    "reduction_factor": 4,
    "target_modules": ["dense"],
    "target_parameters": ["intermediate.dense.weight"],
    "task_specific_matrix_type": "linear",
    "tie_word_embeddings": False,
    "token_indices": [2],
    "trainable_token_indices": [1],
    "vocab_size": 50,
}
INIT_WEIGHTS = {"lora": "bert", "bert": "mam_adapter", "mam_adapter": "bert", "houlsby": "bert",
                "ia3": "bert", "vera": "random", None: "zero"}  # fmt: skip
# of one method, where those above have no meaning
OWN_VALUES: dict[tuple[str, str], Any] = {
    ("ln_tuning", "exclude_modules"): ["attention.output.LayerNorm"],
    ("ln_tuning", "target_modules"): ["attention.output.LayerNorm"],
    ("prefix_tuning", "convention"): "adapterhub",
    ("trainable_tokens", "target_modules"): ["position_embeddings"],
}
# what must be set for another field to be read at all
WITH: dict[tuple[str, str], dict[str, Any]] = {
    ("boft", "init_weights_seed"): {"init_weights": False},
    ("miss", "init_weights_seed"): {"init_weights": False},
    ("miss", "mini_r"): {"init_weights": "mini"},
    ("oft", "eps"): {"coft": True},
    ("oft", "init_weights_seed"): {"init_weights": False},
    ("oft", "r"): {"oft_block_size": 0, "r": 4},
    ("ia3", "exclude_modules"): {"attn_matrices": ("q", "v")},
    ("ia3", "init_weights_seed"): {"init_weights": "bert"},
    ("lokr", "decompose_both"): {"r": 1},
    ("lora", "init_options"): {"init_weights": "corda"},
    ("lokr", "rank_dropout_scale"): {"rank_dropout": 0.5},
    ("mtl_lora", "weights_sharpness"): {"n_up_projection": 2},
    ("ia3", "feedforward_modules"): {"target_modules": ["intermediate.dense"]},
    ("prefix_tuning", "convention"): {"use_gating": True},
    ("prefix_tuning", "shared_gating"): {"use_gating": True},
    ("prompt_tuning", "prompt_init_text"): {"prompt_init": "from_string", "prompt_init_text": "a"},
    ("seq_bn_inv", "site_convention"): {"mh_adapter": True, "original_ln_before": False},
    ("dvora", "alpha"): {"convention": "adapterhub"},
    ("vera", "alpha"): {"convention": "adapterhub"},
    ("causal_lm", "embedding_size"): {"layers": 2},
    ("question_answering", "activation_function"): {"layers": 2},
    ("tagging", "activation_function"): {"layers": 2},
}
for _head in ("causal_lm", "seq2seq_lm"):
    for _field in ("activation_function", "dense_bias", "layer_norm"):
        WITH[_head, _field] = {"layers": 2}
    for _field in ("layer_norm_eps", "norm_bias"):
        WITH[_head, _field] = {"layers": 2, "layer_norm": True}


for _reft in ("loreft", "noreft", "direft"):
    WITH[_reft, "tied_weights"] = {"suffix_positions": 2}
# the model where a field is read, if it is not an encoder of text
READS = {"alora_invocation_tokens": "llama", "cross_prefix": "t5", "encoder_prefix": "t5"}


def other(field: str, value: Any) -> Any:
    """A value that is not this one."""
    if field in VALUES and VALUES[field] != value:
        return VALUES[field]
    if field in ("activation_function", "non_linearity"):
        return "relu"
    if field == "inv_adapter":
        return None
    if field == "scaling":
        return 2.0 if value == "learned" else "learned"
    if field == "init_weights":
        return not value if isinstance(value, bool) else INIT_WEIGHTS[value]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value + 0.25
    raise AssertionError(f"what else can {field}={value!r} be? Enter it in VALUES.")


def check_acts(
    field: str,
    look: Callable[[Any], list[Any]],
    changed: Callable[[], Any],
    config: Any,
    plain: dict[str, list[Any]],
) -> None:
    """What is seen of the changed config is different, or an error or a warning names the field.

    `plain` keeps what is seen of configs without the change, by their repr.
    """
    try:
        found = look(changed())
    except (AdapterZooError, UserWarning) as error:
        if field in str(error):
            return
        raise
    key = repr(config)
    if key not in plain:
        plain[key] = look(config)
    assert found != plain[key]


def seen_of(config: AdapterConfig, reads: str = "bert") -> list[bytes | str]:
    """What an adapter is: its tensors, its answers and gradients in training."""
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config(reads))
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    needs_data = config.to_dict().get("init_weights") == "corda"
    data = {"init_data": [tiny_inputs(reads)] * 3} if needs_data else {}
    model.add_adapter("a", config, set_active=True, **data)
    model.train_adapter("a")
    seen: list[bytes | str] = []
    for path, module in model.adapter_modules("a"):
        for key, tensor in module.state_dict().items():
            seen += [f"{path}/{key} {tuple(tensor.shape)} {tensor.dtype}", bits(tensor)]
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, module in model.adapter_modules("a"):
            for parameter in module.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=source) * 0.1)
    torch.manual_seed(0)
    out = model(**tiny_inputs(reads))[0]
    out.square().sum().backward()
    seen.append(bits(out))
    seen += [bits(p.grad) for p in model.parameters() if p.grad is not None]
    return seen


# no string builds these; trainable_tokens acts with tokens only, and the other one is X-MOD's own
STRINGLESS = {
    "trainable_tokens": AdapterConfig.from_dict(
        {"architecture": "trainable_tokens", "token_indices": [1, 3]}
    )
}
CONFIGS = {name: AdapterConfig.load(small(name)) for name in config_strings if name != "union"}
# of strings for one class of config, the first
FIRST = {type(c): name for name, c in reversed(CONFIGS.items()) if c.members == (c,)}
CONFIGS |= STRINGLESS
METHODS = sorted([*FIRST.values(), *STRINGLESS])
# what a file holds: its tests are those of formats
OF_FILES = {("vera", "save_projection")}
# only models with mixers have a use for it: tests/test_mixers.py
OF_MIXERS = "mixers"
FIELDS = [
    (name, field.name)
    for name in METHODS
    for field in dataclasses.fields(CONFIGS[name])
    if field.init and (name, field.name) not in OF_FILES and field.name != OF_MIXERS
]


@pytest.fixture(scope="module")
def plain() -> dict[str, list[bytes | str]]:
    return {}


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_each_field_of_a_method_acts_or_is_refused(name, field, plain):
    config = CONFIGS[name].replace(**WITH.get((name, field), {}))
    if "dtype" in config.field_names():
        config = config.replace(dtype=None)
    changes = {field: OWN_VALUES.get((name, field)) or other(field, getattr(config, field))}
    look = functools.partial(seen_of, reads=READS.get(field, "bert"))
    check_acts(field, look, lambda: config.replace(**changes), config, plain)


@pytest.mark.parametrize("name", METHODS)
def test_what_is_compared_is_the_same_for_the_same_config(name):
    """Else a field that nobody reads would seem to act."""
    assert seen_of(CONFIGS[name]) == seen_of(CONFIGS[name])


def test_no_method_is_left_out():
    known = {CONFIGS[name].architecture for name in METHODS}
    assert {*architectures} - known == {"union", "no_language_adapters"}


# --- heads ---


TOKENS = torch.tensor([[1, 0, 1, 0, 1, 0, 1], [0, 1, 0, 1, 0, 1, 0]])
CLASSES = {"labels": torch.tensor([0, 1])}
LABELS: dict[str, dict[str, Any]] = {
    "classification": CLASSES,
    "image_classification": CLASSES,
    "multilabel_classification": CLASSES,
    "multiple_choice": CLASSES,
    "tagging": {"labels": TOKENS},
    "masked_lm": {"labels": TOKENS + 5},
    "causal_lm": {"labels": TOKENS + 5},
    "seq2seq_lm": {"labels": TOKENS[:, :5] + 5},
    "question_answering": {"start_positions": CLASSES["labels"],
                           "end_positions": CLASSES["labels"] + 1},
    "dependency_parsing": {"labels_arcs": TOKENS, "labels_rels": TOKENS,
                           "word_starts": torch.arange(7).expand(2, 7)},
}  # fmt: skip
FAMILY = {"causal_lm": "gpt2", "seq2seq_lm": "bart", "image_classification": "vit"}


def seen_of_head(config: HeadConfig) -> list[Any]:
    """What a head is: its tensors and labels, and its answers, losses and gradients in training."""
    family = FAMILY.get(config.head_type, "bert")
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config(family)).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    torch.manual_seed(0)
    model.add_prediction_head_from_config("h", config)
    head = model.get_head("h")
    seen: list[Any] = [model.get_labels_dict("h")]
    with torch.no_grad():
        for key, tensor in head.state_dict().items():
            seen += [key, tuple(tensor.shape), bits(tensor)]
        for parameter in head.parameters():
            parameter.add_(0.3)
    inputs, labels = tiny_inputs(family), dict(LABELS[config.head_type])
    if config.problem_type == "multi_label_classification":
        classes = torch.arange(config["num_labels"])
        labels["labels"] = (classes + torch.tensor([[0], [1]])).remainder(2).float()
    if config.head_type == "multiple_choice":
        inputs = {key: value[:, None].repeat(1, config["num_choices"], 1)
                  for key, value in inputs.items()}  # fmt: skip
        inputs["input_ids"][:, 1] += 1
    torch.manual_seed(0)
    out = model(**inputs, **labels)
    seen += [bits(value) for value in out.values() if isinstance(value, torch.Tensor)]
    out.loss.backward()
    return seen + [bits(p.grad) for p in model.parameters() if p.grad is not None]


# a static head is the code of a task class: `tests/heads/test_static.py`
TYPES = sorted(head_types.keys() - {"static"})
HEAD_FIELDS = [
    (name, field.name) for name in TYPES for field in dataclasses.fields(head_types[name])
]


@pytest.mark.parametrize(("name", "field"), HEAD_FIELDS)
def test_each_field_of_a_head_acts_or_is_refused(name, field, plain):
    config = HeadConfig.from_dict({"head_type": name, **WITH.get((name, field), {})})
    value = None if field == "label2id" else getattr(config, field)
    changes = {field: other(field, value)}
    if field in ("num_labels", "num_choices"):
        changes["label2id"] = None
    check_acts(field, seen_of_head, lambda: config.replace(**changes), config, plain)


@pytest.mark.parametrize("name", TYPES)
def test_what_is_compared_is_the_same_for_the_same_head(name):
    config = HeadConfig.from_dict({"head_type": name})
    assert seen_of_head(config) == seen_of_head(config)


# --- fusions ---


def seen_of_fusion(config: AdapterFusionConfig) -> list[Any]:
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config("bert"))
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    source = torch.Generator().manual_seed(1)
    for name in ("a", "b"):
        model.add_adapter(name, "seq_bn")
        with torch.no_grad():
            for _, module in model.adapter_modules(name):
                for parameter in module.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=source) * 0.3)
    model.add_adapter_fusion(["a", "b"], config)
    model.train_adapter_fusion(Fuse("a", "b"))
    torch.manual_seed(0)
    out = model(**tiny_inputs("bert"))[0]
    loss = model.get_fusion_regularization_loss()
    tensors = [out, *(p for p in model.parameters() if p.requires_grad)]
    (out.square().sum() + (0.0 if loss is None else loss)).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [bits(t) for t in (*tensors, *grads)] + [None if loss is None else bits(loss)]


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(AdapterFusionConfig)])
def test_each_field_of_a_fusion_acts_or_is_refused(field):
    if field == "entry":
        pytest.skip("of adapters with an invertible function, see tests/methods/test_invertible.py")
    config = AdapterFusionConfig()
    changes = {field: other(field, getattr(config, field))}
    check_acts(field, seen_of_fusion, lambda: dataclasses.replace(config, **changes), config, {})
    assert seen_of_fusion(config) == seen_of_fusion(config)


# --- the checks themselves ---


def test_a_change_that_nobody_sees_does_not_pass():
    with pytest.raises(AssertionError):
        check_acts("rank", lambda _: ["the same"], lambda: 2, 1, {})


def test_a_field_that_nobody_reads_is_found():
    """A seed of weights that are not drawn, and a function between the layers of one layer."""
    config = AdapterConfig.load("boft")
    assert config.init_weights is True
    assert seen_of(config.replace(init_weights_seed=7)) == seen_of(config)
    head = HeadConfig.from_dict({"head_type": "tagging", "layers": 1})
    assert seen_of_head(head.replace(activation_function="gelu")) == seen_of_head(head)


def test_a_value_that_is_the_default_is_no_other_value():
    for name, field in FIELDS:
        value = getattr(CONFIGS[name], field)
        assert other(field, value) != value
