"""PEFT folders for servers: a table of what each server adapts, and one pass that writes them.

The pass writes the same canonical folder for every server: the scale is folded into B, all ranks
are equal, layers that are read together are complete, blocks that were left out have zero factors,
and each expert has its own matrices. The table says which server reads which layers;
docs/serving.md names the sources. The readers that check a folder, in `adapterzoo.serving.readers`,
share nothing with this file.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from adapterzoo.errors import CheckpointError, argument, listing
from adapterzoo.formats.checkpoint import Checkpoint, inexpressible
from adapterzoo.formats.peft.writing import encoded, head_for
from adapterzoo.patterns import short_names
from adapterzoo.registry import Registry
from adapterzoo.spelling import Fields

if TYPE_CHECKING:
    from adapterzoo.model.hf.info import ModelInfo

# --- the table ---

_Groups = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Experts:
    """The layers of experts as the checkpoint of a model names them.

    Attributes:
        path: path of the experts in a block of the checkpoint.
        names: names of gate, up and down projection of an expert.
    """

    path: str
    names: tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class ServedLayers:
    """The layers of a model type that a server adapts.

    Attributes:
        groups: paths in a block; those that the server reads as one layer form a group.
        outside: paths outside the blocks.
        experts: the names of the layers of experts; None: the server does not adapt them.
    """

    groups: _Groups
    outside: frozenset[str] = frozenset()
    experts: Experts | None = None

    def __and__(self, other: ServedLayers) -> ServedLayers:
        """Return the layers that both adapt."""
        groups = tuple(group for group in self.groups if group in other.groups)
        experts = self.experts if self.experts == other.experts else None
        return ServedLayers(groups, self.outside & other.outside, experts)


@dataclass(frozen=True, slots=True)
class Server:
    """What a server reads.

    Attributes:
        title: its name, with the version that the facts describe.
        layers: the layers that it adapts, by model type.
        heads: names of the head layers that it can replace.
        ranks: the ranks that it can be started with; empty: any.
        tied_output: whether it adapts an output layer that is tied to the embedding.
        start: commands that start it; `{folder}`, `{name}`, `{base}`, `{rank}`, `{limit}` (the
            smallest sufficient one of `ranks`) and `{targets}` are filled in.
        labels: options to add for a head with `{labels}` outputs.
        merged: commands that start it with a whole model in `{folder}`.
    """

    title: str
    layers: Mapping[str, ServedLayers]
    heads: frozenset[str] = frozenset()
    ranks: tuple[int, ...] = ()
    tied_output: bool = True
    start: tuple[str, ...] = ()
    labels: str = ""
    merged: tuple[str, ...] = ()

    def __and__(self, other: Server) -> Server:
        """Return the adapters that both read."""
        types = self.layers.keys() & other.layers.keys()
        return Server(
            self.title,
            {name: self.layers[name] & other.layers[name] for name in sorted(types)},
            self.heads & other.heads,
            self.ranks or other.ranks,
            self.tied_output and other.tied_output,
            self.start + other.start,
            self.labels or other.labels,
            self.merged + other.merged,
        )

    def commands(self, **facts: object) -> tuple[str, ...]:
        """Return the commands that start it; the facts fill in `start` and `labels`."""
        rank, labels = int(str(facts["rank"])), facts.get("labels")
        limit = next((n for n in self.ranks if n >= rank), rank)
        more = f" {self.labels}" if self.labels and labels else ""
        return tuple(f"{line}{more}".format(limit=limit, **facts) for line in self.start)


_ATTENTION = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
)
_LLAMA = (*_ATTENTION, ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",))
_PHI3 = (
    ("self_attn.qkv_proj",), ("self_attn.o_proj",), ("mlp.gate_up_proj",), ("mlp.down_proj",),
)  # fmt: skip
_GPT2 = ("attn.c_attn",), ("attn.c_proj",), ("mlp.c_fc",), ("mlp.c_proj",)
_BERT = (
    ("attention.self.query",), ("attention.self.key",), ("attention.self.value",),
    ("attention.output.dense",), ("intermediate.dense",), ("output.dense",),
)  # fmt: skip
_MIXTRAL_EXPERTS = Experts("block_sparse_moe.experts", ("w1", "w3", "w2"))
_QWEN_EXPERTS = Experts("mlp.experts", ("gate_proj", "up_proj", "down_proj"))
_TABLE, _OUTPUT = "model.embed_tokens", "lm_head"
_BOTH = frozenset({_TABLE, _OUTPUT})


def _alike(layers: ServedLayers, *model_types: str) -> dict[str, ServedLayers]:
    return dict.fromkeys(model_types, layers)


servers: Registry[Server] = Registry("server")
"""By the values of `serve=`."""

servers.register("vllm")(
    Server(
        "vLLM 0.32",
        {
            **_alike(ServedLayers(_LLAMA, _BOTH), "llama", "qwen3"),
            **_alike(ServedLayers(_LLAMA), "mistral", "qwen2", "gemma2", "gemma3_text"),
            "phi3": ServedLayers(_PHI3, _BOTH),
            "mixtral": ServedLayers(_ATTENTION, _BOTH, _MIXTRAL_EXPERTS),
            "qwen3_moe": ServedLayers(_LLAMA, _BOTH, _QWEN_EXPERTS),
        },
        heads=frozenset({"score"}),
        ranks=(8, 16, 32, 64, 128, 256, 320, 512),
        start=(
            (
                "vllm serve {base} --enable-lora --max-lora-rank {limit} "
                "--lora-modules {name}={folder}"
            ),
        ),
        labels="--max-lora-cls-labels {labels}",
        merged=("vllm serve {folder}",),
    )
)
servers.register("sglang")(
    Server(
        "SGLang 0.5.23",
        {
            **_alike(ServedLayers(_LLAMA, _BOTH), "llama", "mistral", "qwen2", "qwen3"),
            **_alike(ServedLayers(_LLAMA), "gemma2", "gemma3_text"),
            "phi3": ServedLayers(_PHI3, _BOTH),
            "mixtral": ServedLayers(_ATTENTION, _BOTH, _MIXTRAL_EXPERTS),
            "qwen3_moe": ServedLayers(_LLAMA, _BOTH, _QWEN_EXPERTS),
        },
        start=(
            (
                "python -m sglang.launch_server --model-path {base} --enable-lora "
                "--max-lora-rank {rank} --lora-target-modules {targets} "
                "--lora-paths {name}={folder}"
            ),
        ),
        merged=("python -m sglang.launch_server --model-path {folder}",),
    )
)
servers.register("lorax")(
    Server(
        "LoRAX",
        {
            **_alike(ServedLayers(_LLAMA, frozenset({_OUTPUT})), "llama", "mistral", "qwen2"),
            "gemma2": ServedLayers(_LLAMA),
            "phi3": ServedLayers(_PHI3),
            "mixtral": ServedLayers(_ATTENTION),
            "gpt2": ServedLayers(_GPT2),
        },
        start=(
            (
                "lorax-launcher --model-id {base}"
                "  # in each request: adapter_id={folder}, adapter_source=local"
            ),
        ),
        merged=("lorax-launcher --model-id {folder}",),
    )
)
servers.register("tgi")(
    Server(
        "TGI",
        {
            **_alike(ServedLayers(_LLAMA), "llama", "mistral", "qwen2", "gemma2"),
            "phi3": ServedLayers(tuple(group for group in _PHI3 if group != ("mlp.gate_up_proj",))),
        },
        start=("text-generation-launcher --model-id {base} --lora-adapters {name}={folder}",),
        merged=("text-generation-launcher --model-id {folder}",),
    )
)
servers.register("gguf")(
    Server(
        "llama.cpp",
        {
            **_alike(ServedLayers(_LLAMA, _BOTH), "llama", "mistral", "qwen2", "qwen3"),
            **_alike(ServedLayers(_LLAMA), "gemma2", "gemma3_text"),
            "phi3": ServedLayers(_PHI3),
            "mixtral": ServedLayers(_ATTENTION, frozenset(), _MIXTRAL_EXPERTS),
            "qwen3_moe": ServedLayers(_LLAMA, frozenset(), _QWEN_EXPERTS),
            "bert": ServedLayers(_BERT),
        },
        tied_output=False,
        start=("python convert_lora_to_gguf.py {folder} --base {base}",),
        merged=("python convert_hf_to_gguf.py {folder}",),
    )
)
# what every server reads
servers.register("any")(
    replace(functools.reduce(Server.__and__, servers.values()), title="any server")
)


# --- the pass ---

_PREFIX = "base_model.model."
# endings of the keys of A and B
_ENDS = (".lora_A.weight", ".lora_B.weight"), (".lora_embedding_A", ".lora_embedding_B")
# fields of PEFT's LoRA that no server reads, and their meaning
_UNREAD = {
    "use_dora": "DoRA's magnitudes",
    "lora_bias": "a bias of B",
    "alora_invocation_tokens": "an invocation",
    "trainable_token_indices": "trained tokens",
}
_LORA = "LORA"
_STEP, _LEAST = 16, 8


@dataclass(frozen=True, slots=True)
class Factors:
    """The change BA of a weight.

    Attributes:
        a: `[rank, d_in]`.
        b: `[d_out, rank]`, scaled.
        ends: endings of their keys.
    """

    a: Tensor
    b: Tensor
    ends: tuple[str, str] = _ENDS[0]

    def padded(self, rank: int) -> Factors:
        """Return the same change with factors of a larger rank."""
        more = rank - self.a.shape[0]
        pad = torch.nn.functional.pad
        return replace(self, a=pad(self.a, (0, 0, 0, more)), b=pad(self.b, (0, more)))

    def to(self, dtype: torch.dtype) -> Factors:
        """Return the factors in another dtype."""
        return replace(self, a=self.a.to(dtype), b=self.b.to(dtype))


@dataclass(frozen=True, slots=True)
class Folder:
    """PEFT's config and tensors for a server.

    Attributes:
        fields: the config's fields.
        tensors: by PEFT's keys.
        rank: rank of all factors.
        rounding: ‖ΔW − ΔW'‖ / ‖ΔW‖ of all weights together, with ΔW' as it is stored.
        labels: the number of outputs of the head; None without a head.
    """

    fields: Fields
    tensors: Mapping[str, Tensor]
    rank: int
    rounding: float
    labels: int | None


def unread(checkpoint: Checkpoint, info: ModelInfo) -> str | None:
    """Return why no server reads an adapter's method; None if it is a LoRA that they read."""
    try:
        fields, _ = encoded(checkpoint, info)
    except CheckpointError as error:
        return str(error).partition(". Nothing has been written")[0]
    if fields["peft_type"] != _LORA:
        return f"the adapter is PEFT's {fields['peft_type']}"
    found = [what for name, what in _UNREAD.items() if fields.get(name)]
    return f"the adapter has {' and '.join(found)}" if found else None


