"""Anatomy: roles, fused layers and stream sites, each against what the model itself does."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
import transformers
from architectures import survey as surveying
from architectures.flow import prove
from architectures.tiny_models import tiny_model
from families import FAMILIES, tiny_config, tiny_inputs
from torch import nn
from transformers import AutoConfig, AutoModel

from adapterzoo.anatomy import Anatomy, OutputSlice, find
from adapterzoo.errors import SiteError

TABLE = Path(__file__).parent.parent / "docs" / "architecture-table.md"


def model_of(family: str, **changes) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**FAMILIES.get(family, {}), **changes})
    # the fast kernel for experts has no float64
    config._experts_implementation = "eager"
    return AutoModel.from_config(config).eval().double()


def doubled(inputs: dict) -> dict:
    return {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


def on_meta(family: str) -> nn.Module:
    with torch.device("meta"):
        return AutoModel.from_config(tiny_config(family)).eval()


KNOWN = {
    ("bert", "encoder.layer.0"): [
        ("attention", "attention.output.dense", "attention.self", "attention.output.LayerNorm"),
        ("mlp", "output.dense", "intermediate.dense", "output.LayerNorm"),
    ],
    ("gpt2", "h.1"): [
        ("attention", "attn.c_proj", "ln_1", None),
        ("mlp", "mlp.c_proj", "ln_2", None),
    ],
    ("llama", "layers.0"): [
        ("attention", "self_attn.o_proj", "input_layernorm", None),
        ("mlp", "mlp.down_proj", "post_attention_layernorm", None),
    ],
    ("t5", "decoder.block.1"): [
        ("attention", "layer.0.SelfAttention.o", "layer.0.layer_norm", None),
        ("cross", "layer.1.EncDecAttention.o", "layer.1.layer_norm", None),
        ("mlp", "layer.2.DenseReluDense.wo", "layer.2.layer_norm", None),
    ],
    ("gemma2", "layers.0"): [
        ("attention", "post_attention_layernorm", "input_layernorm", None),
        ("mlp", "post_feedforward_layernorm", "pre_feedforward_layernorm", None),
    ],
    ("dinov2", "encoder.layer.0"): [
        ("attention", "layer_scale1", "norm1", None),
        ("mlp", "layer_scale2", "norm2", None),
    ],
    ("mixtral", "layers.0"): [
        ("attention", "self_attn.o_proj", "input_layernorm", None),
        ("mlp", "mlp", "post_attention_layernorm", None),
    ],
}


@pytest.mark.parametrize(("family", "path"), KNOWN)
def test_known_stream_sites(family, path):
    block = next(b for b in find(on_meta(family)).blocks if b.path == path)
    short = [
        tuple(p and p.removeprefix(f"{path}.") for p in (s.kind, s.out, s.source, s.norm))
        for s in block.sublayers
    ]
    assert short == KNOWN[family, path]


class Probe:
    """What modules read and write during one real forward, by path."""

    def __init__(self, model: nn.Module, paths: set[str]) -> None:
        self.read: dict[str, torch.Tensor] = {}
        self.written: dict[str, torch.Tensor] = {}
        for path in paths:
            module = model.get_submodule(path)
            module.register_forward_pre_hook(self._reads(path), with_kwargs=True)
            module.register_forward_hook(self._writes(path))

    def _reads(self, path):
        def hook(module, args, kwargs):
            self.read.setdefault(path, args[0] if args else next(iter(kwargs.values())))

        return hook

    def _writes(self, path):
        def hook(module, args, result):
            out = result if isinstance(result, torch.Tensor) else result[0]
            self.written.setdefault(path, out)

        return hook


def gain(model: nn.Module, family: str, block: str, kind: str) -> torch.Tensor | float:
    """BEiT multiplies each branch by a learned gain that is a parameter of the block."""
    if family != "beit":
        return 1.0
    return getattr(model.get_submodule(block), "lambda_1" if kind == "attention" else "lambda_2")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_residual_stream_in_numbers(family):
    model = model_of(family)
    anatomy = find(model)
    paths = {b.path for b in anatomy.blocks}
    for block in anatomy.blocks:
        paths |= {p for s in block.sublayers for p in (s.out, s.source, s.norm) if p}
    probe = Probe(model, paths)
    with torch.no_grad():
        model(**doubled(tiny_inputs(family)))

    def close(one, other):
        return torch.allclose(one, other, rtol=0, atol=1e-10)

    assert anatomy.blocks
    for block in anatomy.blocks:
        assert [s.kind for s in block.sublayers][-1] == "mlp"
        stream = probe.read[block.path]
        for sub in block.sublayers:
            inp = probe.read[sub.source]
            h = probe.written[sub.out] * gain(model, family, block.path, sub.kind)
            assert h.abs().max() > 1e-6
            if sub.norm is not None:
                assert close(probe.read[sub.norm], inp + h), sub
                stream = probe.written[sub.norm]
            else:
                # sub-layers that work side by side (GPT-NeoX) all read the block's input
                assert close(inp, stream) or close(inp, probe.read[block.path]), sub
                stream = stream + h
        if family == "albert":
            continue  # one block that is called twice: the last output is not the first call's
        assert close(probe.written[block.path], stream), block.path


def test_the_numeric_probe_bites():
    # attention's output taken for the feed-forward part's: the sum must not come out
    model = model_of("gpt2")
    block = find(model).blocks[0]
    attention, mlp = block.sublayers[0], block.sublayers[-1]
    probe = Probe(model, {p for s in block.sublayers for p in (s.out, s.source)} | {block.path})
    with torch.no_grad():
        model(**doubled(tiny_inputs("gpt2")))
    wrong = probe.read[mlp.source] + probe.written[attention.out]
    assert not torch.allclose(wrong, probe.written[block.path], rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_flow_proves_every_family(family):
    model = on_meta(family)
    model.config._experts_implementation = "batched_mm"
    anatomy = find(model)
    inputs = {k: v.to("meta") for k, v in tiny_inputs(family).items()}
    verdicts, failure = prove(model, anatomy.blocks, lambda: model(**inputs))
    assert failure == ""
    assert verdicts == dict.fromkeys(range(len(anatomy.blocks)), "")


MUTATIONS = {
    "another output": ("bert", 1, {"out": "intermediate.dense"}, "never added"),
    "another norm": ("bert", 1, {"norm": "attention.output.LayerNorm"}, "does not read inp + h"),
    "another source": ("bert", 1, {"source": "attention.self"}, "does not read inp + h"),
    "in front of the branch norm": ("gemma2", 1, {"out": "mlp.down_proj"}, "never added"),
    "the norm before attention": ("llama", 1, {"source": "input_layernorm"}, "does not read"),
    "the normalised stream": ("llama", 1, {"source": "mlp.gate_proj"}, "does not read"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_flow_refuses_a_wrong_site(mutation):
    family, number, changes, complaint = MUTATIONS[mutation]
    model = on_meta(family)
    block = find(model).blocks[0]
    full = {key: f"{block.path}.{value}" for key, value in changes.items()}
    subs = list(block.sublayers)
    subs[number] = dataclasses.replace(subs[number], **full)
    inputs = {k: v.to("meta") for k, v in tiny_inputs(family).items()}
    wrong = dataclasses.replace(block, sublayers=tuple(subs))
    verdicts, _ = prove(model, [wrong], lambda: model(**inputs))
    assert complaint in verdicts[0] or "norm does not read" in verdicts[0]


@pytest.mark.parametrize("fails", ["at the first hook", "half-way", "at a module that is missing"])
def test_a_proof_that_cannot_begin_leaves_no_hook_behind(fails, monkeypatch):
    model = on_meta("bert")
    first, *others = find(model).blocks
    if fails == "at a module that is missing":
        sub = dataclasses.replace(first.sublayers[0], out=f"{first.path}.nowhere")
        first = dataclasses.replace(first, sublayers=(sub, *first.sublayers[1:]))
    else:
        register, calls = nn.Module.register_forward_hook, iter(range(99))

        def breaks(module, hook, **options):
            if next(calls) == (0 if fails == "at the first hook" else 3):
                raise RuntimeError("no hook can be here")
            return register(module, hook, **options)

        monkeypatch.setattr(nn.Module, "register_forward_hook", breaks)
    verdicts, failure = prove(model, [first, *others], lambda: None)
    assert verdicts == {}
    assert "nowhere" in failure or "no hook can be here" in failure
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "forward" not in vars(module)


_DECODER = {"vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_FALCON = {**_DECODER, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
FUSED = {
    "gpt2": ("gpt2", {}),
    "gpt_neox": ("gpt_neox", {}),
    "phi3": ("phi3", {}),
    "modernbert": ("modernbert", {}),
    "bloom": ("bloom", {**_DECODER, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "falcon per head": ("falcon", {**_FALCON, "multi_query": False, "alibi": False}),
    "falcon multi query": ("falcon", {**_FALCON, "multi_query": True}),
    "falcon new": ("falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "mpt": ("mpt", {**_DECODER, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}),
    "codegen": ("codegen", {**_DECODER, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_ctx": 64,
                            "n_positions": 64, "rotary_dim": 4}),
    "gpt_bigcode": ("gpt_bigcode", {**_DECODER, "n_embd": 32, "n_head": 4, "n_layer": 2,
                                    "n_positions": 64}),
    "gpt_bigcode per head": ("gpt_bigcode", {**_DECODER, "n_embd": 32, "n_head": 4, "n_layer": 2,
                                             "n_positions": 64, "multi_query": False}),
    "persimmon": ("persimmon", {**_FALCON, "intermediate_size": 64}),
    "deberta": ("deberta", {**FAMILIES["bert"], "relative_attention": False}),
    "moonshine": ("moonshine", {**_DECODER, "hidden_size": 32, "intermediate_size": 64,
                                "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2,
                                "encoder_num_attention_heads": 4,
                                "decoder_num_attention_heads": 4,
                                "encoder_num_key_value_heads": 4,
                                "decoder_num_key_value_heads": 4,
                                "decoder_start_token_id": 1}),
}  # fmt: skip


def features(rows: OutputSlice) -> torch.Tensor:
    grid = torch.arange(rows.groups * rows.width).reshape(rows.groups, rows.width)
    return grid[:, rows.start : rows.stop].flatten()  # [size]


class Bench:
    """One block's fused layer, whose output can be changed, and what the layer behind it reads."""

    def __init__(self, model: nn.Module, inputs: dict, fused: str, behind: str) -> None:
        self.model, self.inputs = model, inputs
        self.change = None
        self.seen = None
        model.get_submodule(fused).register_forward_hook(self._edit)
        model.get_submodule(behind).register_forward_pre_hook(self._look)

    def _edit(self, module, args, out):
        return out if self.change is None else self.change(out)

    def _look(self, module, args):
        if self.seen is None:
            self.seen = args[0].reshape(2, -1, args[0].shape[-1])

    def run(self, change=None) -> torch.Tensor:
        self.change, self.seen = change, None
        with torch.no_grad():
            self.model(**self.inputs)
        return self.seen


