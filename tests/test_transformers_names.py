"""What adapterzoo reads of transformers by name is still called so in the installed version.

A renamed argument is not an error: a model with the new name leaves the old one out, and the call
looks like one without it. So each name that the package reads is counted in transformers' classes,
and a new one belongs in these tables.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import pytest
import transformers
from cached import CACHE
from transformers import GenerationConfig, GenerationMixin, modeling_outputs
from transformers.utils.generic import TransformersKwargs

import adapterzoo
from adapterzoo.caches import CACHES

# argument → the fewest model types that have it: half of what transformers 5.24 has
ARGUMENTS = {
    "attention_mask": 220,
    "decoder_attention_mask": 25,
    "decoder_input_ids": 25,
    "decoder_input_values": 1,
    "decoder_inputs_embeds": 20,
    "encoder_attention_mask": 45,
    "encoder_outputs": 30,
    "input_features": 20,
    "input_ids": 190,
    "input_values": 15,
    "inputs_embeds": 190,
    "labels": 200,
    "logits_to_keep": 120,
    "pixel_values": 110,
    "position_ids": 170,
    "return_dict": 50,
    "token_type_ids": 35,
    "use_cache": 150,
}
# several names of one thing, in different versions or kinds of models
ALTERNATIVES = {
    "cache": (CACHES, 150),
    "bounds of packed sequences": (("cu_seqlens", "cu_seq_lens_q"), 15),
}
# passed from call to call without being an argument of its own
PASSED_ON = ("cu_seq_lens_q", "is_causal", "num_items_in_batch")
# keywords of attention functions → the fewest model types that pass them
OF_ATTENTION = {"position_bias": 5, "sliding_window": 20}
FIELDS = ("cross_attentions", "encoder_last_hidden_state", "last_hidden_state", "logits",
          "pooler_output", "router_logits")  # fmt: skip
# arguments of `generate`, which may be fields of its config
OPTIONS = ("assistant_early_exit", "assistant_model", "num_beams", "num_return_sequences",
           "prefill_chunk_size", "prompt_lookup_num_tokens")  # fmt: skip
# methods of models that generate, which the package overrides → arguments that they pass by name
OVERRIDDEN = {"_prepare_generated_length": ("generation_config", "input_ids_length")}
# not of transformers: arguments of torch, of old versions and of adapterzoo itself
OTHERS = frozenset((
    "adapter_kwargs", "alpha", "batch1", "batch2", "beta", "cache_position", "generation_config",
    "head", "input", "inputs", "optimizers", "output_loading_info",
    # of some, as their configs have it
    "output_router_logits", "pretrained_model_name_or_path",
))  # fmt: skip

ROOMS = ("anatomy", "heads", "inject", "model/heads", "model/hf")
FILES = ("call.py", "caches.py", "masks.py", "model/batches.py", "trainer.py")
# the mappings in which these rooms have the arguments and outputs of a call
MAPPINGS = frozenset((
    "asked", "batch", "changed", "given", "inputs", "kwargs", "output", "outputs", "self._given",
    "takes", "theirs", "wide",
))  # fmt: skip


def by_type(names_in: Callable[[str], set[str]]) -> dict[str, set[str]]:
    """The names that are found in the modules of each model type."""
    folder = Path(transformers.__file__).with_name("models")
    found: dict[str, set[str]] = {}
    for path in sorted(folder.glob("*/modeling_*.py")):
        names = names_in(path.read_text(encoding="utf-8"))
        found[path.parent.name] = found.get(path.parent.name, set()) | names
    return found


def arguments_in(source: str) -> set[str]:
    """The arguments of all forwards."""
    heads = re.findall(r"def forward\((.*?)\)\s*(?:->[^\n]*)?:\n", source, re.DOTALL)
    return {name for head in heads for name in re.findall(r"(?:^|[,(\n])\s*\*{0,2}(\w+)", head)}


def keywords_in(source: str) -> set[str]:
    return set(re.findall(r"^\s+(\w+)=[^=\n]*,(?:\s*#.*)?$", source, re.MULTILINE))


def read_in(source: str) -> Iterator[str]:
    """The names by which a file reads the arguments and outputs of calls."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=mapping, attr="get" | "pop" | "setdefault"),
                          args=[key, *_]):  # fmt: skip
                pass
            case ast.Subscript(value=mapping, slice=key):
                pass
            case ast.Compare(left=key, ops=[ast.In() | ast.NotIn()], comparators=[mapping]):
                pass
            case ast.Assign(value=ast.Tuple(elts=elements)):
                names = [e.value for e in elements if isinstance(e, ast.Constant)]
                yield from names if set(names) & ARGUMENTS.keys() else ()
                continue
            case _:
                continue
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield from [key.value] * (ast.unparse(mapping) in MAPPINGS)