def for_server(
    checkpoint: Checkpoint,
    info: ModelInfo,
    server: Server,
    dtype: torch.dtype | None,
    otherwise: str,
) -> Folder:
    """Return a LoRA in the form that a server reads.

    Args:
        checkpoint: checkpoint of a LoRA adapter.
        info: the model's info.
        server: from the table.
        dtype: dtype of the factors; None: their own.
        otherwise: what the error says to write if the server does not read it.

    Raises:
        CheckpointError: the server does not read it.
    """

    def refused(why: str, *instead: str) -> CheckpointError:
        readers = [
            name for name, other in servers.items()
            if name != "any" and other is not server and reads(checkpoint, info, other)
        ]  # fmt: skip
        headless = replace(checkpoint, head={}, metadata={**checkpoint.metadata, "head": None})
        without = [argument("with_head", False)] if reads(headless, info, server) else []
        hints = [*instead, *without, *(argument("serve", name) for name in readers)]
        return inexpressible(f"{server.title}: {why}", *(hints or [otherwise]))

    try:
        return _folder(checkpoint, info, server, dtype)
    except _UnreadError as error:
        raise refused(*error.args) from error


class _UnreadError(Exception):
    """A server does not read an adapter; holds the reason, and hints at what it reads."""


def reads(checkpoint: Checkpoint, info: ModelInfo, server: Server) -> bool:
    """Return whether a server reads a LoRA.

    Args:
        checkpoint: checkpoint of the LoRA.
        info: the model's info.
        server: from the table.
    """
    try:
        _folder(checkpoint, info, server, None)
    except _UnreadError:
        return False
    return True


