"""What PEFT trains beside an adapter, in its format: both libraries compute the same."""

from __future__ import annotations

import copy
import functools
import json
from typing import Any

import peft
import pytest
import torch
from families import tiny_inputs
from peft_world import CONFIG, QUIET, TENSORS, logits, ours, plain, reloaded, trained
from safetensors.torch import load_file
from snapshots import refused, same_bits

from adapterzoo import ConfigUnion, LNTuningConfig, LoRAConfig, TrainableTokensConfig
from adapterzoo.contracts import CopyAdapter
from adapterzoo.errors import AdapterZooError, CheckpointError, ConfigError
from adapterzoo.model.state import tensors_of

pytestmark = [
    *(pytest.mark.filterwarnings(warning) for warning in QUIET),
    pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True. and a tied layer"),
    pytest.mark.filterwarnings("ignore:Unsupported layer type"),
]

QV = {"bert": ["query", "value"], "gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"],
      "t5": ["q", "v"]}  # fmt: skip
TASKS = {"bert": "SEQ_CLS", "gpt2": "CAUSAL_LM", "llama": "CAUSAL_LM", "t5": "SEQ_2_SEQ_LM"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tokens of bert": ("bert", {"trainable_token_indices": [7, 1, 4]}),
    "tokens of gpt2, tied": ("gpt2", {"trainable_token_indices": [7, 1, 4]}),
    "tokens of llama": ("llama", {"trainable_token_indices": [7, 1, 4]}),
    "tokens of t5, tied": ("t5", {"trainable_token_indices": [7, 1, 4]}),
    "tokens of a named table": (
        "bert", {"trainable_token_indices": {"position_embeddings": [0, 2]}}),
    "tokens of two tables": (
        "bert", {"trainable_token_indices": {"position_embeddings": [2, 0],
                                             "word_embeddings": [5, 3]}}),
    "norms saved": ("bert", {"modules_to_save": ["LayerNorm"]}),
    "norms of llama saved": ("llama", {"modules_to_save": ["norm", "input_layernorm"]}),
    "a table saved": ("llama", {"modules_to_save": ["embed_tokens"]}),
    "a tied table saved": ("gpt2", {"modules_to_save": ["wte"]}),
    "modules of modules saved": ("llama", {"modules_to_save": ["mlp"]}),
    "Conv1D saved": ("gpt2", {"modules_to_save": ["c_fc"]}),
    "modules and tokens": (
        "llama", {"modules_to_save": ["norm"], "trainable_token_indices": [2, 9]}),
    "all biases": ("bert", {"bias": "all"}),
    "all biases of gpt2": ("gpt2", {"bias": "all"}),
    "biases of LoRA": ("bert", {"bias": "lora_only"}),
    "biases, DoRA": ("bert", {"bias": "lora_only", "use_dora": True}),
    "an output layer saved": ("llama", {"modules_to_save": ["lm_head"]}),
    "a tied output layer saved": ("gpt2", {"modules_to_save": ["lm_head"]}),
    "both tables saved": ("llama", {"modules_to_save": ["lm_head", "embed_tokens"]}),
    "all": (
        "bert", {"bias": "all", "modules_to_save": ["classifier", "pooler"],
                 "trainable_token_indices": [2, 9]}),
}  # fmt: skip


def close(found, expected):
    torch.testing.assert_close(found, expected.double(), rtol=0, atol=1e-10)


def there_and_back(family, folder, expected):
    """PEFT's file loaded here and written again, with PEFT's logits each time.

    Returns the model, the name of the adapter, and the logits without it.
    """
    model = ours(family)
    before = logits(model, family)
    name = model.load_adapter(folder / "theirs", set_active=True)
    close(logits(model, family), expected)
    model.save_adapter(folder / "back", name, format="peft")
    close(reloaded(family, folder / "back"), expected)
    return model, name, before


@pytest.mark.parametrize("case", CASES)
def test_both_libraries_compute_the_same(case, tmp_path):
    family, fields = CASES[case]
    fields = {"fan_in_fan_out": family == "gpt2", **fields}
    config = peft.LoraConfig(task_type=TASKS[family], target_modules=QV[family], **fields)
    expected = trained(family, config, tmp_path / "theirs")
    assert not torch.allclose(expected, logits(plain(family), family), atol=1e-3)
    model, name, before = there_and_back(family, tmp_path, expected)
    theirs, mine = (load_file(tmp_path / f / TENSORS) for f in ("theirs", "back"))
    for key, tensor in mine.items():
        assert key in theirs, key
        if "token_adapter" in key:
            assert tensor.shape == theirs[key].shape
        else:
            assert same_bits(tensor, theirs[key]), key
    # by way of our own format
    model.save_adapter(tmp_path / "own", name)
    other = ours(family)
    other.load_adapter(tmp_path / "own", set_active=True)
    close(logits(other, family), expected)
    for key, tensor in tensors_of(model, name).items():
        assert same_bits(tensor, tensors_of(other, name)[key])
    # switched with the adapter, and gone with it
    model.set_active_adapters(None)
    assert same_bits(logits(model, family), before)
    model.delete_adapter(name)
    assert model.state_dict().keys() == ours(family).state_dict().keys()
    assert same_bits(logits(model, family), before)


