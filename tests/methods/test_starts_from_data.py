"""EVA and CorDA: initial values of LoRA from the inputs of its layers, beside PEFT."""

from __future__ import annotations

import copy
import functools

import peft
import peft_world
import pytest
import torch
from families import VOCABULARY, tiny_inputs
from peft.tuners.lora import eva
from peft.tuners.lora.config import CordaConfig
from peft.tuners.lora.corda import preprocess_corda
from peft.utils.incremental_pca import IncrementalPCA
from snapshots import refused
from transformers import LlamaForCausalLM

from adapterzoo import ConfigUnion, LoRAConfig, load_model
from adapterzoo.errors import ConfigError
from adapterzoo.methods.low_rank.starts import Components

pytestmark = [
    *(pytest.mark.filterwarnings(each) for each in peft_world.QUIET),
    pytest.mark.filterwarnings("ignore:lora with eva initialization"),
]
TARGETS = ["q_proj", "v_proj", "down_proj"]


def batches(count=3, rows=4, tokens=12):
    source = torch.Generator().manual_seed(7)
    found = []
    for _ in range(count):
        ids = torch.randint(3, VOCABULARY, (rows, tokens), generator=source)
        mask = torch.ones_like(ids)
        mask[1, -4:] = 0
        found.append({"input_ids": ids, "attention_mask": mask})
    return found


def logits(model):
    return model(**tiny_inputs("llama")).logits


def added(data, **fields):
    model = peft_world.ours("llama")
    config = LoRAConfig(r=4, alpha=6, target_modules=TARGETS, **fields)
    model.add_adapter("a", config, set_active=True, init_data=data)
    model.train_adapter("a")
    return model.eval()


def compare_gradients(own, other):
    for model in (own, other):
        logits(model).square().mean().backward()
    mine = {n.replace(".loras.a", ""): p.grad for n, p in own.named_parameters() if "lora_" in n}
    yours = {
        n.replace(".default.weight", "").removeprefix("base_model.model."): p.grad
        for n, p in other.named_parameters() if "lora_" in n
    }  # fmt: skip
    assert mine.keys() == yours.keys()
    for name, gradient in mine.items():
        largest = float(yours[name].abs().max())
        # singular vectors have no sign
        torch.testing.assert_close(
            gradient.abs(), yours[name].abs(), rtol=0, atol=1e-3 * largest + 1e-7
        )


@pytest.mark.parametrize(
    ("rho", "options"), [(1.0, {}), (2.0, {}), (2.0, {"adjust_scaling_factors": False})]
)
def test_eva_gives_the_ranks_the_loss_and_the_gradients_of_peft(
    rho, options, tmp_path, monkeypatch
):
    data = batches()
    # PEFT takes a random approximation of the SVD
    exact = functools.partial(IncrementalPCA, lowrank=False, lowrank_seed=None)
    monkeypatch.setattr(
        eva,
        "IncrementalPCA",
        lambda n_components, copy, **_: exact(n_components=n_components, copy=copy),
    )
    theirs = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=TARGETS, init_lora_weights="eva",
        eva_config=peft.EvaConfig(rho=rho, **options),
    )  # fmt: skip
    other = peft.get_peft_model(peft_world.plain("llama"), theirs).eval()
    peft.initialize_lora_eva_weights(other, copy.deepcopy(data), show_progress_bar=False)
    own = added(data, init_weights="eva", init_options={"rho": rho, **options})
    torch.testing.assert_close(logits(own), logits(other), rtol=1e-5, atol=1e-6)
    compare_gradients(own, other)
    # what PEFT writes of its own ranks and scalings is what is here
    own.save_adapter(tmp_path, "a", format="peft")
    read = peft.PeftConfig.from_pretrained(tmp_path)
    ranks = {n: m.r["default"] for n, m in other.named_modules() if hasattr(m, "lora_A")}
    again = peft.PeftModel.from_pretrained(peft_world.plain("llama"), tmp_path)
    assert ranks == {n: m.r["default"] for n, m in again.named_modules() if hasattr(m, "lora_A")}
    assert bool(read.rank_pattern) == (rho > 1)


