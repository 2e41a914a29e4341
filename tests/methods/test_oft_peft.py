"""OFT of PEFT: its own files give its own outputs and gradients, and it loads ours and agrees."""

import copy
import json

import pytest
import torch
from families import tiny_inputs
from safetensors.torch import load_file, save_file
from snapshots import refused, same_bits, stir

import adapterzoo
from adapterzoo import ConfigUnion, OFTConfig
from adapterzoo.errors import AdapterZooError, CheckpointError

peft = pytest.importorskip("peft", reason="PEFT itself is the truth here")

from peft_world import (  # noqa: E402
    CONFIG,
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

# widths 32 and 64; PEFT has no OFT for the Conv1D of gpt2
TARGETS = {
    "bert": ["query", "value", "output.dense"],
    "gpt2": ["wte"],
    "llama": ["q_proj", "down_proj"],
    "t5": ["q", "v", "wo"],
    "vit": ["q_proj", "v_proj", "fc2"],
    "qwen3": ["q_proj", "o_proj", "down_proj"],
    "qwen3_moe": ["q_proj", "v_proj", "o_proj"],
}
NEEDS = {
    "gpt2": pytest.mark.needs("peft>=0.21", "it had no OFT of embeddings"),
    "vit": pytest.mark.needs("transformers>=5.24", "its layers had other names"),
}
FORMS = {
    "series": {"oft_block_size": 8},
    "4 terms": {"oft_block_size": 4, "num_cayley_neumann_terms": 4},
    "exact": {"oft_block_size": 8, "use_cayley_neumann": False},
    "by number": {"oft_block_size": 0, "r": 4},
    # √4 is exact, so that PEFT's float32 of it is
    "constrained": {"oft_block_size": 0, "r": 4, "coft": True, "eps": 0.25},
    "shared": {"oft_block_size": 8, "block_share": True},
    "shared, constrained": {"oft_block_size": 8, "block_share": True, "coft": True, "eps": 0.25},
}
CASES = [("bert", form) for form in FORMS]
CASES += [
    pytest.param(family, form, marks=NEEDS.get(family, ()))
    for family in TARGETS if family != "bert" for form in ("series", "exact")
]  # fmt: skip


def close(found, expected):
    torch.testing.assert_close(found, expected.double(), rtol=0, atol=1e-10)


def theirs(family, **fields):
    task = {"bert": "SEQ_CLS"}.get(family)
    return peft.OFTConfig(task_type=task, **{"target_modules": TARGETS[family]} | fields)


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
    # PEFT saves an adapted embedding too
    assert sorted(after) == sorted(key for key in before if "base_layer" not in key)
    assert all(same_bits(before[key], after[key]) for key in after)
    close(reloaded(family, tmp_path / "back"), expected)
    model.save_adapter(tmp_path / "own", "a")
    other = ours(family)
    other.load_adapter(tmp_path / "own", set_active=True)
    close(logits(other, family), expected)


@pytest.mark.parametrize(("family", "form"), [*CASES, ("gpt_neox", "series")])
def test_peft_loads_ours_and_agrees(family, form, tmp_path):
    targets = TARGETS.get(family, ["dense"])
    model = ours(family)
    model.add_adapter("a", OFTConfig(target_modules=targets, **FORMS[form]))
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
    torch.manual_seed(0)
    # with embeddings, PEFT has no gradient of padding either
    config = theirs(family, init_weights=False, **FORMS[form])
    peer = peft.get_peft_model(base, config).double().eval()
    mine.add_adapter("a", OFTConfig(target_modules=TARGETS[family], **FORMS[form]))
    mine.train_adapter("a")
    mine.double().eval()
    found = {
        name.rpartition(".")[0].removesuffix(".oft_R").removesuffix(".oft_embedding_R"): module
        for name, module in peer.named_modules()
        if type(module).__name__ == "OFTRotationModule"
    }
    own = dict(mine.adapter_modules("a"))
    assert len(found) == len(own)
    pairs = [
        (own[path], module)
        for name, module in found.items()
        for path in own
        if name == path or name.endswith(f".{path}")
    ]
    assert len(pairs) == len(own)
    with torch.no_grad():
        for adapter, module in pairs:
            adapter.oft_R.copy_(module.weight)
    inputs = tiny_inputs(family)
    if family == "t5":
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :3]
    inputs = {k: t.double() if t.is_floating_point() else t for k, t in inputs.items()}
    outputs = [net(**inputs).logits for net in (mine, peer)]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-10)
    source = torch.Generator().manual_seed(0)
    weights = torch.randn(outputs[0].shape, generator=source, dtype=torch.float64)
    for output in outputs:
        (output * weights).sum().backward()
    for adapter, module in pairs:
        grad, peers = adapter.oft_R.grad, module.weight.grad
        scale = max(1.0, peers.abs().max().item())
        assert peers.abs().max() > 1e-4
        torch.testing.assert_close(grad / scale, peers / scale, rtol=0, atol=1e-10)