@pytest.mark.parametrize(
    "config",
    [
        peft.LNTuningConfig(target_modules=["input_layernorm"], modules_to_save=["mlp"]),
        peft.PromptTuningConfig(num_virtual_tokens=3, modules_to_save=["mlp"]),
        peft.PrefixTuningConfig(num_virtual_tokens=3, modules_to_save=["mlp", "q_proj"]),
        peft.IA3Config(
            target_modules=["k_proj"], feedforward_modules=["k_proj"], modules_to_save=["mlp"]
        ),
    ],
    ids=lambda config: config.peft_type.value,
)
def test_modules_beside_other_methods(config, tmp_path):
    config.task_type = "CAUSAL_LM"
    # PEFT changes the object
    expected = trained("llama", copy.deepcopy(config), tmp_path / "theirs")
    model = ours("llama")
    name = model.load_adapter(tmp_path / "theirs", set_active=True)
    assert model.adapters_config[name]["modules_to_save"]
    close(logits(model, "llama"), expected)
    model.save_adapter(tmp_path / "back", name, format="peft")
    close(reloaded("llama", tmp_path / "back"), expected)
    theirs, mine = (load_file(tmp_path / f / TENSORS) for f in ("theirs", "back"))
    assert {key for key in theirs if "mlp" in key} <= mine.keys()
    # the config object does the same
    model.add_adapter("b", config)
    paths = [path for path, m in model.adapter_modules("b") if isinstance(m, CopyAdapter)]
    assert paths == [p for p, m in model.adapter_modules(name) if isinstance(m, CopyAdapter)]


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5"])
def test_norms_alone(family, tmp_path):
    names = {"bert": ["LayerNorm"], "gpt2": ["ln_1", "ln_f"], "llama": ["input_layernorm", "norm"],
             "t5": ["layer_norm", "final_layer_norm"]}[family]  # fmt: skip
    config = peft.LNTuningConfig(task_type=TASKS[family], target_modules=names)
    expected = trained(family, config, tmp_path / "theirs")
    model = ours(family)
    name = model.load_adapter(tmp_path / "theirs", set_active=True)
    close(logits(model, family), expected)
    model.save_adapter(tmp_path / "back", name, format="peft")
    close(reloaded(family, tmp_path / "back"), expected)
    written = json.loads((tmp_path / "back" / CONFIG).read_text())
    assert written["peft_type"] == "LN_TUNING"


@pytest.mark.parametrize(
    ("family", "targets", "saved"),
    [("bert", ["LayerNorm"], ["pooler", "attention.output.LayerNorm"]),
     ("llama", ["input_layernorm"], ["mlp", "post_attention_layernorm"]),
     ("gpt2", ["ln_1"], ["c_fc"])],
)  # fmt: skip
def test_norms_and_modules(family, targets, saved, tmp_path):
    # PEFT adds names of heads to the list
    fields = {"target_modules": targets, "modules_to_save": [*saved]}
    config = peft.LNTuningConfig(task_type=TASKS[family], **fields)
    expected = trained(family, config, tmp_path / "theirs")
    model, name, before = there_and_back(family, tmp_path, expected)
    theirs, mine = (load_file(tmp_path / f / TENSORS) for f in ("theirs", "back"))
    assert mine.keys() == theirs.keys()
    model.delete_adapter(name)
    assert same_bits(logits(model, family), before)
    # the same from an object of PEFT
    model.add_adapter("b", peft.LNTuningConfig(target_modules=targets, modules_to_save=saved))
    assert {k.partition("/")[0] for k in tensors_of(model, "b")} > {*_norms(model, targets)}
    with refused(model, ConfigError, "all layers", "fewer"):
        model.add_adapter("c", LNTuningConfig(target_modules=targets, modules_to_save=targets))