def _folder(
    checkpoint: Checkpoint, info: ModelInfo, server: Server, dtype: torch.dtype | None
) -> Folder:
    layers = server.layers.get(info.model_type)
    if layers is None:
        known = listing(sorted(server.layers), limit=20)
        raise _UnreadError(
            f"layers of {info.model_type!r} models are not known to be adapted, only of {known}"
        )
    fields, tensors = encoded(checkpoint, info)
    modules = info.modules(head_for(checkpoint, info)[0].model_class)
    factors, rest = _factors(fields, tensors, info)
    if not factors:
        raise _UnreadError("the adapter changes no layer")
    if lost := factors.keys() - {*_adapted(layers, factors, info, server)}:
        kinds = sorted({_EXPERTS.sub("", _within(path) or path) for path in lost})
        raise _UnreadError(f"{listing(kinds)} would not be adapted")
    saved = fields.get("modules_to_save") or ()
    if wrong := sorted({*saved} - server.heads):
        raise _UnreadError(f"trained copies of {listing(wrong)} would not be loaded")
    if wrong := sorted(key for key in rest if not any(f".{name}." in key for name in saved)):
        kinds = sorted({_within(key) or key for key in wrong})
        raise _UnreadError(f"{listing(kinds)} would not be loaded")
    factors = _complete(factors, layers, modules, bool(fields.get("fan_in_fan_out")), info)
    largest = max(each.a.shape[0] for each in factors.values())
    rank = _LEAST if largest <= _LEAST else -(-largest // _STEP) * _STEP
    if server.ranks and rank > server.ranks[-1]:
        raise _UnreadError(
            f"a rank of {largest} is more than {server.ranks[-1]}",
            argument("rank", server.ranks[-1]),
        )
    exact = {path: each.padded(rank) for path, each in factors.items()}
    stored = {path: each.to(dtype or each.a.dtype) for path, each in exact.items()}
    written = {
        f"{_PREFIX}{_in_server(path, layers)}{end}": tensor.contiguous()
        for path, each in stored.items()
        for end, tensor in zip(each.ends, (each.a, each.b), strict=True)
    }
    written |= {key: tensor.to(dtype or tensor.dtype) for key, tensor in rest.items()}
    heads = [tensor for key, tensor in rest.items() if key.endswith(".weight")]
    return Folder(
        _fields(fields, _targets(factors, layers, modules), rank),
        written,
        rank,
        _rounding(exact, stored),
        len(heads[0]) if heads else None,
    )


def _fields(fields: Fields, targets: Iterable[str], rank: int) -> Fields:
    """Return PEFT's config, without fields that servers read differently."""
    kept = (
        "peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path",
        "revision", "inference_mode", "modules_to_save",
    )  # fmt: skip
    return {
        **{name: fields[name] for name in kept if name in fields},
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "target_modules": [*targets],
        "bias": "none",
        "lora_bias": False,
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": bool(fields.get("fan_in_fan_out")),
        "init_lora_weights": True,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


def _factors(
    fields: Fields, tensors: Mapping[str, Tensor], info: ModelInfo
) -> tuple[dict[str, Factors], dict[str, Tensor]]:
    """Return the factors by path in the task class, with the scale in B, and the remaining tensors.

    A matrix of an expert has the path of the experts, then the expert's number and its own name.
    """
    found: dict[str, Factors] = {}
    rest = dict(tensors)
    for ends in _ENDS:
        for key in [key for key in rest if key.endswith(ends[0])]:
            start = key.removesuffix(ends[0])
            a, b = rest.pop(key), rest.pop(f"{start}{ends[1]}")
            path = start.removeprefix(_PREFIX)
            parameter = _parameter(path, fields, info)
            module = path.removesuffix(_WRAPPER) if parameter else path
            name = f"{module}.{parameter}" if parameter else path
            weight = _tensor(name, info) if parameter else None
            experts = 1 if weight is None else weight.shape[0]
            scale = _scale(fields, name, a.shape[0] // experts)
            if parameter is None:
                found[path] = Factors(a, b * scale, ends)
            else:
                found |= _of_experts(name, a, b * scale, experts)
    return found, rest


def _tensor(key: str, info: ModelInfo) -> Tensor | None:
    """Return a tensor by its key in the task class, whose backbone the model may be."""
    found = info.tensor(key)
    return info.tensor(key.partition(".")[2]) if found is None else found


_WRAPPER = ".base_layer"
_GATE_UP, _DOWN = "gate_up_proj", "down_proj"


def _parameter(path: str, fields: Fields, info: ModelInfo) -> str | None:
    """Return the parameter of experts that a key of PEFT belongs to; None for a layer.

    PEFT wraps the module once for each adapted parameter, the last one innermost in the key.
    """
    targets = fields.get("target_parameters") or ()
    module = path.removesuffix(_WRAPPER)
    adapted = [n for n in (_GATE_UP, _DOWN) if any(f"{module}.{n}".endswith(t) for t in targets)]
    if not adapted or not module.endswith(".experts"):
        return None
    return adapted[0] if path.endswith(_WRAPPER) or len(adapted) == 1 else adapted[-1]


def _of_experts(name: str, a: Tensor, b: Tensor, count: int) -> dict[str, Factors]:
    """Split the factors of a parameter that holds all experts into those of each expert.

    Args:
        name: path of the parameter.
        a: `[experts · rank, d_in]`, experts first.
        b: `[d_out, rank · experts]`, ranks first.
        count: number of the experts.
    """
    a = a.unflatten(0, (count, -1))  # [experts, rank, d_in]
    b = b.unflatten(1, (-1, count)).movedim(2, 0)  # [experts, d_out, rank]
    module, _, parameter = name.rpartition(".")
    parts = {"down_proj": b}
    if parameter == _GATE_UP:
        gate, up = b.chunk(2, 1)
        parts = {"gate_proj": gate, "up_proj": up}
    return {
        f"{module}.{number}.{part}": Factors(a[number], rows[number])
        for part, rows in parts.items()
        for number in range(count)
    }


def _scale(fields: Fields, name: str, rank: int) -> float:
    """Return PEFT's scale of an update."""
    alpha = float(fields["lora_alpha"])
    for key, value in (fields.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({key})$", name):
            alpha = float(value)
            break
    return alpha / (rank**0.5 if fields.get("use_rslora") else rank)


_BLOCK = re.compile(r"(.*?\.)(\d+)\.(.+)")
_EXPERTS = re.compile(r"(?<=\.experts)\..*")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)")


def _within(path: str) -> str | None:
    """Return the path within its block; None outside the blocks."""
    found = _BLOCK.fullmatch(path)
    return None if found is None else found[3]


def _adapted(
    layers: ServedLayers, paths: Iterable[str], info: ModelInfo, server: Server
) -> Iterable[str]:
    """Yield the paths that a server adapts."""
    known = {path for group in layers.groups for path in group}
    is_tied = bool(info.config.get("tie_word_embeddings"))
    for path in paths:
        is_output = path == _OUTPUT and is_tied and not server.tied_output
        is_expert = layers.experts is not None and _EXPERT.fullmatch(path)
        if (path in layers.outside and not is_output) or is_expert or _within(path) in known:
            yield path


def _complete(
    factors: Mapping[str, Factors],
    layers: ServedLayers,
    modules: Mapping[str, tuple[str, ...]],
    transposed: bool,
    info: ModelInfo,
) -> dict[str, Factors]:
    """Return the factors, with zeros where a group or a block lacks some, in the model's order."""
    found = dict(factors)
    within = {_within(path) for path in factors}
    wanted = {path for group in layers.groups if not within.isdisjoint(group) for path in group}
    for path in modules:
        if path not in found and _within(path) in wanted:
            weight = _tensor(f"{path}.weight", info)
            if weight is not None:
                d_out, d_in = reversed(weight.shape) if transposed else weight.shape
                found[path] = _zeros(d_out, d_in, factors)
    experts = [(m, each) for path, each in factors.items() if (m := _EXPERT.fullmatch(path))]
    if experts:
        match, like = experts[0]
        sizes = like.b.shape[0], like.a.shape[1]
        count = 1 + max(int(match[2]) for match, _ in experts)
        for module in (path for path in modules if path.endswith(".experts")):
            for part in (f"{n}.{name}" for n in range(count) for name in _QWEN_EXPERTS.names):
                # down_proj has the sizes of the others, swapped
                is_same = part.endswith(_DOWN) == (match[3] == _DOWN)
                d_out, d_in = sizes if is_same else sizes[::-1]
                found.setdefault(f"{module}.{part}", _zeros(d_out, d_in, factors))
    return found


def _zeros(d_out: int, d_in: int, factors: Mapping[str, Factors]) -> Factors:
    like = next(iter(factors.values())).a
    return Factors(like.new_zeros(1, d_in), like.new_zeros(d_out, 1))


def _in_server(path: str, layers: ServedLayers) -> str:
    """Return the path in the server's names."""
    match = _EXPERT.fullmatch(path)
    if match is None or layers.experts is None:
        return path
    block = match[1].removesuffix("mlp.experts")
    name = dict(zip(_QWEN_EXPERTS.names, layers.experts.names, strict=True))[match[3]]
    return f"{block}{layers.experts.path}.{match[2]}.{name}"


def _targets(
    factors: Mapping[str, Factors], layers: ServedLayers, modules: Mapping[str, tuple[str, ...]]
) -> list[str]:
    """Return the shortest names of the adapted layers that match no other layer."""
    whole = [path for path in factors if not _EXPERT.fullmatch(path)]
    names = short_names(whole, modules) or tuple(whole)
    experts = {m[3] for path in factors if (m := _EXPERT.fullmatch(path))}
    return sorted({*names, *experts})


def _rounding(exact: Mapping[str, Factors], stored: Mapping[str, Factors]) -> float:
    """Return ‖ΔW − ΔW'‖ / ‖ΔW‖ over all weights."""
    if all(exact[path] is stored[path] or _same(exact[path], stored[path]) for path in exact):
        return 0.0
    error = norm = 0.0
    for path, each in exact.items():
        if each.a.is_meta:
            continue
        a, b = each.a.double(), each.b.double()
        # B A − B' A' = [B, −B'] [A; A']
        joined = (
            torch.cat([a, stored[path].a.double()]),
            torch.cat([b, -stored[path].b.double()], 1),
        )
        error, norm = error + _square(*joined), norm + _square(a, b)
    return max(error, 0.0) ** 0.5 / norm**0.5 if norm else 0.0


def _same(one: Factors, other: Factors) -> bool:
    return one.a.dtype == other.a.dtype and one.b.dtype == other.b.dtype


def _square(a: Tensor, b: Tensor) -> float:
    """Return ‖B A‖² = tr((Bᵀ B)(A Aᵀ))."""
    return float(((b.mT @ b) * (a @ a.mT)).sum())
