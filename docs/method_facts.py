"""The tables of the pages in methods/: what the code answers.

    python docs/method_facts.py     writes them anew, in half a minute

A page has a comment with config strings before each table, and one that says `end` after it:

    <!-- options: lora -->      the fields of the config, with their defaults and meanings
    <!-- cost: lora -->         parameters in BERT base, and what `make compare` has measured
    <!-- works-with: lora -->   what a tiny model does with it: merging, mixed batches, files, …

`tests/test_method_pages.py` compares them.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import BertConfig, LlamaConfig

import adapterzoo
from adapterzoo import AutoAdapterModel
from adapterzoo.config import (
    AdapterConfig,
    Config,
    architectures,
    checks,
    config_strings,
    defaults,
)
from adapterzoo.contracts import Adapter, FusibleAdapter, row_options
from adapterzoo.errors import AdapterZooError
from adapterzoo.inject.layers import LayerCall
from adapterzoo.methods._targets import PLACES
from adapterzoo.methods.fusion import fusion_configs
from adapterzoo.serving import AdapterPool

ROOT = Path(__file__).parents[1]
METHODS = ROOT / "docs" / "methods"
MEASURED = ROOT / "benchmarks" / "results" / "compare.json"
# kind, config strings, patterns of fields on further lines of the comment, and the table
TABLE = re.compile(
    r"^<!-- (options|cost|works-with): (.+?)(?:\n(.*?))? -->\n\n(.*?)\n*^<!-- end -->$",
    re.MULTILINE | re.DOTALL,
)
WIDTH = 64
# fields that choose what a peer computes instead
CONVENTIONS = ("convention", "joins", "positions", "flat")


# --- names ---


def names() -> list[str]:
    """Return every name that a page must tell about: one for each method, and for each fusion."""
    found: dict[int, str] = {}
    for name, make in config_strings.items():
        # aliases are the same object
        found.setdefault(id(make), name)
    found.pop(id(config_strings["union"]))
    strings = {type(AdapterConfig.load(name)) for name in found.values()}
    others = {
        name
        for name, made in architectures.items()
        if not any(issubclass(cls, made) for cls in strings) and name not in ("union", XMOD)
    }
    return [*found.values(), *sorted(others), *fusion_configs]


# which no user adds: files of X-MOD have it
XMOD = "no_language_adapters"


def config_of(name: str) -> Config:
    """Return the config of a name, with what it needs besides."""
    if name in config_strings:
        return AdapterConfig.load(name)
    if name in fusion_configs:
        return fusion_configs[name]()
    return architectures[name](**_NEEDED.get(name, {}))


_NEEDED: Mapping[str, Mapping[str, Any]] = {"trainable_tokens": {"token_indices": [1, 2]}}


def pages() -> dict[str, Path]:
    """Return the page of each name: that with its options; the overview has those of places."""
    return {
        name: path
        for path in sorted(METHODS.glob("*.md"))
        if path.name != "index.md"
        for kind, given, _, _ in TABLE.findall(path.read_text(encoding="utf-8"))
        if kind == "options"
        for name in given.split()
    }


# --- options ---


def meanings(cls: type) -> dict[str, str]:
    """Return what the docstrings of a config class and its bases say of its fields."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        text = inspect.cleandoc(vars(base).get("__doc__") or "")
        section = text.partition("Attributes:\n")[2].partition("\n\n")[0]
        for name, meaning in re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE):
            said = " ".join(meaning.split())
            # what a class adds to the values of its base
            adds = said.startswith("also ") and name in found
            found[name] = f"{found[name].rstrip('.')}; {said}" if adds else said
    return found


def fields_shown(config: Config, patterns: Sequence[str]) -> list[str]:
    """Return the fields of a config that a table shows.

    Args:
        config: of a method.
        patterns: of names; `!` leaves out what follows it. Without any: all that do not choose the
            layers, which the overview explains.
    """
    fields = list(defaults(type(config)))
    wanted = [p for p in patterns if not p.startswith("!")]
    refused = [p[1:] for p in patterns if p.startswith("!")]
    if not patterns:
        return [name for name in fields if name not in PLACES]
    return [
        name
        for name in fields
        if (not wanted or any(fnmatch(name, p) for p in wanted))
        and not any(fnmatch(name, p) for p in refused)
    ]