def _norms(model, names):
    return [s.path for s in model.anatomy.others if s.path.split(".")[-1] in names]


ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {}),
    "gpt2, tied": ("gpt2", {}),
    "llama": ("llama", {}),
    "t5, tied": ("t5", {}),
    "a named table": ("bert", {"target_modules": ["position_embeddings"]}),
    "two tables": ("bert", {"target_modules": ["position_embeddings", "word_embeddings"]}),
    "by a pattern": ("bert", {"target_modules": r".*\.word_embeddings"}),
}


@pytest.mark.parametrize("case", ALONE)
def test_rows_alone(case, tmp_path):
    family, fields = ALONE[case]
    # of tokens that occur, or of positions
    seen = tiny_inputs(family)["input_ids"].unique().tolist()
    tokens = [6, 1, 5, *seen[4:6]] if "position_embeddings" in str(fields) else seen[4:0:-1]
    config = peft.TrainableTokensConfig(task_type=TASKS[family], token_indices=tokens, **fields)
    expected = trained(family, config, tmp_path / "theirs")
    assert not torch.allclose(expected, logits(plain(family), family), atol=1e-3)
    model = ours(family)
    before = logits(model, family)
    name = model.load_adapter(tmp_path / "theirs", set_active=True)
    close(logits(model, family), expected)
    assert isinstance(model.adapters_config.get(name), TrainableTokensConfig)
    for format in ("peft", "native"):
        model.save_adapter(tmp_path / format, name, format=format)
        other = ours(family)
        other.load_adapter(tmp_path / format, load_as="b", set_active=True)
        close(logits(other, family), expected)
    close(reloaded(family, tmp_path / "peft"), expected)
    model.delete_adapter(name)
    assert same_bits(logits(model, family), before)
    # an object of PEFT makes the same adapter, which starts as the table
    made = ours(family)
    made.add_adapter("c", config, set_active=True)
    close(logits(made, family), before)
    shapes = {k: t.shape for k, t in tensors_of(made, "c").items()}
    assert shapes == {k: t.shape for k, t in tensors_of(other, "b").items()}


@pytest.mark.parametrize("kind", ["alone", "beside"])
def test_the_padding_token_gets_no_gradient_where_pefts_gets_none(kind):
    # in a table that has one, and not through a tied output layer
    rows = {"alone": "token_indices", "beside": "trainable_token_indices"}[kind]
    if kind == "alone":
        made = peft.TrainableTokensConfig
        own = TrainableTokensConfig(token_indices=[0, 5, 7])
    else:
        made = functools.partial(peft.LoraConfig, target_modules=QV["bert"])
        own = LoRAConfig(target_modules=QV["bert"], trainable_token_indices=[0, 5, 7])
    inputs = {"input_ids": torch.tensor([[5, 7, 3, 0, 0], [7, 7, 9, 5, 0]])}
    other = peft.get_peft_model(plain("bert"), made(**{rows: [0, 5, 7]})).eval()
    model = ours("bert")
    assert model.get_input_embeddings().padding_idx == 0
    model.add_adapter("a", own, set_active=True)
    model.train_adapter("a")
    for each in (other, model.eval()):
        each(**inputs).logits.square().sum().backward()
    theirs = next(p.grad for n, p in other.named_parameters() if "trainable_tokens" in n)
    mine = next(p.grad for n, p in model.named_parameters() if n.endswith("rows"))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    assert not mine[0].any()
    assert mine[1:].any(-1).all()


def test_rows_alone_and_a_head(tmp_path):
    model = ours("bert")
    model.add_adapter("a", TrainableTokensConfig(token_indices=[3, 10]), set_active=True)
    model.train_adapter("a")
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=source))
    expected = logits(model, "bert")
    model.save_adapter(tmp_path, "a", format="peft")
    close(reloaded("bert", tmp_path), expected)
    other = ours("bert")
    other.load_adapter(tmp_path, set_active=True)
    close(logits(other, "bert"), expected)


def test_rows_alone_refused(tmp_path):
    model = ours("bert")
    for fields, words in [
        ({}, ("no tokens", "token_indices=[…]")),
        ({"token_indices": [999]}, ("999", "has 99", "resize_token_embeddings(1000)")),
        ({"token_indices": [1], "target_modules": ["query"]}, ("'query'", "word_embeddings")),
    ]:
        with refused(model, AdapterZooError, *words):
            model.add_adapter("a", TrainableTokensConfig(**fields))
    both = [
        TrainableTokensConfig(token_indices=[1]),
        TrainableTokensConfig(token_indices=[2], target_modules=["position_embeddings"]),
    ]
    model.add_adapter("two", ConfigUnion(*both))
    with pytest.raises(CheckpointError, match=r"same tokens in all.*format='native'"):
        model.save_adapter(tmp_path, "two", format="peft")
    model.save_adapter(tmp_path, "two")


