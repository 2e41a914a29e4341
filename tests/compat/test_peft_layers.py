"""PEFT's words for layers mean PEFT's layers, or are refused: fields × values × models × ways."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import peft
import pytest
import torch
import transformers
from families import tiny_config
from peft.tuners.lora.layer import LoraLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from peft_world import QUIET
from swept import all_but
from transformers import AutoConfig

import adapterzoo
import adapterzoo.peft
from adapterzoo import LoRAConfig
from adapterzoo.errors import AdapterZooError, ConfigError, SiteError

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]

# the class, names of two layers, of a stack of blocks, of a norm, and of the table of tokens
SHAPES = {
    "llama": ("LlamaForCausalLM", ["q_proj", "down_proj"], "model.layers", "model.norm",
              "embed_tokens"),
    "bart": ("BartForConditionalGeneration", ["q_proj", "fc1"], "model.decoder.layers",
             "model.encoder.layernorm_embedding", "model.encoder.embed_tokens"),
    "t5": ("T5ForConditionalGeneration", ["q", "wo"], "decoder.block", "encoder.final_layer_norm",
           "shared"),
    "whisper": ("WhisperForConditionalGeneration", ["q_proj", "fc1"], "model.encoder.layers",
                "model.encoder.layer_norm", "model.decoder.embed_tokens"),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", ["q_proj", "fc1"], "model.visual.blocks",
                 "model.language_model.norm", "model.language_model.embed_tokens"),
    "bert": ("BertForSequenceClassification", ["query", "output.dense"], "bert.encoder.layer",
             "bert.embeddings.LayerNorm", "word_embeddings"),
    "vit": ("ViTForImageClassification", ["q_proj", "fc1"], "vit.layers", "vit.layernorm", ""),
    "swin": ("SwinForImageClassification", ["q_proj", "fc1"],
             "swin.encoder.layers", "swin.layernorm", ""),
    "qwen3_moe": ("Qwen3MoeForCausalLM", ["q_proj", "k_proj"], "model.layers", "model.norm",
                  "embed_tokens"),
}  # fmt: skip


QWEN = {
    "text_config": {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2,
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
    },
    "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4,
                      "mlp_ratio": 2, "patch_size": 4, "spatial_merge_size": 2},
}  # fmt: skip
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2],
        "window_size": 2}  # fmt: skip


_plain: dict[str, Any] = {}


def plain(shape: str) -> Any:
    """A model of the shape."""
    if shape not in _plain:
        own = {"qwen2_vl": QWEN, "swin": SWIN}
        made = own.get(shape)
        config = AutoConfig.for_model(shape, **made) if made else tiny_config(shape)
        with torch.random.fork_rng(devices=()):
            _plain[shape] = getattr(transformers, SHAPES[shape][0])(config)
    return copy.deepcopy(_plain[shape])


def cases(shape: str) -> Iterator[dict[str, Any]]:
    """The fields, with each kind of value."""
    _, names, stack, norm, table = SHAPES[shape]
    paths = [path for path, _ in plain(shape).named_modules()]
    first, last = names
    one = next(p for p in paths if p.startswith(f"{stack}.0.") and p.endswith((first, last)))
    start, _, below = one.partition(".")
    list_name, short = stack.rpartition(".")[2], last.partition(".")[0]
    patterns = [
        "all-linear", rf".*\.{first}", rf"^{start}\..*\.{first}", rf"(?i).*\.{first.upper()}",
        rf"^(?!{stack}).*\.({first}|{last})", rf"^(?!{list_name}).*\.({first}|{last})",
        rf".*\.{first}$|.*\.{last}$", rf"^{stack}\.0\..*{short}.*",
    ]  # fmt: skip
    for targets in (names, {first}, [one], [one, first], [below], *patterns):
        # in models with experts, PEFT adapts all layers with the last names that one matches
        if not (isinstance(targets, str) and shape == "qwen3_moe"):
            yield {"target_modules": targets}
    both = {"target_modules": names}
    for excluded in (
        [last], [one], [below], first, rf".*{last}", rf"^{stack}\..*", rf"^(?!{stack}).*",
        [stack.partition(".")[2] or stack],
    ):  # fmt: skip
        yield {**both, "exclude_modules": excluded}
    for numbers in ([0], [1], 1):
        yield {**both, "layers_to_transform": numbers}
        yield {"layers_to_transform": numbers}
        for pattern in (list_name, [list_name, "layer"], "layers"):
            yield {**both, "layers_to_transform": numbers, "layers_pattern": pattern}
    yield {"target_modules": [one, last], "layers_to_transform": [1]}
    yield {**both, "layers_to_transform": [0], "exclude_modules": [one]}
    for key in (
        first, one, below, rf"^{one}$", rf"^(?!{stack}).*\.{first}", rf"^{stack}\..*",
        rf"^{list_name}\..*", r".*\.0\..*", rf"{first}|{last}",
    ):  # fmt: skip
        yield {
            **both,
            "rank_pattern": {key: 3, last: 5, f".*{first}": 4},
            "alpha_pattern": {key: 2},
        }
    for saved in (
        [norm], [norm.rpartition(".")[2]], ["norm"], [f"{stack}.1"], [f"{list_name}.1"],
        [norm, last], [one], ["1"],
    ):  # fmt: skip
        yield {"target_modules": [first], "modules_to_save": saved}
    for parameter in (f"{one}.weight", f"{first}.weight", "experts.gate_up_proj",
                      "model.layers.0.mlp.experts.down_proj"):  # fmt: skip
        only = {"target_modules": [], "target_parameters": [parameter]}
        yield from (
            only,
            {**only, "exclude_modules": [first]},
            {**only, "layers_to_transform": [0]},
        )
    for key in (table, table.rpartition(".")[2], f"{start}.{table}", "1"):
        yield {**both, "trainable_token_indices": {key: [1, 2]}}


Layers = dict[tuple[str, str], Any]


def theirs(shape: str, fields: dict[str, Any]) -> Layers:
    """What PEFT adapts, with its rank and scaling, and what it trains beside it."""
    model = peft.get_peft_model(plain(shape), peft.LoraConfig(**copy.deepcopy(fields)))
    found: Layers = {}
    for path, module in model.base_model.model.named_modules(remove_duplicate=False):
        inner = path.replace(".base_layer", "")
        if isinstance(module, LoraLayer):
            name = getattr(module, "parameter_name", "weight")
            inner = inner if name == "weight" else f"{inner}.{name}"
            found["lora", inner] = module.r["default"], module.scaling["default"]
        elif isinstance(module, ModulesToSaveWrapper):
            copies = module.modules_to_save["default"]
            for below, layer in copies.named_modules():
                if layer._parameters:
                    found["copy", f"{inner}.{below}".removesuffix(".")] = None
        elif isinstance(module, TrainableTokensWrapper):
            found["rows", inner] = None
    return found


def ours(model: Any) -> Layers:
    """The same of this library."""
    start = "" if model._backbone is model else f"{model.base_model_prefix}."
    found: Layers = {}
    record = model._adapter_state.records["default"]
    for placement in (p for places in record.places.values() for p in places):
        config, site = placement.config, placement.site
        # that of the output layer begins otherwise
        path = site.name.removeprefix("..") if site.name[0] == "." else f"{start}{site.name}"
        path = path.removesuffix(".weight")
        if config.architecture == "lora":
            found["lora", path] = config.rank_at(site.name), config.scaling_at(site.name)
        else:
            found[{"modules_to_save": "copy", "token_rows": "rows"}[config.architecture], path] = (
                None
            )
    return found


def native(shape: str, fields: dict[str, Any]) -> Any:
    """A model with the fields in a config of this library."""
    model = adapterzoo.init(plain(shape))
    model.add_adapter("default", LoRAConfig(**fields))
    return model


def given(shape: str, fields: dict[str, Any]) -> Any:
    """A model that got a config of PEFT."""
    model = adapterzoo.init(plain(shape))
    model.add_adapter("default", peft.LoraConfig(**fields))
    return model


def wrapped(shape: str, fields: dict[str, Any]) -> Any:
    """A model of the function with PEFT's name."""
    return adapterzoo.peft.get_peft_model(plain(shape), adapterzoo.peft.LoraConfig(**fields))