def options(given: Sequence[str], patterns: Sequence[str] = ()) -> str:
    """Return the table of the fields of configs, which have one class of fields."""
    configs = {name: config_of(name) for name in given}
    members = {n: c for n, c in configs.items() if len(getattr(c, "members", (c,))) > 1}
    if members:
        return _options_of_unions(members)
    first = next(iter(configs.values()))
    said = {k: v for c in configs.values() for k, v in meanings(type(c)).items()}
    lines = ["| option | default | meaning |", "| --- | --- | --- |"]
    shown = fields_shown(first, patterns)
    for name in shown:
        values: dict[str, list[str]] = {}
        for string, config in configs.items():
            values.setdefault(_value(getattr(config, name)), []).append(string)
        usual = max(values, key=lambda value: len(values[value]))
        other = [f"{v} in {', '.join(f'`{s}`' for s in values[v])}" for v in values if v != usual]
        lines.append(f"| `{name}` | {'; '.join([usual, *other])} | {_cell(said[name])} |")
    if places := [f"`{n}`" for n in defaults(type(first)) if n in PLACES and n not in shown]:
        lines.append(
            f"\nThe other options choose [the layers](index.md#fields-that-choose-the-layers): "
            f"{', '.join(places)}."
        )
    return "\n".join(lines)


def _options_of_unions(configs: Mapping[str, Any]) -> str:
    lines = ["| name | members |", "| --- | --- |"]
    for name, config in configs.items():
        members = ", ".join(f"`{_shown(member)}`" for member in config.members)
        lines.append(f"| `{name}` | {members} |")
    return "\n".join(lines)


def _shown(config: Any) -> str:
    return repr(config).replace("|", "\\|")


def _value(value: object) -> str:
    if isinstance(value, tuple):
        value = [*value]
    if isinstance(value, str):
        return f'`"{value}"`'
    return f"`{value!r}`"


def _cell(text: str) -> str:
    """Return a meaning with its values as code."""
    parts = text.replace("|", "\\|").split("`")
    # outside of code that is marked already
    parts[::2] = [re.sub(r'"([^"\s]+)"', r'¦"\1"¦', part) for part in parts[::2]]
    shown = "`".join(parts).replace("¦", "`")
    return shown.rstrip(".") if ". " not in shown else shown


# --- cost ---


@functools.cache
def bert_base() -> Any:
    """Return BERT base without values."""
    with torch.device("meta"):
        return AutoAdapterModel.from_config(BertConfig())


@functools.cache
def parameters(name: str) -> int:
    """Return how many parameters a method trains in BERT base, by default."""
    model = bert_base()
    model.add_adapter("a", config_of(name))
    (found,) = (r for r in model.adapter_summary(as_dict=True) if r["name"] == "a")
    model.delete_adapter("a")
    return int(found["#param"])


def measured() -> dict[str, dict[str, Any]]:
    """Return what `make compare` has measured, by label."""
    rows = json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]
    return {row["label"]: row for row in rows}


def cost(given: Sequence[str], patterns: Sequence[str] = ()) -> str:
    """Return the table of what configs cost."""
    whole = sum(p.numel() for p in bert_base().base_model.parameters())
    rows = measured()
    lines = [
        "| config | parameters in BERT base | of the model | training step | memory of a step |",
        "| --- | --: | --: | --: | --: |",
    ]
    with_fields = [*given, *patterns]
    for name in with_fields:
        count, row = parameters(name), rows.get(name, {})
        step = f"{row['step'][0]:.2f}" if "step" in row else "–"
        memory = f"{row['memory'] / 1e6:,.0f} MB" if "memory" in row else "–"
        lines.append(f"| `{name}` | {count:,} | {100 * count / whole:.2g} % | {step} | {memory} |")
    lines.append(
        "\nAll options have their defaults. Steps and memory are those of [the comparison]"
        "(../choosing.md#how-to-read-it) on a small encoder; full fine-tuning takes 1.00 and "
        f"{rows['full fine-tuning']['memory'] / 1e6:,.0f} MB."
    )
    return "\n".join(lines)