def test_a_layer_has_no_more_ranks_than_inputs():
    # rho r is above the width of all layers but one
    model = added(batches(tokens=40), init_weights="eva", init_options={"rho": 12.0})
    ranks = [module.lora_A.shape for _, module in model.adapter_modules("a")]
    assert sum(rank for rank, _ in ranks) == 4 * 6
    assert all(0 < rank <= width for rank, width in ranks)


def test_where_an_exact_svd_is_dear_components_are_approximated():
    x = torch.randn(700, 600, generator=torch.Generator().manual_seed(0))
    # a spectrum that falls, as that of hidden states does
    x = x * 0.9 ** torch.arange(600)
    approximate = Components(4, 0.99)
    approximate.update(x)
    _, values, vh = torch.linalg.svd(x - x.mean(0), full_matrices=False)
    torch.testing.assert_close(approximate.values, values[:4], rtol=1e-3, atol=0)
    cosines = (approximate.components * vh[:4]).sum(-1).abs()
    torch.testing.assert_close(cosines, torch.ones(4), rtol=1e-3, atol=0)


@pytest.mark.parametrize("method", ["ipm", "kpm"])
def test_corda_starts_as_in_peft_and_leaves_the_base(method):
    # PEFT takes one sequence at a time, without padding
    data = [{"input_ids": b["input_ids"][:1]} for b in batches(count=6, tokens=40)]
    theirs = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=TARGETS, init_lora_weights="corda",
        corda_config=CordaConfig(corda_method=method),
    )  # fmt: skip
    plain = peft_world.plain("llama")
    preprocess_corda(plain, theirs, run_model=lambda: [plain(**batch) for batch in data])
    other = peft.get_peft_model(plain, theirs).eval()
    before = peft_world.plain("llama").state_dict()
    own = added(data, init_weights="corda", init_options={"corda_method": method})
    torch.testing.assert_close(logits(own), logits(other), rtol=1e-3, atol=1e-3)
    compare_gradients(own, other)
    own.delete_adapter("a")
    assert all(torch.equal(before[key], tensor) for key, tensor in own.state_dict().items())


@pytest.mark.parametrize("start", ["eva", "corda"])
def test_files_hold_an_equal_adapter(start, tmp_path):
    model = added(batches(), init_weights=start)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    expected = peft_world.logits(model, "llama")
    for name in ("native", "peft"):
        model.save_adapter(tmp_path / name, "a", format=name)
        other = peft_world.ours("llama")
        other.load_adapter(tmp_path / name, load_as="b", set_active=True)
        found = peft_world.logits(other, "llama")
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_padding_and_unlabeled_tokens_are_not_read():
    data = batches()
    spoilt = copy.deepcopy(data)
    for batch in spoilt:
        batch["labels"] = batch["input_ids"].clone()
    expected = added(spoilt, init_weights="eva").state_dict()
    for batch in spoilt:
        batch["input_ids"][batch["attention_mask"] == 0] = 5
    found = added(spoilt, init_weights="eva").state_dict()
    assert all(torch.equal(expected[key], tensor) for key, tensor in found.items())
    for batch in spoilt:
        batch["labels"][:, :6] = -100
    less = added(spoilt, init_weights="eva").state_dict()
    assert any(less[key].shape != t.shape or not torch.equal(less[key], t)
               for key, t in expected.items())  # fmt: skip