@pytest.mark.parametrize("asked", [40, 60])
def test_sizes_that_peft_adjusted_load_as_they_are(asked, tmp_path):
    with pytest.warns(UserWarning, match="Invalid `oft_block_size`"):
        expected = trained("bert", theirs("bert", oft_block_size=asked), tmp_path / "theirs")
    model = ours("bert")
    model.load_adapter(tmp_path / "theirs", load_as="a", set_active=True)
    close(logits(model, "bert"), expected)
    # one block of each layer, 32 and 64 wide; or blocks of 32
    sizes = {module.block_size for _, module in model.adapter_modules("a")}
    assert sizes == ({32} if asked == 40 else {32, 64})
    model.save_adapter(tmp_path / "back", "a", format="peft")
    close(reloaded("bert", tmp_path / "back"), expected)


def test_what_one_config_of_peft_cannot_say_is_refused(tmp_path):
    model = ours("bert")
    small = OFTConfig(oft_block_size=8, target_modules=["query"])
    model.add_adapter("a", ConfigUnion(small, small.replace(
        oft_block_size=32, target_modules=["intermediate.dense"])))  # fmt: skip
    with refused(model, CheckpointError, "oft_block_size", "(8, 32)", "format='native'"):
        model.save_adapter(tmp_path, "a", format="peft")
    for family, config, why in (
        ("gpt2", "oft[oft_block_size=4,target_modules=['c_fc']]", "Conv1D"),
        ("gpt2", "oft[oft_block_size=4,attn_matrices=['q']]", "Conv1D"),
        ("gpt_neox", "oft[oft_block_size=4]", "parts of the layer"),
        ("qwen3_moe", "oft[oft_block_size=4,output_lora=True]", "the parameter"),
    ):
        model = ours(family)
        model.add_adapter("a", config)
        with refused(model, CheckpointError, why, "format='native'"):
            model.save_adapter(tmp_path, "a", format="peft", with_head=False)


@pytest.mark.parametrize("version", [None, "0.17.1", "0.16.0.dev0", "odd"])
def test_the_series_of_older_releases_is_refused(version, tmp_path):
    expected = trained("bert", theirs("bert", oft_block_size=8), tmp_path)
    change(tmp_path, peft_version=version)
    model = ours("bert")
    says = ["use_cayley_neumann=True", f"peft_version={str(version)!r}", '"peft_version": "0.18.0"']
    with refused(model, CheckpointError, *says):
        model.load_adapter(tmp_path, load_as="a")
    change(tmp_path, peft_version="0.18.0")
    model.load_adapter(tmp_path, load_as="a", set_active=True)
    close(logits(model, "bert"), expected)
    # the exact transform is the same in every release
    change(tmp_path, peft_version=version, use_cayley_neumann=False)
    model.load_adapter(tmp_path, load_as="b")


@pytest.mark.parametrize(
    ("shape", "fields"),
    [((4, 27), {}), ((3, 28), {}), ((1, 28), {}), ((4, 28), {"block_share": True}),
     ((28,), {}), ((4, 28, 1), {}), ((32, 0), {}), ((5, 10), {})],
)  # fmt: skip
def test_a_tensor_that_is_no_triangle_is_refused(shape, fields, tmp_path):
    trained("bert", theirs("bert", oft_block_size=8), tmp_path)
    change(tmp_path, **fields)
    tensors = load_file(tmp_path / TENSORS)
    key = next(key for key in tensors if "query" in key)
    save_file({**tensors, key: torch.zeros(shape)}, tmp_path / TENSORS)
    model = ours("bert")
    with refused(model, AdapterZooError, "load_adapter(", "self.query"):
        model.load_adapter(tmp_path, load_as="a")


def test_fields_without_effect_are_left_out(tmp_path):
    fields = {"oft_block_size": 8, "use_cayley_neumann": False, "num_cayley_neumann_terms": 9}
    trained("bert", theirs("bert", eps=0.5, module_dropout=0.25, **fields), tmp_path)
    model = ours("bert")
    model.load_adapter(tmp_path, load_as="a")
    config = model.adapters_config["a"]
    assert (config.num_cayley_neumann_terms, config.eps) == (5, 6e-5)
    assert config.module_dropout == 0.25
    model.save_adapter(tmp_path / "back", "a", format="peft")
    said = json.loads((tmp_path / "back" / CONFIG).read_text())
    assert (said["use_cayley_neumann"], said["module_dropout"]) == (False, 0.25)