def scaled(rows, factor, token=None):
    def change(y):
        y = y.clone()
        flat = y.reshape(2, -1, y.shape[-1])
        where = slice(None) if token is None else slice(token, token + 1)
        flat[:, where, rows] = flat[:, where, rows] * factor
        return flat.reshape(y.shape)

    return change


def assert_affine(bench, rows):
    zero, one, two = (bench.run(scaled(rows, f)) for f in (0.0, 1.0, 2.0))
    assert not torch.allclose(zero, one)
    assert torch.allclose(two - one, one - zero, rtol=1e-9, atol=1e-10)


def assert_behaves(bench: Bench, role: str, rows: dict[str, torch.Tensor]) -> None:
    """Fails unless the features act as query, key, value, gate or input do."""
    mine, token = rows[role], 2
    if role in ("value", "mlp_in"):
        assert_affine(bench, mine)
        return
    if role == "mlp_gate":
        zero, one, two = (bench.run(scaled(mine, f)) for f in (0.0, 1.0, 2.0))
        assert not torch.allclose(two - one, one - zero, rtol=1e-6)
        return
    moved = (bench.run(scaled(mine, 3.0, token)) - bench.run()).abs().amax(dim=(0, 2))
    others = torch.arange(moved.shape[0]) != token
    if role == "query":
        # a token's query concerns that token's output only
        assert moved[token] > 1e-8
        assert moved[others].max() < 1e-12
    else:
        # a token's key concerns other tokens, and no one once all queries are zero
        assert moved[others].max() > 1e-8

        def unasked(factor):
            silent = scaled(rows["query"], 0.0)
            return bench.run(lambda y: scaled(mine, factor, token)(silent(y)))

        assert torch.allclose(unasked(1.0), unasked(3.0), rtol=0, atol=1e-12)