# --- what it works with ---


def tiny(family: Any, **more: int) -> Any:
    """Return a tiny model of two blocks."""
    torch.manual_seed(0)
    return AutoAdapterModel.from_config(
        family(
            vocab_size=WIDTH, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=2 * WIDTH, max_position_embeddings=WIDTH, **more,
        )
    ).eval()  # fmt: skip


@functools.cache
def models() -> tuple[Any, Any]:
    """Return a tiny BERT and a tiny Llama."""
    return tiny(BertConfig), tiny(LlamaConfig, num_key_value_heads=4)


def small(name: str) -> Any:
    """Return the config of a name at a rank that a tiny model has room for."""
    config: Any = config_of(name)
    return config.replace(r=8) if config.get("r", 0) > 8 else config


def succeeds(call: Callable[[], object]) -> bool:
    """Return whether a call is not refused."""
    try:
        call()
    except AdapterZooError:
        return False
    return True


def ids() -> torch.Tensor:
    """Return a batch of two rows."""
    return torch.arange(3, 15).view(2, 6)


def saves(model: Any, config: Any, **options: Any) -> bool:
    """Return whether an adapter of the config can be written in a format."""
    model.add_adapter("a", config, overwrite_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        return succeeds(lambda: model.save_adapter(folder, "a", **options))


def file_of(name: str, form: str) -> str:
    """Return how a format of a peer has the method."""
    config = small(name)
    fields = [f for f in CONVENTIONS if any(f in defaults(type(m)) for m in config.members)]
    tried: list[dict[str, Any]] = [{}]
    for count in (1, 2):
        for chosen in itertools.combinations(fields, count):
            tried += [dict(zip(chosen, values, strict=True)) for values in
                      itertools.product(*(_others(config, field) for field in chosen))]  # fmt: skip
    for changes in tried:
        # a value may be legal in one member of a union only
        if succeeds(lambda changes=changes: config.replace(**changes)) and any(
            saves(model, config.replace(**changes), format=form) for model in models()
        ):
            shown = ", ".join(f"`{k}={v!r}`" for k, v in changes.items())
            return f"yes, with {shown}" if changes else "yes"
    return "no"


def _others(config: Any, field: str) -> list[Any]:
    """Return the other legal values of a field that chooses a convention, in a fixed order."""
    classes = [type(member) for member in config.members if field in defaults(type(member))]
    own = [checks(cls)[field] for cls in classes]
    # one that may be None has the choices of the check within
    choices = [getattr(check, "check", check) for check, _ in own]
    return sorted({v for c in choices for v in c.values} - {default for _, default in own})


def servers(name: str) -> str:
    """Return what inference servers read of the method."""
    model, config = models()[1], small(name)
    if saves(model, config, format="peft", serve="any"):
        return "exactly"
    if saves(model, config, format="peft", serve="any", energy=1.0):
        return "as the nearest LoRA (`rank=` or `energy=`), with its error"
    return "no"


def merges(model: Any) -> bool:
    """Return whether the adapter of a model can be merged."""
    merged = succeeds(lambda: model.merge_adapter("a"))
    if merged:
        model.reset_adapter()
    return merged


def reads_weight(model: Any) -> bool:
    """Return whether the active adapter reads the weight of a layer in a call."""
    read = mock.PropertyMock(side_effect=_Read)
    with mock.patch.object(LayerCall, "weight", read):
        try:
            model(input_ids=ids())
        except _Read:
            return True
    return False


class _Read(Exception):  # noqa: N818  not an error
    """The weight has been read."""


@functools.cache
def split_layers() -> dict[str, str]:
    """Return what the page of processes says of tensor parallelism, which a test compares."""
    text = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    table = text.partition("| method | column-parallel")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `([a-z0-9_+]+)` \| (.*) \|$", table, re.MULTILINE)
    return {name: "no" if "refused" in cells else "yes" for name, cells in rows}


def at_modules(name: str) -> str:
    """Return which layers of any torch module the method takes."""
    config = small(name)
    if "target_modules" not in defaults(type(config)):
        return "no: needs transformer blocks"
    net = nn.ModuleDict(
        {
            "linear layers": nn.Linear(8, 8),
            "convolutions": nn.Conv2d(8, 8, 3),
            "embeddings": nn.Embedding(9, 8),
            "norms": nn.LayerNorm(8),
        }
    )
    fits = {"r": 2, "boft_block_size": 4, "oft_block_size": 4}
    chosen = {k: v for k, v in fits.items() if config.get(k, 0) > v}
    taken = [
        kind
        for kind in net
        if adapterzoo.init(nn.ModuleDict({kind: net[kind]})).supports_adapter(
            config.replace(target_modules=(kind,), **chosen)
        )
    ]
    return "yes: " + ", ".join(taken)


@functools.cache
def facts(name: str) -> dict[str, str]:
    """Return what a method does on a tiny model, by what is asked."""
    bert, _ = models()
    config = small(name)
    for each in ("b", "a"):
        bert.add_adapter(each, config, overwrite_ok=True)
    bert.set_active_adapters("a")
    own = [m for _, m in bert.adapter_modules("a") if isinstance(m, Adapter)]
    together = all(row_options(module) is not None for module in own)
    mixed = succeeds(lambda: bert(input_ids=ids(), adapter_names=["a", "b"]))
    pooled = succeeds(lambda: AdapterPool(tiny(BertConfig), configs=[config]))
    averaged = succeeds(lambda: bert.average_adapter("c", ["a", "b"], combine_strategy="linear"))
    if averaged:
        bert.delete_adapter("c")
    fused = all(isinstance(module, FusibleAdapter) for module in own)
    reads = reads_weight(bert)
    found = {
        "[Merging](../merging.md)": "yes, and then it costs nothing" if merges(bert) else "no",
        "[Mixed batches](../composition.md)": (
            ("yes, in one call" if together else "yes, one adapter after another")
            if mixed
            else "no"
        ),
        "[`AdapterPool`](../serving.md)": "yes" if pooled else "no",
        "[`average_adapter`](../merging.md)": "yes" if averaged else "no",
        "[`Fuse`](fusion.md)": "yes" if fused else "no",
        "[Quantized bases](../quantized.md)": (
            "yes; reads the weight in each call" if reads else "yes; never reads the weight"
        ),
        "[Tensor parallelism](../distributed.md#tensor-parallelism)": split_layers().get(name, "–"),
        "[Servers](../serving.md) (vLLM, SGLang, …)": servers(name),
        "Files of [PEFT](../formats.md)": file_of(name, "peft"),
        "Files of [AdapterHub](../formats.md)": file_of(name, "adapterhub"),
        "[Any torch module](index.md#which-layers)": at_modules(name),
    }
    for each in ("b", "a"):
        bert.delete_adapter(each)
    return found


def works_with(given: Sequence[str], patterns: Sequence[str] = ()) -> str:
    """Return the table of what methods work with."""
    with warnings.catch_warnings():
        # a convention that a config cannot use is tried all the same
        warnings.simplefilter("ignore")
        columns = {name: facts(name) for name in given}
    heads = " | ".join(f"`{name}`" for name in given)
    lines = [f"| | {heads} |", f"| --- |{' --- |' * len(given)}"]
    for row in next(iter(columns.values())):
        lines.append(f"| {row} | {' | '.join(c[row] for c in columns.values())} |")
    lines.append(
        "\nThe library's own format (`native`) holds every adapter. Each row is what a tiny model "
        "does; tests compare it."
    )
    return "\n".join(lines)


# --- the pages ---


TABLES: dict[str, Callable[[Sequence[str], Sequence[str]], str]] = {
    "options": options, "cost": cost, "works-with": works_with,
}  # fmt: skip


def table(kind: str, given: str, patterns: str) -> str:
    """Return a table, with what the comment before it asks for."""
    return TABLES[kind](given.split(), patterns.split())


def _anew(found: re.Match[str]) -> str:
    kind, given, patterns, _ = found.groups("")
    opening = found[0][: found.start(4) - found.start()]
    return f"{opening}{table(kind, given, patterns)}\n\n<!-- end -->"


def main() -> None:
    """Write all tables."""
    for path in sorted(METHODS.glob("*.md")):
        path.write_text(TABLE.sub(_anew, path.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