BESIDE = {
    "modules_to_save": ["post_attention_layernorm"],
    "trainable_token_indices": [10, 3],
}
BERT = {"modules_to_save": ["LayerNorm"], "trainable_token_indices": [10, 3]}
SLOTS: dict[str, tuple[Any, Any]] = {
    "a pattern": (
        peft.LoraConfig(r=2, lora_alpha=5, target_modules=QV["llama"], **BESIDE),
        LoRAConfig(
            target_modules=r".*\.(q|v)_proj", trainable_token_indices={"embed_tokens": [3, 10]},
            modules_to_save=r".*\.post_attention_layernorm",
        ),
    ),
    "whole paths": (
        peft.LoraConfig(r=2, use_rslora=True, target_modules=QV["llama"], **BESIDE),
        LoRAConfig(
            target_modules=[f"layers.{i}.self_attn.{n}" for i in range(2) for n in QV["llama"]],
            modules_to_save=[f"layers.{i}.post_attention_layernorm" for i in range(2)],
            trainable_token_indices=[3, 10],
        ),
    ),
    "norms": (
        peft.LNTuningConfig(target_modules=["input_layernorm", "norm"]),
        LNTuningConfig(exclude_modules=["post_attention_layernorm"]),
    ),
    "rows": (
        peft.TrainableTokensConfig(token_indices=[10, 3]),
        TrainableTokensConfig(token_indices=[3, 10], target_modules=["embed_tokens"]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SLOTS)
def test_files_of_peft_go_into_a_slot_that_is_spelled_in_another_way(case, tmp_path):
    theirs, mine = SLOTS[case]
    expected = trained("llama", theirs, tmp_path)
    model = ours("llama")
    model.add_adapter("slot", mine, set_active=True)
    before = {name: id(p) for name, p in model.named_parameters()}
    model.load_adapter(tmp_path, load_as="slot", hotswap=True)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    torch.testing.assert_close(logits(model, "llama"), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"trainable_token_indices": [3, 11]}, ("3, 11", "3, 10", "hotswap=False")),
        (
            {"trainable_token_indices": None},
            ("word_embeddings", "in one of them only", "hotswap=False"),
        ),
        (
            {"modules_to_save": ["output.LayerNorm"]},
            ("embeddings.LayerNorm", "in one of them"),
        ),
        ({"bias": "all"}, ("self.query", "in one of them", "hotswap=False")),
    ],
)
def test_files_of_peft_with_something_else_beside_do_not_fit_a_slot(fields, words, tmp_path):
    theirs = peft.LoraConfig(target_modules=QV["bert"], **BERT)
    trained("bert", theirs, tmp_path)
    model = ours("bert")
    model.add_adapter("slot", LoRAConfig(target_modules=QV["bert"], **{**BERT, **fields}))
    with refused(model, ConfigError, *words):
        model.load_adapter(tmp_path, load_as="slot", hotswap=True)


def test_new_tokens_do_not_save_the_whole_table(tmp_path):
    model = ours("llama")
    model.add_adapter("a", LoRAConfig(trainable_token_indices=[3, 8]), set_active=True)
    model.save_adapter(tmp_path / "peft", "a", format="peft")
    model.save_adapter(tmp_path / "own", "a")
    width = model.config.hidden_size
    for file in (tmp_path / "peft" / TENSORS, tmp_path / "own" / "adapter.safetensors"):
        rows = [t for k, t in load_file(file).items() if "lora" not in k and t.dim() == 2]
        assert [t.shape for t in rows] == [(2, width)]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("form", ["peft", "native"])
def test_a_copy_that_still_equals_its_original_is_loaded_and_trained(tmp_path, family, form):
    config = peft.LoraConfig(r=2, target_modules=QV[family], modules_to_save=["lm_head"])
    saver = ours(family)
    saver.add_adapter("a", config)
    saver.save_adapter(tmp_path, "a", format=form)
    model = ours(family)
    model.load_adapter(tmp_path, load_as="a")
    model.train_adapter("a")
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert any("lm_head" in name for name in trained)
    # the base model's table stays as it is, although it is tied to the original
    assert not any("wte" in name or "embed_tokens" in name for name in trained)


def test_rows_of_their_own_at_modules_that_share_a_table_are_refused(tmp_path):
    """PEFT trains them apart; with the table that both share it trains one for all."""
    config = peft.TrainableTokensConfig(target_modules=["embed_tokens"], token_indices=[5, 6])
    trained("t5", config, tmp_path)
    model = ours("t5")
    with refused(model, CheckpointError, "share one table", "target_modules=['shared']"):
        model.load_adapter(tmp_path)