def fused_layers(name):
    family, config = FUSED[name]
    model = model_of(family, **config)
    anatomy = find(model)
    if family == "moonshine":
        block = next(b for b in anatomy.blocks if b.stack == "decoder.layers")
        inputs = {"input_values": torch.randn(2, 2000).double(),
                  "decoder_input_ids": torch.randint(3, 99, (2, 6))}  # fmt: skip
    else:
        block = anatomy.blocks[0]
        inputs = {"input_ids": torch.randint(3, 99, (2, 6))}
    for site in block.sites:
        if parts := tuple(p for p in block.parts if p.path == site.path)[:4]:
            behind = "attention_out" if site.role == "qkv" else "mlp_out"
            out = block.named(behind)[0].path
            yield model, inputs, site, parts, out


@pytest.mark.parametrize("name", FUSED)
def test_parts_of_fused_layers_act_as_their_roles_say(name):
    found = 0
    for model, inputs, site, parts, out in fused_layers(name):
        bench = Bench(model, inputs, site.path, out)
        rows = {part.role: features(part.output_slice) for part in parts}
        assert sorted(torch.cat(list(rows.values())).tolist()) == list(range(site.d_out))
        for part in parts:
            assert part.d_out == part.output_slice.size
            assert_behaves(bench, part.role, rows)
            found += 1
    assert found in (2, 3, 5)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "falcon new", "modernbert"])
