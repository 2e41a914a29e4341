"""MiSS of PEFT: its own files give its own outputs and gradients, and it loads ours and agrees."""

import copy

import pytest
import torch
from families import tiny_inputs
from safetensors.torch import load_file, save_file
from snapshots import refused, same_bits, stir

import adapterzoo
from adapterzoo import ConfigUnion, MissConfig
from adapterzoo.errors import AdapterZooError, CheckpointError

peft = pytest.importorskip("peft", reason="PEFT itself is the truth here")

from peft_world import (  # noqa: E402
    QUIET,
    TENSORS,
    change,
    logits,
    ours,
    plain,
    reloaded,
    trained,
)

pytestmark = [pytest.mark.filterwarnings(warning) for warning in QUIET]

# widths 32 and 64; PEFT has no MiSS for the Conv1D of gpt2
TARGETS = {
    "bert": ["query", "value", "output.dense"],
    "llama": ["q_proj", "down_proj"],
    "t5": ["q", "v", "wo"],
    "vit": ["q_proj", "v_proj", "fc2"],
    "qwen3": ["q_proj", "o_proj", "down_proj"],
    "qwen3_moe": ["q_proj", "v_proj", "o_proj"],
}
FORMS = {
    "default": {"r": 4},
    "a rest": {"r": 7},
    "mini": {"r": 7, "init_weights": "mini", "mini_r": 4},
    "bat": {"r": 8, "init_weights": "bat"},
}
NEEDS = {"vit": pytest.mark.needs("transformers>=5.24", "its layers had other names")}
CASES = [
    pytest.param(family, form, marks=NEEDS.get(family, ())) for family in TARGETS for form in FORMS
]


def close(found, expected, atol=1e-10):
    torch.testing.assert_close(found, expected.double(), rtol=0, atol=atol)


def theirs(family, **fields):
    task = {"bert": "SEQ_CLS"}.get(family)
    return peft.MissConfig(task_type=task, **{"target_modules": TARGETS[family]} | fields)


@pytest.mark.parametrize(("family", "form"), CASES)
def test_files_go_both_ways(family, form, tmp_path):
    expected = trained(family, theirs(family, **FORMS[form]), tmp_path / "theirs")
    assert (expected - logits(plain(family), family)).abs().max() > 1e-3
    model = ours(family)
    model.load_adapter(tmp_path / "theirs", load_as="a", set_active=True)
    close(logits(model, family), expected)
    config = model.adapters_config["a"]
    assert {name: getattr(config, name) for name in FORMS[form]} == FORMS[form]
    model.save_adapter(tmp_path / "back", "a", format="peft", with_head=family == "bert")
    before, after = (load_file(tmp_path / f / TENSORS) for f in ("theirs", "back"))
    assert sorted(after) == sorted(before)
    assert all(same_bits(before[key], after[key]) for key in after)
    close(reloaded(family, tmp_path / "back"), expected)
    model.save_adapter(tmp_path / "own", "a")
    other = ours(family)
    other.load_adapter(tmp_path / "own", set_active=True)
    close(logits(other, family), expected)


@pytest.mark.parametrize(("family", "form"), CASES)
def test_peft_loads_ours_and_agrees(family, form, tmp_path):
    model = ours(family)
    model.add_adapter("a", MissConfig(target_modules=TARGETS[family], **FORMS[form]))
    stir(model, "a")
    model.set_active_adapters("a")
    expected = logits(model, family)
    assert (expected - logits(plain(family), family)).abs().max() > 1e-3
    model.save_adapter(tmp_path, "a", format="peft", with_head=family == "bert")
    close(reloaded(family, tmp_path), expected)


@pytest.mark.parametrize(("family", "form"), CASES)
def test_outputs_and_gradients_are_those_of_peft(family, form):
    base = plain(family)
    mine = copy.deepcopy(base)
    adapterzoo.init(mine)
    peer = peft.get_peft_model(base, theirs(family, **FORMS[form])).double().eval()
    mine.add_adapter("a", MissConfig(target_modules=TARGETS[family], **FORMS[form]))
    mine.train_adapter("a")
    mine.double().eval()
    blocks = {
        name.removesuffix(".miss_block.default"): parameter
        for name, parameter in peer.named_parameters()
        if name.endswith(".miss_block.default")
    }
    own = dict(mine.adapter_modules("a"))
    pairs = [
        (module.miss_block, block)
        for path, module in own.items()
        for name, block in blocks.items()
        if name.endswith(f".{path}")
    ]
    assert len(pairs) == len(own) == len(blocks)
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for mine_D, block in pairs:
            block.copy_(torch.randn(block.shape, generator=source) * 0.1)
            mine_D.copy_(block)
    inputs = tiny_inputs(family)
    if family == "t5":
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :3]
    inputs = {k: t.double() if t.is_floating_point() else t for k, t in inputs.items()}
    outputs = [net(**inputs).logits for net in (mine, peer)]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-10)
    weights = torch.randn(outputs[0].shape, generator=source, dtype=torch.float64)
    for output in outputs:
        (output * weights).sum().backward()
    for mine_D, block in pairs:
        scale = max(1.0, block.grad.abs().max().item())
        assert block.grad.abs().max() > 1e-4
        torch.testing.assert_close(mine_D.grad / scale, block.grad / scale, rtol=0, atol=1e-10)