def test_each_name_that_is_read_is_in_a_table():
    root = Path(adapterzoo.__file__).parent
    paths = [*(root / n for n in FILES), *chain(*((root / n).rglob("*.py") for n in ROOMS))]
    read = {name for path in paths for name in read_in(path.read_text(encoding="utf-8"))}
    known = {*ARGUMENTS, *PASSED_ON, *OF_ATTENTION, *FIELDS, *OTHERS}
    known |= {name for names in OVERRIDDEN.values() for name in names}
    known |= {name for names, _ in ALTERNATIVES.values() for name in names}
    assert sorted(read - known) == []
    assert sorted({*ARGUMENTS, *OF_ATTENTION, *FIELDS, *OTHERS} - read) == []


def test_models_take_these_arguments():
    found = Counter(chain(*by_type(arguments_in).values()))
    assert {name: found[name] for name, least in ARGUMENTS.items() if found[name] < least} == {}
    for what, (names, least) in ALTERNATIVES.items():
        assert sum(found[name] for name in names) >= least, f"{what}: has another name than {names}"


def test_models_with_a_cache_take_it_by_a_known_name():
    """In every model type, not only in most: reading the cache by another name loses it."""
    # recurrent states, which are refused or read as no cache; buffers of audio codecs
    others = {"state", "mems", "past_buckets_states", "decoder_cache", "padding_cache"}
    found = by_type(arguments_in)
    unknown = {
        t for t, names in found.items() if "use_cache" in names and not names & {*CACHES, *others}
    }
    # take use_cache to ignore it, or pass the cache on among other keywords
    assert unknown <= {
        "gemma4_assistant", "gemma4_unified_assistant", "instructblipvideo", "timm_wrapper",
    }  # fmt: skip


def test_models_pass_these_keywords_to_attention():
    found = Counter(chain(*by_type(keywords_in).values()))
    assert {n: found[n] for n, least in OF_ATTENTION.items() if found[n] < least} == {}


def test_arguments_are_passed_on():
    assert set(PASSED_ON) <= TransformersKwargs.__annotations__.keys()


def test_outputs_have_these_fields():
    classes = [c for c in vars(modeling_outputs).values() if dataclasses.is_dataclass(c)]
    fields = {field.name for cls in classes for field in dataclasses.fields(cls)}
    assert set(FIELDS) <= fields
    assert fields & set(CACHES)


def test_generate_takes_these_options():
    options = {*inspect.signature(GenerationMixin.generate).parameters, *vars(GenerationConfig())}
    path = Path(adapterzoo.__file__).parent / "model" / "hf" / "generation.py"
    source = path.read_text(encoding="utf-8")
    read = {*re.findall(r'_option\(\w+, \w+, "(\w+)"\)', source), *OPTIONS}
    assert sorted(name for name in OPTIONS if f'"{name}"' not in source) == []
    assert sorted(read - options) == []


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_generate_calls_what_is_overridden(name):
    method = getattr(GenerationMixin, name)
    assert set(OVERRIDDEN[name]) <= inspect.signature(method).parameters.keys()
    called = inspect.getsource(GenerationMixin.generate).partition(f"self.{name}(")[2]
    assert all(
        f"{argument}=" in called.partition("\n        )")[0] for argument in OVERRIDDEN[name]
    )


@pytest.mark.parametrize("name", ["attention_mask", "position_ids", CACHE])
def test_a_renamed_argument_is_found(name, monkeypatch):
    """The check bites: a version that renames an argument fails it."""
    read = Path.read_text
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda self, **given: re.sub(rf"\b{name}\b", "renamed", read(self, **given)),
    )
    with pytest.raises(AssertionError):
        test_models_take_these_arguments()