def test_the_check_of_parts_bites(name):
    model, inputs, site, parts, out = next(fused_layers(name))
    bench = Bench(model, inputs, site.path, out)
    rows = {part.role: features(part.output_slice) for part in parts}
    for role in ("query", "key", "value"):
        for other in {"query", "key", "value"} - {role}:
            swapped = {**rows, role: rows[other], other: rows[role]}
            with pytest.raises(AssertionError):
                assert_behaves(bench, role, swapped)


def test_in_gate_order_is_told_apart():
    (layer,) = [f for f in fused_layers("moonshine") if f[2].role == "mlp_in"]
    assert [part.role for part in layer[3]] == ["mlp_in", "mlp_gate"]


EXPERTS = {
    "mixtral": FAMILIES["mixtral"],
    "qwen3_moe": FAMILIES["qwen3_moe"],
    "gpt_oss": {**FAMILIES["mixtral"], "layer_types": ["full_attention"] * 2},
    "llama4_text": {**FAMILIES["mixtral"], "intermediate_size_mlp": 64, "moe_layers": [0, 1],
                    "num_experts_per_tok": 1},
}  # fmt: skip


@pytest.mark.parametrize("family", EXPERTS)
def test_fused_experts(family):
    model = model_of(family, **EXPERTS[family])
    for module in model.modules():
        if isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
            for parameter in module.parameters(recurse=False):
                # small enough that gpt_oss clamps nothing
                nn.init.normal_(parameter, std=0.05)
    block = find(model).blocks[0]
    (into,) = [s for s in block.sites if s.parameter == "gate_up_proj"]
    (out,) = [s for s in block.sites if s.parameter == "down_proj"]
    assert (into.kind, into.role, into.d_in) == ("experts", "mlp_in", 32)
    assert (out.kind, out.role, out.d_out) == ("experts", "mlp_out", 32)
    assert into.d_out == 2 * out.d_in
    assert into.transposed == out.transposed == (family in ("gpt_oss", "llama4_text"))
    weight = model.get_submodule(into.path).gate_up_proj
    probe_path = block.sublayers[-1].out
    original = weight.detach().clone()
    shape = original.shape[1:]
    assert shape == ((into.d_in, into.d_out) if into.transposed else (into.d_out, into.d_in))

    def outputs(rows, factor):
        with torch.no_grad():
            index = (slice(None), slice(None), rows) if into.transposed else (slice(None), rows)
            weight.copy_(original)
            weight[index] = original[index] * factor
            probe = Probe(model, {probe_path})
            model(input_ids=torch.arange(3, 15).reshape(2, 6))
        return probe.written[probe_path]

    rows = {p.role: features(p.output_slice) for p in block.parts if p.path == into.path}
    for role, affine in (("mlp_in", True), ("mlp_gate", False)):
        zero, one, two = (outputs(rows[role], f) for f in (0.0, 1.0, 2.0))
        assert not torch.allclose(zero, one)
        assert torch.allclose(two - one, one - zero, rtol=1e-8, atol=1e-10) is affine


