"""Bottlenecks that `adapters` puts elsewhere than it documents: its files give its outputs.

The truth is a forward written out here from its sources: the plain modules of transformers in its
order, in float64. `bottleneck_layer` is what its layer computes of h, inp and a norm.
"""

import copy
import json

import pytest
import torch
from families import tiny_config, tiny_inputs
from safetensors.torch import save_file
from snapshots import refused, stir
from torch.nn.functional import gelu, linear, relu, silu
from transformers import AutoConfig, AutoModel

from adapterzoo import AdapterConfig, AdapterFusionConfig, Fuse, SeqBnInvConfig, init
from adapterzoo.errors import CheckpointError

ACTIVATIONS = {"relu": relu, "swish": silu, "gelu": gelu}
GPTJ = {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "vocab_size": 99,
        "n_positions": 64}  # fmt: skip
IDS = torch.randint(3, 90, (2, 6), generator=torch.Generator().manual_seed(0))


def plain(family):
    """A model in float64 whose norms and factors are not their initial values."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("gptj", **GPTJ) if family == "gptj" else tiny_config(family)
    config._attn_implementation = "eager"
    model = AutoModel.from_config(config).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


# --- the layer of adapters ---


def bottleneck_layer(t, values, h, inp, norm, hooked=False):
    """R of h, the residual inp and a norm; `hooked`: the model adds inp by itself."""
    if t is None:
        return h if hooked else norm(h + inp) if norm else h + inp
    if values["is_parallel"]:
        n = inp
        to = None
    else:
        n, to = h, h
        if values["original_ln_before"]:
            n = h + inp
            to = n if values["residual_before_ln"] == "post_add" else h
            n = norm(n) if norm else n
        to = to if values["residual_before_ln"] else n
    inner = linear(n, t["adapter_down.0.weight"], t["adapter_down.0.bias"])
    inner = ACTIVATIONS[values["non_linearity"]](inner)
    r = linear(inner, t["adapter_up.weight"], t["adapter_up.bias"]) * values["scaling"]
    if to is None:
        r = r + h
    elif values["ln_after"]:
        weights = t["adapter_norm_after.weight"], t["adapter_norm_after.bias"]
        r = r + to if values["adapter_residual_before_ln"] else r
        r = torch.nn.functional.layer_norm(r, r.shape[-1:], *weights)
        r = r if values["adapter_residual_before_ln"] else r + to
    else:
        r = r + to
    if not values["original_ln_after"] or hooked:
        return r
    return norm(r + inp) if norm else r + inp


def output_of(module, run):
    """The output of a module within a call."""
    found = []
    handle = module.register_forward_hook(lambda _module, _args, out: found.append(out))
    run()
    handle.remove()
    return found[0]


def albert(model, at, inverse):
    x = inverse(model.embeddings(IDS))
    x = model.encoder.embedding_hidden_mapping_in(x)
    layer = model.encoder.albert_layer_groups[0].albert_layers[0]
    for _ in range(model.config.num_hidden_layers):
        h = output_of(layer.attention.dense, lambda x=x: layer.attention(x, None))
        # the stream comes first, where a layer's output is expected
        x = at(0, "mh_adapter", x, h, layer.attention.LayerNorm)
        x = at(0, "output_adapter", layer.ff_chunk(x), x, layer.full_layer_layer_norm)
    return x


def beit(model, at, inverse):
    x = model.embeddings(pixels(model))
    x = x[0] if isinstance(x, tuple) else x
    for i, layer in enumerate(model.layers):
        h = layer.lambda_1 * layer.attention(layer.layernorm_before(x), attention_mask=None)[0]
        x = at(i, "mh_adapter", h, x, None)
        h = layer.lambda_2 * layer.mlp(layer.layernorm_after(x))
        x = at(i, "output_adapter", h, x, None)
    return model.layernorm(x)


def gptj(model, at, inverse):
    x = inverse(model.wte(IDS))
    steps = torch.arange(IDS.shape[1])[None]
    places = {"position_ids": steps}
    if hasattr(model, "rotary_emb"):
        places = {"position_embeddings": model.rotary_emb(x, position_ids=steps)}
    mask = torch.full((IDS.shape[1],) * 2, -torch.inf, dtype=x.dtype).triu(1)[None, None]
    for i, layer in enumerate(model.h):
        normed = layer.ln_1(x)
        attended = layer.attn(normed, attention_mask=mask, **places)[0]
        fed = layer.mlp(normed)
        x = at(i, "mh_adapter", attended, x, None)
        x = at(i, "output_adapter", fed, x, None)
    return model.ln_f(x)


def hooked(names):
    """The models that adapters reaches by hooks: (o, module before, norm) of each sub-layer."""

    def run(model, at, inverse):
        layers, seen = model.layers, {}
        for i, layer in enumerate(layers):
            for location, (out, before, norm) in names.items():
                # of the last layer: its closures share one variable
                ln = layers[-1].get_submodule(norm) if norm else None

                def keep(_module, args, location=location):
                    seen[location] = args[0]

                def adapt(_module, _args, h, i=i, location=location, ln=ln):
                    return at(i, location, h, seen[location], ln, hooked=True)

                layer.get_submodule(before).register_forward_pre_hook(keep)
                layer.get_submodule(out).register_forward_hook(adapt)
        return model(IDS)[0]

    return run


def pixels(model):
    size = model.config.image_size
    source = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, size, size, generator=source, dtype=torch.float64)


GEMMA = hooked(
    {
        "mh_adapter": ("self_attn.o_proj", "input_layernorm", "post_attention_layernorm"),
        "output_adapter": (
            "mlp.down_proj", "pre_feedforward_layernorm", "post_feedforward_layernorm",
        ),
    }
)  # fmt: skip
MODERNBERT = hooked(
    {"mh_adapter": ("attn.Wo", "attn", "mlp_norm"), "output_adapter": ("mlp.Wo", "mlp", "")}
)

# family to its forward, the path of block i in its files, and its names below it
FAMILIES = {
    "albert": (albert, "encoder.albert_layer_groups.0.albert_layers.{}",
               {"mh_adapter": "attention.attention_adapters", "output_adapter": "output_adapters"}),
    "beit": (beit, "encoder.layer.{}", {}),
    "gemma2": (GEMMA, "layers.{}", {}),
    "gemma3_text": (GEMMA, "layers.{}", {}),
    "gptj": (gptj, "h.{}", {}),
    "modernbert": (MODERNBERT, "layers.{}", {}),
}  # fmt: skip
BELOW = {"mh_adapter": "attention_adapters", "output_adapter": "output_adapters"}

CONFIGS = {
    "seq_bn": {},
    "double_seq_bn": {},
    "par_bn": {},
    "par_bn both": {"mh_adapter": True},
    "seq_bn both": {"mh_adapter": True},
    "seq_bn post_add": {"mh_adapter": True, "residual_before_ln": "post_add"},
    "seq_bn own": {"mh_adapter": True, "residual_before_ln": False},
    "seq_bn inside": {"mh_adapter": True, "ln_after": True, "adapter_residual_before_ln": True},
    "double_seq_bn norm": {"ln_after": True},
    "seq_bn plus": {"mh_adapter": True, "residual_before_ln": False, "original_ln_after": False},
}  # fmt: skip


def written(folder, family, name, **more):
    """Write a file as adapters does; return its fields, and its tensors by block and location."""
    base = AdapterConfig.load(name.split()[0]).replace(reduction_factor=4, **CONFIGS[name])
    values = base.to_dict() | more
    for ours in ("architecture", "convention", "site_convention", "dtype"):
        values.pop(ours)
    values["leave_out"] = list(values["leave_out"])
    _, path, below = FAMILIES[family]
    width = tiny_width(family)
    source = torch.Generator().manual_seed(1)
    tensors, by_place = {}, {}
    for i in range(1 if family == "albert" else 2):
        for location in ("mh_adapter", "output_adapter"):
            if not values[location]:
                continue
            shapes = {
                "adapter_down.0.weight": (width // 4, width),
                "adapter_down.0.bias": (width // 4,),
                "adapter_up.weight": (width, width // 4),
                "adapter_up.bias": (width,),
            }
            if values["ln_after"]:
                shapes |= {
                    "adapter_norm_after.weight": (width,),
                    "adapter_norm_after.bias": (width,),
                }
            mine = {
                k: 0.4 * torch.randn(shape, generator=source, dtype=torch.float64)
                for k, shape in shapes.items()
            }
            by_place[i, location] = mine
            start = f"{path.format(i)}.{ {**BELOW, **below}[location] }.adapters.a."
            tensors |= {start + key: tensor for key, tensor in mine.items()}
    document = {"config": values, "name": "a", "model_type": family, "version": "adapters.1.3.0",
                "model_class": "X", "model_name": "x", "hidden_size": width}  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(document))
    save_file(tensors, folder / "adapter.safetensors")
    return values, by_place


def tiny_width(family):
    return 32 if family == "gptj" else tiny_config(family).hidden_size


def hidden(model, family):
    given = {"pixel_values": pixels(model)} if family == "beit" else {"input_ids": IDS}
    with torch.no_grad():
        return model(**given)[0]


def worst(a, b):
    return float((a - b).abs().max())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_gives_the_outputs_of_its_author(tmp_path, family, name):
    base = plain(family)
    model = init(copy.deepcopy(base))
    values, tensors = written(tmp_path, family, name)
    if family in ("gemma2", "gemma3_text", "modernbert") and not values["original_ln_after"]:
        pytest.skip("adapters refuses the config where it hooks")

    def at(i, location, h, inp, norm, hooked=False):
        return bottleneck_layer(tensors.get((i, location)), values, h, inp, norm, hooked)

    with torch.no_grad():
        expected = FAMILIES[family][0](base, at, lambda x: x)
    before = hidden(model, family)
    model.load_adapter(tmp_path, load_as="b", set_active=True)
    found = hidden(model, family)
    error = worst(found, expected)
    assert error < 1e-10
    assert worst(before, expected) > 1e-3
    # exporting it says the same
    model.save_adapter(tmp_path / "again", "b", format="adapterhub")
    again = json.loads((tmp_path / "again" / "adapter_config.json").read_text())["config"]
    assert again == values
    model.load_adapter(tmp_path / "again", load_as="c", set_active=True)
    assert worst(hidden(model, family), expected) < 1e-10


@torch.no_grad()
def test_a_result_that_exceeds_float16_is_not_finite(tmp_path):
    model = init(plain("beit"))
    model.layers[1].lambda_2.fill_(1e-5)
    written(tmp_path, "beit", "double_seq_bn")
    model.load_adapter(tmp_path, load_as="b", set_active=True)
    images, expected = pixels(model), hidden(model, "beit")
    for dtype in (torch.float32, torch.bfloat16):
        found = model.to(dtype)(images.to(dtype))[0]
        assert worst(found.double(), expected) < 0.1
    model.to(torch.float16)
    assert not model(images.half())[0].isfinite().all()
    model.layers[1].lambda_2.fill_(0.1)
    assert model(images.half())[0].isfinite().all()


def test_a_feature_whose_factor_is_zero_stays_that_of_the_base_model(tmp_path):
    base = plain("beit")
    with torch.no_grad():
        for layer in base.layers:
            layer.lambda_1[3] = layer.lambda_2[5] = 0.0
    model = init(copy.deepcopy(base))
    values, tensors = written(tmp_path, "beit", "double_seq_bn")

    def at(i, location, h, inp, norm):
        layer = base.layers[i]
        factor = layer.lambda_1 if location == "mh_adapter" else layer.lambda_2
        r = bottleneck_layer(tensors[i, location], values, h, inp, norm)
        return torch.where(factor == 0, inp, r)

    with torch.no_grad():
        expected = beit(base, at, lambda x: x)
    model.load_adapter(tmp_path, load_as="b", set_active=True)
    assert worst(hidden(model, "beit"), expected) < 1e-10
    model.train_adapter("b")
    model(pixel_values=pixels(model))[0].sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


# --- invertible functions ---

# family to the module whose output they change, and the path of their tensors
ENTRIES = {
    "albert": ("embeddings", ""),
    "clip": ("text_model.embeddings", "text_model."),
    "electra": ("embeddings", ""),
    "gemma2": ("embed_tokens", ""),
    "gemma3_text": ("embed_tokens", ""),
    "modernbert": ("embeddings", ""),
    "whisper": ("encoder.layer_norm", "encoder."),
}


def coupling(t, x):
    """NICE: y₁ = x₁ + F(x₂), y₂ = x₂ + G(y₁)."""

    def of(name, x):
        inner = relu(linear(x, t[f"{name}.0.weight"], t[f"{name}.0.bias"]))
        return linear(inner, t[f"{name}.2.weight"], t[f"{name}.2.bias"])

    x1, x2 = x.chunk(2, -1)
    y1 = x1 + of("F", x2)
    return torch.cat([y1, x2 + of("G", y1)], -1)


@pytest.mark.parametrize("family", ENTRIES)
def test_an_invertible_function_acts_where_its_author_had_it(tmp_path, family):
    base = plain(family)
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in tiny_inputs(family).items()}
    path, start = ENTRIES[family]
    module = base.get_submodule(path)
    width = output_of(module, lambda: base(**inputs)).shape[-1]
    source = torch.Generator().manual_seed(1)
    shapes = {"0.weight": (width // 4, width // 2), "0.bias": (width // 4,),
              "2.weight": (width // 2, width // 4), "2.bias": (width // 2,)}  # fmt: skip
    t = {
        f"{name}.{key}": 0.4 * torch.randn(shape, generator=source, dtype=torch.float64)
        for name in "FG"
        for key, shape in shapes.items()
    }
    model = init(copy.deepcopy(base))
    # bottlenecks that are the identity
    fields = {"reduction_factor": 4, "init_weights": "mam_adapter"}
    placement = "paper" if family == "clip" else family
    model.add_adapter("there", SeqBnInvConfig(**fields, site_convention=placement))
    model.save_adapter(tmp_path, "there", format="adapterhub")
    file = tmp_path / "pytorch_adapter.bin"
    tensors = torch.load(file, weights_only=True)
    changed = {f"{start}invertible_adapters.there.{key}": tensor for key, tensor in t.items()}
    assert changed.keys() <= tensors.keys()
    torch.save(tensors | changed, file)
    # transformers 5 multiplies inside of the table, 4.57 behind it
    scale = module.embed_scale if family == "gemma2" else 1.0
    module.register_forward_hook(lambda _module, _args, out: scale * coupling(t, out / scale))
    before = first(model, inputs)
    expected = first(base, inputs)
    model.load_adapter(tmp_path, load_as="b", set_active=True)
    error = worst(first(model, inputs), expected)
    assert error < 1e-10
    assert worst(before, expected) > 1e-3


@pytest.mark.parametrize("family", ["beit", "vit"])
def test_a_field_that_makes_nothing_there_makes_nothing_here(tmp_path, family):
    """There are no invertible functions in these; a file has the field, and no tensors of it."""
    model = init(plain(family).float())
    model.add_adapter("there", "seq_bn[reduction_factor=4]")
    model.save_adapter(tmp_path, "there", format="adapterhub")
    file = tmp_path / "adapter_config.json"
    document = json.loads(file.read_text())
    document["config"] |= {"inv_adapter": "nice", "inv_adapter_reduction_factor": 2}
    file.write_text(json.dumps(document))
    model.load_adapter(tmp_path, load_as="b")
    assert model.adapters_config["b"] == model.adapters_config["there"]
    model.add_adapter("c", "seq_bn_inv")
    with refused(model, CheckpointError, "inv_adapter='nice'", "inv_adapter=None"):
        model.save_adapter(tmp_path / "c", "c", format="adapterhub")


def first(model, inputs):
    with torch.no_grad():
        out = model(**inputs)
    return next(v for v in out.values() if isinstance(v, torch.Tensor))


# --- fusions ---


def test_a_fusion_of_parallel_bottlenecks_adds_the_stream_once_more(tmp_path):
    """What is fused is added to inp, then to h, and inp is added by the block."""
    base = plain("bert")
    model = init(copy.deepcopy(base))
    for name in "ab":
        model.add_adapter(name, "par_bn[reduction_factor=4]")
        stir(model, name)
    model.add_adapter_fusion(Fuse("a", "b"), AdapterFusionConfig(adds_input=True))
    model.save_adapter_fusion(tmp_path / "there", Fuse("a", "b"), format="adapterhub")
    config = json.loads((tmp_path / "there" / "adapter_fusion_config.json").read_text())["config"]
    assert "adds_input" not in config
    tensors = torch.load(tmp_path / "there" / "pytorch_model_adapter_fusion.bin", weights_only=True)
    adapters = {name: dict(model.adapter_modules(name)) for name in "ab"}

    def update(m, inp):
        inner = relu(linear(inp, m.adapter_down[0].weight, m.adapter_down[0].bias))
        return 4.0 * linear(inner, m.adapter_up.weight, m.adapter_up.bias)

    def fused(i, h, inp):
        start = f"encoder.layer.{i}.output.adapter_fusion_layer.a,b."
        t = {key.removeprefix(start): tensor for key, tensor in tensors.items()}
        found = [m for ms in adapters.values() for p, m in ms.items() if f"layer.{i}." in p]
        ups = torch.stack([update(m, inp) for m in found], -2)
        query = linear(inp, t["query.weight"], t["query.bias"])
        keys = linear(ups, t["key.weight"], t["key.bias"])
        shares = (keys @ query.unsqueeze(-1)).squeeze(-1).softmax(-1)
        values = linear(ups, t["value.weight"])
        return (shares.unsqueeze(-2) @ values).squeeze(-2) + inp + h

    with torch.no_grad():
        x = base.embeddings(IDS)
        for i, layer in enumerate(base.encoder.layer):
            inp = layer.attention(x, None)[0]
            h = layer.output.dense(layer.intermediate(inp))
            x = layer.output.LayerNorm(fused(i, h, inp) + inp)
    model.delete_adapter_fusion(Fuse("a", "b"))
    model.load_adapter_fusion(tmp_path / "there")
    model.set_active_adapters(Fuse("a", "b"))
    error = worst(hidden(model, "bert"), x)
    assert error < 1e-10
    # without it, as here by default, it is another function, and not written
    model.delete_adapter_fusion(Fuse("a", "b"))
    model.add_adapter_fusion(Fuse("a", "b"))
    with refused(model.float(), CheckpointError, "adds_input=True", "adds_input=False"):
        model.save_adapter_fusion(tmp_path / "no", Fuse("a", "b"), format="adapterhub")