@pytest.mark.parametrize(
    ("config", "data", "words"),
    [
        ({"init_weights": "eva"}, None, ("from batches", "init_data=[batch]")),
        ({"init_weights": "corda"}, [], ("missing or not finite", "other batches")),
        ({"init_weights": "lora"}, [{}], ("does not need any", "Leave init_data out")),
        ({"init_weights": "eva", "target_modules": ["embed_tokens"]}, [{}],
         ("embed_tokens", "whole linear layers")),
        ({"init_weights": "eva", "init_options": {"rho": 0.5}}, None, ("init_options['rho']", "1")),
        ({"init_weights": "eva", "init_options": {"tua": 0.5}}, None, ("'tua'", "'tau'")),
        ({"init_weights": "lora", "init_options": {"tau": 0.5}}, None, ("'tau'", "none")),
        ({"init_weights": "eva", "init_options": None}, None, ("init_options=None", "a dict")),
    ],
)  # fmt: skip
def test_refused(config, data, words):
    model = peft_world.ours("llama")
    with refused(model, ConfigError, *words):
        asked = LoRAConfig(**{"target_modules": ["q_proj"], **config})
        model.add_adapter("a", asked, init_data=data)


@pytest.mark.parametrize("start", ["eva", "corda"])
def test_a_whole_model_is_saved_and_loaded(start, tmp_path):
    model = added(batches(), init_weights=start)
    model.save_pretrained(tmp_path)
    again = load_model(tmp_path, LlamaForCausalLM)
    again.set_active_adapters("a")
    torch.testing.assert_close(logits(again.eval()), logits(model), rtol=0, atol=0)


def test_modes_of_modules_stay_as_they_were():
    model = peft_world.ours("llama").train()
    model.model.layers[0].eval()
    model.add_adapter("a", LoRAConfig(init_weights="eva"), init_data=batches())
    assert model.training
    assert not model.model.layers[0].mlp.training
    assert model.model.layers[1].mlp.training


def test_labels_of_classes_hide_no_token_and_padding_stays_hidden():
    data = batches()
    for batch in data:
        batch["labels"] = torch.ones(4, 3)

    def first(data):
        model = peft_world.ours("bert")
        model.config.problem_type = "multi_label_classification"
        model.config.num_labels = model.num_labels = 3
        model.classifier = torch.nn.Linear(model.config.hidden_size, 3)
        model.add_adapter("a", LoRAConfig(init_weights="eva"), init_data=data)
        return next(module.lora_A for _, module in model.adapter_modules("a"))

    expected = first(data)
    for batch in data:
        batch["input_ids"][batch["attention_mask"] == 0] = 5
    torch.testing.assert_close(first(data), expected, rtol=0, atol=0)


@pytest.mark.parametrize("tokens", [12, 11])
def test_labels_hide_tokens_of_the_decoder_alone(tokens):
    data = batches()
    for batch in data:
        batch["labels"] = batch["input_ids"][:, :tokens].clone()

    def first(data, part):
        model = peft_world.ours("t5")
        config = LoRAConfig(target_modules=["q"], init_weights="eva", init_options={"rho": 1.0})
        model.add_adapter("a", config, init_data=data)
        modules = dict(model.adapter_modules("a"))
        return next(m.lora_A for path, m in modules.items() if path.startswith(part))

    plain = [first(data, part) for part in ("encoder", "decoder")]
    for batch in data:
        batch["labels"][:, 6:] = -100
    masked = [first(data, part) for part in ("encoder", "decoder")]
    assert torch.equal(plain[0], masked[0])
    assert not torch.equal(plain[1], masked[1])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"input_ids": torch.ones(1, 3)}, ("from batches", "init_data=[batch]")),
        ([{"input_ids": torch.ones(1, 3, dtype=torch.long)}], ("tokens", "larger batches")),
    ],
)
def test_data_that_are_no_batches_are_refused(data, words):
    model = peft_world.ours("llama")
    with refused(model, ConfigError, *words):
        model.add_adapter("a", LoRAConfig(init_weights="eva"), init_data=data)


def test_a_union_takes_no_data():
    model = peft_world.ours("llama")
    union = ConfigUnion(LoRAConfig(init_weights="eva"), LoRAConfig(attn_matrices=["k"]))
    with refused(model, ConfigError, "union", "one by one"):
        model.add_adapter("a", union, init_data=batches())