def test_latent_attention_and_gated_linear_attention_have_parts():
    with torch.device("meta"):
        deepseek = AutoModel.from_config(AutoConfig.for_model("deepseek_v3"))
        hybrid = AutoModel.from_config(AutoConfig.for_model("qwen3_next"))
    block = find(deepseek).blocks[0]
    (query,) = block.named("query")
    assert query.path.endswith("q_b_proj")
    parts = {p.role: p.output_slice for p in block.parts}
    assert parts == {"key": OutputSlice(128, 256, 0, 128), "value": OutputSlice(128, 256, 128, 256)}
    hybrids = find(hybrid).blocks[0].parts
    fused = {p.role: p.output_slice for p in hybrids if "linear_attn" in p.path}
    assert fused["query"] == OutputSlice(16, 768, 0, 128)
    assert fused["value"] == OutputSlice(16, 768, 256, 512)


def test_select_gives_layers_or_parts():
    bert, gpt2 = find(on_meta("bert")), find(on_meta("gpt2"))
    assert [s.path for s in bert.select("query", "value", layers=[1])] == [
        "encoder.layer.1.attention.self.query",
        "encoder.layer.1.attention.self.value",
    ]
    (query, value) = gpt2.select("query", "value", layers=[0])
    assert query.path == value.path == "h.0.attn.c_attn"
    assert (query.output_slice, value.output_slice) == (
        OutputSlice(1, 96, 0, 32),
        OutputSlice(1, 96, 64, 96),
    )
    assert query.transposed
    assert [s.role for s in gpt2.select("qkv", layers=[0])] == ["qkv"]
    assert bert.select("query", "value", "query") == bert.select("query", "value")


def test_select_keeps_cross_attention_apart():
    t5 = find(on_meta("t5"))
    assert len(t5.select("query")) == 4
    crossing = t5.select("query", cross=True)
    assert [s.path for s in crossing] == [
        f"decoder.block.{i}.layer.1.EncDecAttention.q" for i in range(2)
    ]
    assert len(t5.select("query", cross=None)) == 6


def test_blocks_are_numbered_stack_after_stack():
    t5, clip = find(on_meta("t5")), find(on_meta("clip"))
    assert t5.stacks == ("encoder.block", "decoder.block")
    assert [b.layer for b in t5.blocks] == [0, 1, 2, 3]
    assert clip.stacks == ("text_model.encoder.layers", "vision_model.encoder.layers")
    assert len(find(on_meta("albert")).blocks) == 1


def test_every_linear_is_found_once():
    for family in FAMILIES:
        model = on_meta(family)
        anatomy = find(model)
        paths = [s.path for s in anatomy.linears()]
        kinds = (nn.Linear, transformers.pytorch_utils.Conv1D)
        modules = dict(model.named_modules())
        attentions = [n for n, m in modules.items() if isinstance(m, nn.MultiheadAttention)]
        expected = {
            n
            for n, m in modules.items()
            if isinstance(m, kinds) and n.rpartition(".")[0] not in attentions
        }
        assert set(paths) == expected
        assert len(paths) == len(expected)
        for site in anatomy.linears():
            weight = modules[site.path].weight
            shape = (site.d_in, site.d_out) if site.transposed else (site.d_out, site.d_in)
            assert tuple(weight.shape) == shape


def test_meta_and_real_models_have_the_same_anatomy():
    assert find(on_meta("gemma2")) == find(model_of("gemma2"))