WAYS: tuple[Callable[[str, dict[str, Any]], Any], ...] = (native, given, wrapped)


def expected(way: Any, fields: dict[str, Any], right: Layers) -> Layers:
    """PEFT's layers, but for what the documentation says."""
    # the output layer tied to a table has its rows too
    left_out = {("rows", "lm_head"), ("rows", "proj_out")}
    if fields.get("target_modules") == "all-linear":
        # heads have copies of their own; of ours it is every linear layer in blocks
        left_out = {("lora", "classifier")}
        outside = (".pooler.", ".merger.", ".downsample.") if way is native else ()
        left_out |= {key for key in right if any(part in key[1] for part in outside)}
    return {key: value for key, value in right.items() if key not in left_out}


@pytest.mark.parametrize("shape", all_but(["llama", "gpt2", "qwen3_moe"], SHAPES))
def test_the_layers_are_those_of_peft_or_refused(shape):
    wrong: list[Any] = []
    same = 0
    for fields in cases(shape):
        # what stages of blocks mean for numbers
        if shape == "swin" and "layers_to_transform" not in fields:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                right = theirs(shape, fields)
            except (ValueError, TypeError, AttributeError, KeyError):
                # PEFT does not take it
                continue
            for way in WAYS:
                try:
                    got = ours(way(shape, copy.deepcopy(fields)))
                except AdapterZooError:
                    continue
                same += 1
                if got != (wanted := expected(way, fields, right)):
                    more, less = got.items() - wanted.items(), wanted.items() - got.items()
                    wrong.append((way.__name__, fields, sorted(more)[:4], sorted(less)[:4]))
    assert not wrong, "\n".join(map(str, wrong))
    # most are not refused
    assert same > (10 if shape == "swin" else 90)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a name as an expression": (
        "llama", {"exclude_modules": "q_proj"}, r"Write a list of names or paths: .*\['q_proj'\]"),
    "an expression below the base model": (
        "llama", {"exclude_modules": r"^layers\.0\..*"}, r"exclude_modules=\['model\.layers\.0"),
    "a key below the base model": (
        "llama", {"rank_pattern": {r"^layers\..*": 4}}, r"is a key for r, .*'model\.layers\.0"),
    "a whole path in another block": (
        "llama", {"target_modules": ["model.layers.0.self_attn.q_proj", "v_proj"],
                  "layers_to_transform": [1]}, "as it is a whole path"),
    "a parameter that PEFT does not leave out": (
        "qwen3_moe", {"target_parameters": ["experts.down_proj"], "layers_to_transform": [0]},
        "no other field leaves out parameters"),
    "one of several embeddings with a table": (
        "bart", {"trainable_token_indices": {"encoder.embed_tokens": [1]}},
        "in PEFT the others of .* would keep their rows"),
    "no block of this number": (
        "bart", {"layers_to_transform": [0, 7]}, r"no block 7 .*Write layers_to_transform=\[0\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_mean_other_layers_is_refused(case):
    shape, fields, message = REFUSED[case]
    model = adapterzoo.init(plain(shape))
    with pytest.raises(ConfigError, match=message):
        model.add_adapter("a", LoRAConfig(**fields))
    assert not model.adapters_config


# class → its type, a layer in blocks, a layer in its head, what PEFT can save of the head, its task
HEADED = {
    "RobertaForSequenceClassification": ("roberta", "query", "dense", "classifier", "SEQ_CLS"),
    "BertForMaskedLM": ("bert", "query", "dense", "cls", None),
    "BertForTokenClassification": ("bert", "query", "classifier", "classifier", "TOKEN_CLS"),
    "BertForQuestionAnswering": ("bert", "query", "qa_outputs", "qa_outputs", "QUESTION_ANS"),
    "LlamaForSequenceClassification": ("llama", "q_proj", "score", "score", "SEQ_CLS"),
    "LlamaForCausalLM": ("llama", "q_proj", "lm_head", "lm_head", "CAUSAL_LM"),
    "ViTForImageClassification": ("vit", "q_proj", "classifier", "classifier", None),
}


def headed_cases(name: str) -> Iterator[dict[str, Any]]:
    """Fields whose names match a layer of the head, or are close to it."""
    shape, base, head, top, task = HEADED[name]
    weights = [f"{base}.weight", f"{head}.weight"]
    path = next(
        p for p, _ in plain(shape).named_modules() if p.startswith(top) and p.endswith(head)
    )
    for targets in ([base, head], [base, path], rf".*({base}|{head})", rf".*\.{head}"):
        yield {"target_modules": targets}
        for excluded in (
            [head],
            [top, {"query": "value"}.get(base, "v_proj")],
            rf".*{head}",
            rf".*\.0\..*|.*{top}",
        ):
            yield {"target_modules": targets, "exclude_modules": excluded}
        yield {"target_modules": targets, "modules_to_save": [top]}
        yield {"target_modules": targets, "task_type": task}
        if not isinstance(targets, str):
            yield {"target_modules": targets, "layers_to_transform": [1]}
    yield {"target_modules": [base], "exclude_modules": [head]}
    yield {"target_modules": [], "target_parameters": weights}
    yield {"target_modules": [head], "target_parameters": weights[:1]}


@pytest.mark.parametrize("name", all_but([*HEADED][:2], HEADED))
def test_layers_of_a_head_are_refused_where_peft_adapts_them(name, monkeypatch):
    wrong: list[Any] = []
    refused, same = 0, 0
    shape = HEADED[name][0]
    with torch.random.fork_rng(devices=()):
        made = getattr(transformers, name)(tiny_config(shape))
    monkeypatch.setitem(_plain, shape, made)
    for fields in headed_cases(name):
        try:
            right = {key: n for key, n in theirs(shape, fields).items() if key[0] == "lora"}
        except (ValueError, TypeError):
            # PEFT does not take it
            continue
        in_head = [p for _, p in right if not p.startswith(f"{made.base_model_prefix}.")]
        # a config of this library has no task, and saves the head without being told
        for way in WAYS[1:] if "task_type" in fields else WAYS:
            model, got = None, None
            try:
                model = way(shape, copy.deepcopy(fields))
                got = ours(model)
            except SiteError as error:
                refused += 1
                if not in_head or not all(path in str(error) for path in in_head):
                    wrong.append((way.__name__, fields, str(error)))
                continue
            same += 1
            if got != right:
                wrong.append((way.__name__, fields, got.keys() ^ right.keys()))
            # the config can be used again
            again = adapterzoo.init(plain(shape))
            again.add_adapter("default", model.adapters_config["default"])
            if ours(again) != got:
                wrong.append((way.__name__, fields, "again"))
    assert not wrong, "\n".join(map(str, wrong))
    # the layer onto the vocabulary has adapters
    assert refused > 4 or HEADED[name][2] == "lm_head"
    assert same > 12


PATTERNS: tuple[Any, ...] = (
    "layers", "(layers|h)", "(h|layers)", "(l)ayers", "h|layers", "layers|h", r"la.*?rs", r"\w+",
    "[lL]ayers", "model.layers", "^model.layers", "^layers", "laye", ".*layers", "layers.0.mlp|h",
    ["h", "layers"], ["(h)", "(layers)"], r"(l|L)a(y)er\w",
)  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("way", WAYS[1:])
def test_a_pattern_of_stacks_is_that_of_peft(pattern, way):
    fields = {
        # PEFT adapts a layer at a whole path whatever its block is
        "target_modules": ["q_proj", "model.layers.0.mlp.up_proj"],
        "layers_to_transform": [1],
        "layers_pattern": pattern,
    }
    right = theirs("llama", fields)
    got = ours(way("llama", copy.deepcopy(fields)))
    assert got == right


@pytest.mark.parametrize("targets", ["(", 5])
@pytest.mark.parametrize("shape", ["llama", "qwen3_moe"])
def test_targets_that_are_no_expression_are_refused_in_a_config_of_peft(shape, targets):
    fields = {"peft_type": "LORA", "target_modules": targets}
    model = adapterzoo.init(plain(shape))
    with pytest.raises(ConfigError, match=r"target_modules="):
        model.add_adapter("a", fields)


def test_a_number_counts_in_each_stack():
    model = adapterzoo.init(plain("bart"))
    model.add_adapter("a", LoRAConfig(attn_matrices=["q"], layers_to_transform=[1]))
    assert {path for path, _ in model.adapter_modules("a")} == {
        "encoder.layers.1.self_attn.q_proj", "decoder.layers.1.self_attn.q_proj",
        "decoder.layers.1.encoder_attn.q_proj",
    }  # fmt: skip


@pytest.mark.parametrize("shape", ["qwen2_vl", "llama", "t5"])
@pytest.mark.parametrize("way", [native, given])
def test_the_layers_stay_in_files_and_in_a_config_that_is_used_again(shape, way, tmp_path):
    _, names, stack, norm, _ = SHAPES[shape]
    either = f"({names[0]}|{names[1]})"
    fields = {
        "target_modules": rf"^(?!{stack}).*{either}|{stack}\.1.*{either}",
        "rank_pattern": {rf"^{stack}\.1\..*": 3},
        "modules_to_save": [norm],
    }
    model = way(shape, fields)
    model.save_adapter(tmp_path / "native", "default")
    again = adapterzoo.init(plain(shape))
    again.load_adapter(tmp_path / "native")
    assert ours(again) == ours(model)
    again.delete_adapter("default")
    again.add_adapter("default", model.adapters_config.get("default"))
    assert ours(again) == ours(model)
    bare = adapterzoo.init(plain(shape).base_model)
    bare.load_adapter(tmp_path / "native", with_head=False)
    assert len(ours(bare)) == len(ours(model))
    # PEFT finds the same layers in a file of its format
    model.save_adapter(tmp_path / "peft", "default", format="peft")
    wrapped = peft.PeftModel.from_pretrained(plain(shape), tmp_path / "peft")
    found = {n.split(".lora_")[0] for n, _ in wrapped.named_parameters() if "lora_A" in n}
    saved = {
        n.split(".modules_to_save")[0] for n, _ in wrapped.named_parameters() if "_to_save" in n
    }
    start = "base_model.model."
    assert {("lora", n.removeprefix(start)) for n in found} | {
        ("copy", n.removeprefix(start)) for n in saved
    } == ours(model).keys()


def test_on_a_bare_base_model_paths_are_its_own():
    fields = {"target_modules": r"^layers\.0\..*q_proj", "rank_pattern": {r"^layers\.0.*": 3}}
    bare = adapterzoo.init(plain("llama").base_model)
    bare.add_adapter("default", LoRAConfig(**fields))
    assert ours(bare) == {("lora", "layers.0.self_attn.q_proj"): (3, 8 / 3)}
    bare.add_adapter("b", LoRAConfig(target_modules=["q_proj"], layers_to_transform=[1]))
    assert {path for path, _ in bare.adapter_modules("b")} == {"layers.1.self_attn.q_proj"}


@pytest.mark.parametrize(
    "fields",
    [
        {
            "target_modules": ["q_proj", "down_proj"],
            "exclude_modules": ["layers.1.self_attn.q_proj"],
        },
        {
            "target_modules": ["q_proj"],
            "modules_to_save": ["up_proj"],
            "rank_pattern": {"q_proj": 3},
        },
        {"target_modules": r".*q_proj", "trainable_token_indices": {"embed_tokens": [1]}},
    ],
)
def test_a_config_whose_names_mean_the_same_below_the_base_model_stays_as_it_is(fields):
    model, config = adapterzoo.init(plain("llama")), LoRAConfig(**fields)
    model.add_adapter("a", config)
    assert model.adapters_config["a"] is config