# query, key and value in one layer: in turns for each head, and one after the other
@pytest.mark.parametrize("family", ["gpt_neox", "phi3"])
@pytest.mark.parametrize("form", ["default", "a rest", "mini"])
def test_parts_of_a_fused_layer_become_one_adapter(family, form, tmp_path):
    model = ours(family)
    model.add_adapter("a", MissConfig(**FORMS[form]))
    stir(model, "a")
    model.set_active_adapters("a")
    expected = logits(model, family)
    model.save_adapter(tmp_path, "a", format="peft", with_head=False)
    close(reloaded(family, tmp_path), expected)
    other = ours(family)
    other.load_adapter(tmp_path, load_as="b", set_active=True)
    close(logits(other, family), expected)


def test_several_at_one_layer_become_one(tmp_path):
    model = ours("bert")
    one = MissConfig(r=4, attn_matrices=("q", "v"))
    mini = MissConfig(r=4, init_weights="mini", mini_r=8, attn_matrices=("q", "v"))
    model.add_adapter("a", ConfigUnion(one, mini))
    stir(model, "a")
    model.set_active_adapters("a")
    model.save_adapter(tmp_path, "a", format="peft")
    # the sums of two matrices are rounded to float32
    close(reloaded("bert", tmp_path), logits(model, "bert"), 1e-6)


@pytest.mark.parametrize(
    ("family", "config", "why"),
    [
        ("gpt2", "miss[r=4,target_modules=['c_fc']]", "Conv1D"),
        ("gpt2", "miss[r=4,attn_matrices=['q']]", "Conv1D"),
        ("gpt_neox", "miss[r=4,init_weights='bat']", "init_weights='bat'"),
        ("bert", "miss[r=4]|miss[r=5]", "differ in r"),
        ("bert", "miss[r=4]|miss[r=4,miss_dropout=0.1]", "differ in miss_dropout"),
        ("bert", "miss[r=4]|miss[r=5,attn_matrices=['k']]", "differ in r (4, 5)"),
        ("qwen3_moe", "miss[r=4,output_lora=True]", "the parameter"),
    ],
)
def test_what_peft_cannot_say_is_refused(family, config, why, tmp_path):
    model = ours(family)
    model.add_adapter("a", config)
    with refused(model, CheckpointError, why, "format='native'"):
        model.save_adapter(tmp_path, "a", format="peft", with_head=False)


@pytest.mark.parametrize(
    ("shape", "fields"),
    [((4, 31), {}), ((5, 32), {}), ((8, 4, 4), {}), ((4,), {}), ((4, 0), {"init_weights": "mini"}),
     ((4, 32), {"init_weights": "bat"}), ((4, 5), {"init_weights": "mini"}),
     ((5, 8), {"init_weights": "mini"}), ((4, 4, 4), {"init_weights": "bat"}),
     ((64, 32), {"r": 64})],
)  # fmt: skip
def test_a_tensor_that_does_not_fit_is_refused(shape, fields, tmp_path):
    trained("bert", theirs("bert", r=4), tmp_path)
    tensors = load_file(tmp_path / TENSORS)
    save_file(
        {key: torch.zeros(shape) if "query" in key else t for key, t in tensors.items()},
        tmp_path / TENSORS,
    )
    change(tmp_path, **fields)
    model = ours("bert")
    with refused(model, AdapterZooError, "load_adapter(", "self.query"):
        model.load_adapter(tmp_path, load_as="a")


def test_fields_without_effect_are_left_out(tmp_path):
    trained("bert", theirs("bert", r=4, init_weights="bat", miss_dropout=0.5, mini_r=3), tmp_path)
    model = ours("bert")
    model.load_adapter(tmp_path, load_as="a")
    config = model.adapters_config["a"]
    assert (config.miss_dropout, config.mini_r) == (0.0, 1)
    # an initialization is no form
    trained("bert", theirs("bert", r=4, init_weights=False, miss_dropout=0.5), tmp_path)
    model.load_adapter(tmp_path, load_as="b")
    config = model.adapters_config["b"]
    assert (config.init_weights, config.miss_dropout) == (True, 0.5)