class Odd(nn.Module):
    """A block whose feed-forward part bears names that nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(8, 8) for _ in range(4))
        self.widen, self.shrink = nn.Linear(8, 16), nn.Linear(16, 8)


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)


def test_a_role_that_a_block_lacks_names_its_layers_and_the_row_to_write():
    block = Odd()
    del block.v_proj
    anatomy = find(Stack(Odd(), block))
    with pytest.raises(SiteError) as error:
        anatomy.select("query", "value")
    message = str(error.value)
    assert "'layers.1' has no layer with the role 'value'" in message
    assert "o_proj [8, 8] attention_out" in message
    assert "widen [16, 8] other" in message
    assert "Row(roles={r'<layer>': 'value'})" in message


def test_a_role_that_no_block_has():
    with pytest.raises(SiteError, match=r"no layer with the role 'mlp_in'.*Write one of these"):
        find(Stack(Odd())).select("mlp_in")
    with pytest.raises(SiteError, match=r"'quer' is not a role\. Legal roles: query, key.*Write"):
        find(Stack(Odd())).select("quer")  # type: ignore[arg-type]


def test_blocks_without_attention_are_not_asked_for_it():
    plain = nn.Module()
    plain.mlp = nn.Module()
    plain.mlp.fc1, plain.mlp.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)
    anatomy = find(Stack(Odd(), plain))
    assert [s.path for s in anatomy.select("query")] == ["layers.0.q_proj"]
    assert [s.path for s in anatomy.select("mlp_in")] == ["layers.1.mlp.fc1"]


def test_a_model_without_blocks_says_why():
    anatomy = find(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2)))
    assert isinstance(anatomy, Anatomy)
    assert anatomy.blocks == ()
    assert "convolutional network" in anatomy.reason
    assert [s.path for s in anatomy.linears()] == ["2"]
    with pytest.raises(SiteError, match="convolutional network"):
        anatomy.select("query")


def test_weights_that_torch_reads_without_a_call_are_no_linears():
    block = nn.Module()
    block.attn = nn.MultiheadAttention(8, 2)
    block.fc1, block.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)
    anatomy = find(Stack(block))
    stored = {s.parameter: s.role for s in anatomy.blocks[0].sites if s.parameter}
    assert stored == {"in_proj_weight": "qkv", "out_proj.weight": "attention_out"}
    assert [s.path for s in anatomy.linears()] == ["layers.0.fc1", "layers.0.fc2"]
    parts = [p for p in anatomy.blocks[0].parts if p.path == "layers.0.attn"]
    assert [p.output_slice for p in parts] == [
        OutputSlice(1, 24, 8 * i, 8 * i + 8) for i in range(3)
    ]


def test_layers_that_are_never_called_are_no_linears():
    # WavLM hands the weights of its projections to torch's attention
    with torch.device("meta"):
        anatomy = find(AutoModel.from_config(AutoConfig.for_model("wavlm")))
    stored = {s.parameter: s.role for s in anatomy.blocks[0].sites if s.parameter}
    assert stored == {
        "q_proj.weight": "query",
        "k_proj.weight": "key",
        "v_proj.weight": "value",
        "out_proj.weight": "attention_out",
    }
    assert anatomy.blocks[0].sublayers[0].out == "encoder.layers.0.attention"
    assert not [s.path for s in anatomy.linears() if s.path.endswith("_proj")]


def test_a_parameter_without_dimensions_has_no_width():
    sites = {site.path: site for site in find(tiny_model("clip").model).others}
    # the logit scale of both towers
    assert sites[""].d_out == 1


def test_input_embeddings_that_are_no_layer_are_none():
    """Perceiver returns its matrix of latents."""
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model("perceiver"))
    assert isinstance(model.get_input_embeddings(), nn.Parameter)
    assert [s for s in find(model) if s.kind == "embedding"] == []


# of the test of all model types
PARTS = 10


def table_version() -> str:
    return TABLE.read_text(encoding="utf-8").splitlines()[0].rpartition(" ")[2]


def rows(markdown):
    """Model types to their columns; those behind the remark are those of test_architectures.py."""
    table = [x.split("|") for x in markdown.splitlines() if x.startswith("| ")]
    return {row[1].strip(): "|".join(row[1:8]) for row in table[2:]}


@pytest.mark.sweep
@pytest.mark.skipif(
    transformers.__version__ != table_version(),
    reason=f"docs/architecture-table.md was made with transformers {table_version()}",
)
@pytest.mark.parametrize("first", range(PARTS))
def test_every_model_type_of_transformers(first):
    part = slice(first, None, PARTS)
    lines = list(surveying.survey(part))
    assert [f"{x.model_type}: {x.wrong}" for x in lines if x.wrong] == []
    committed = rows(TABLE.read_text(encoding="utf-8"))
    found = rows(surveying.render(lines, transformers.__version__))
    assert sorted(committed)[part] == list(found)
    # where more packages are installed, more models can be built
    same = [k for k in found if surveying.NEEDS_PACKAGE not in committed[k]]
    assert {k: found[k] for k in same} == {k: committed[k] for k in same}
    assert all(x.remark for x in lines if x.has_attention and not x.complete)


def test_nearly_all_model_types_are_known():
    head = TABLE.read_text(encoding="utf-8").partition("\n| ")[0]
    totals = dict(re.findall(r"^- (.*): (\d+)", head, re.MULTILINE))
    assert int(totals["model types"]) == len(rows(TABLE.read_text(encoding="utf-8")))
    for total, least in {
        "of these with attention": 519,
        "of these with all roles and stream sites": 514,
        "of these with sub-layers that read only the stream and are simply added to it": 479,
        "distinct blocks whose stream sites were verified by a run": 896,
    }.items():
        assert int(totals[total]) >= least
