"""Adapters on a tiny model of every model type of transformers, as columns of the table.

There is a column for each kind of site. Methods at linear layers differ from type to type only by
the layers, which `LINEAR` shows for all of them; of the others, `another` chooses one for each
type, so that each is run on many types. A further method of this kind adds nothing to the cost.

Model types run in processes of their own, so that one that crashes or takes too long costs only its
own row.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import torch

from adapterzoo.config import AdapterConfig, ConfigUnion, config_strings
from adapterzoo.errors import ConfigError, SiteError
from adapterzoo.testing import TinyModel, report_on
from adapterzoo.testing._case import ModelCase

from . import survey
from .small import small
from .tiny_models import NoTinyModelError, tiny_model

GREEN, RED = "✓", "✗"
LINEAR, ANOTHER = "lora", "another"
# of the kinds of layers that adapters meet: linear with a bias and without, stored transposed,
# fused, a subclass of linear, attention that computes with parameters, experts of both layouts
WHOLE = (
    "bert", "t5", "gpt2", "bloom", "falcon", "wavlm", "bridgetower", "mixtral", "gpt_oss", "jetmoe",
)  # fmt: skip
# of one core, for all methods on one model
SECONDS = 100
_BATCH = 20

Cells = dict[str, str]
"""Name of a column to its text."""

_NOTES = """
The method columns show the result of a test on a tiny model of the type, with an adapter on every
sub-layer, or at all query, key, value and output projections and in the feed-forward part. A new
adapter must be the identity if its config says so; with other values it must change the output.
Gradients must reach the whole adapter and nothing else (if they reach the layer at all). Merging
must give the output of the forward pass or be refused, and deletion must restore the model bit for
bit. `✓`: passed. `✓ some`: passed with the method's default config or at all linear layers, because
the model does not have all of these sites. `✗`: failed. Empty: not run. Models are in float32;
merges are compared in float64. The last column gives the reasons.

Each column is a kind of site. `lora` and `another` are linear layers: each type runs with LoRA and
with one other method for linear layers, which the cell names. These types run with all of them:
{whole}.
`bottleneck` is where sub-layers meet the residual stream; `invertible` is `seq_bn_inv`, which also
needs an entry: a place in front of the first block. `prefix_tuning` acts at the attention,
`prompt_tuning` at the input tokens, `reft` at the outputs of blocks, and `ln_tuning` at the norms.
"""


class _Late(BaseException):
    """A model type takes too long; not an `Exception`, so that no check catches it."""


def methods() -> dict[str, list[AdapterConfig]]:
    """Map the architecture of each registered method to the configs to try, the widest first.

    Invertible bottlenecks have a column of their own.
    """
    return _configs(tuple(config_strings))


@functools.cache
def _configs(strings: tuple[str, ...]) -> dict[str, list[AdapterConfig]]:
    found: dict[str, dict[type, AdapterConfig]] = {}
    for text in strings:
        if text != "union" and len((config := AdapterConfig.load(small(text))).members) == 1:
            # of a few tokens all may be where ReLU, or GELU in float32, is flat: no gradient
            changed = {"non_linearity": "leaky_relu", "reduction_factor": 4}
            kept = [name for name in changed if config.get(name) is not None]
            config = config.replace(**{name: changed[name] for name in kept})
            # bottlenecks sit in blocks, and these in front of the first one too
            name = "invertible" if config.get("inv_adapter") else config.architecture
            found.setdefault(name, {}).setdefault(type(config), config)
    return {name: list(_widths(list(found[name].values()))) for name in sorted(found)}


def _widths(configs: list[AdapterConfig]) -> Iterator[AdapterConfig]:
    first = configs[0]
    if "attn_matrices" in first:
        wide = first.replace(attn_matrices=("q", "k", "v", "o"), intermediate_lora=True)
        try:
            yield wide.replace(output_lora=True)
        except ConfigError:  # one vector stands between the feed-forward layers
            yield wide
    elif len(configs) > 1:
        # sites of every kind in one run, but for those that cannot share a layer
        yield from (ConfigUnion(*configs[:n]) for n in range(len(configs), 1, -1))
    yield first
    if "attn_matrices" in first:
        yield first.replace(target_modules="all-linear")


def linear() -> list[str]:
    """The methods at linear layers."""
    found = methods().items()
    return [name for name, configs in found if "attn_matrices" in configs[-1]]


def another(model_type: str) -> str:
    """Choose a method at linear layers for a model type, besides `LINEAR`.

    The same on every machine; a further method replaces the choice only where it is chosen itself.
    """

    def weight(name: str) -> bytes:
        return hashlib.sha256(f"{model_type} {name}".encode()).digest()

    return max((name for name in linear() if name != LINEAR), key=weight)


def named(row: Cells) -> str:
    """The method that the cell of `ANOTHER` names; empty if none was run."""
    return row[ANOTHER].rpartition(" ")[2]


def stale(known: Mapping[str, Cells]) -> list[str]:
    """Model types on which another method was run than is chosen now."""
    return [name for name, row in known.items() if named(row) not in ("", another(name))]


def columns() -> tuple[str, ...]:
    """Names of the columns."""
    others = [name for name in methods() if name not in linear()]
    return (LINEAR, ANOTHER, *others, "why not")


def cells(model_type: str) -> Cells:
    """The cells of one model type; empty ones did not run."""
    try:
        tiny = tiny_model(model_type)
    except NoTinyModelError as error:
        return unrun(str(error))
    tried = methods()
    try:
        case = ModelCase(next(iter(tried.values()))[0], tiny=tiny)
        case.silent(case.host())
    except RuntimeError:
        return unrun("without adapters, it has no backward in evaluation")
    found: Cells = {}
    reasons: dict[str, list[str]] = {}
    for column in columns()[:-1]:
        name = another(model_type) if column == ANOTHER else column
        text, reason = cell(tiny, tried[name])
        found[column] = f"{text} {name}" if text and column == ANOTHER else text
        if reason:
            reasons.setdefault(reason, []).append(column)
    everywhere = next(iter(reasons), "") if len(reasons) == 1 else ""
    if everywhere and len(reasons[everywhere]) == len(found):
        return found | {"why not": everywhere}
    return found | {"why not": "; ".join(f"{', '.join(n)}: {r}" for r, n in reasons.items())}


def cell(tiny: TinyModel, configs: Sequence[AdapterConfig]) -> tuple[str, str]:
    """Run a method's configs, the widest first, up to the first that the model has the sites for.

    Returns:
        (text of a cell, why it is not green)
    """
    refusal = misfit = ""
    for config in configs:
        try:
            failures = report_on(tiny, config)
        except SiteError as error:
            refusal = refusal or _short(error)
            continue
        except ConfigError as error:
            misfit = misfit or _short(error)
            continue
        except Exception as error:  # noqa: BLE001  whatever a method raises is its failure
            return RED, type(error).__name__
        if failures and _unreached(tiny, config):
            return "", "its sites are in a part of the model that these inputs do not reach"
        if failures:
            return RED, ", ".join(dict.fromkeys(f.check for f in failures))
        return (f"{GREEN} some" if refusal else GREEN), refusal
    return "", refusal or misfit


def _unreached(tiny: TinyModel, config: AdapterConfig) -> bool:
    """Whether the inputs reach no site, such as text alone a method in the tower of images."""
    case = ModelCase(config, tiny=tiny)
    model = case.trained("a")
    return case.silent(model).issuperset(path for path, _ in model.adapter_modules("a") if path)


def _short(error: SiteError | ConfigError) -> str:
    """What the message says of the model."""
    text = str(error)
    if "no transformer blocks: " in text:
        return text.partition("no transformer blocks: ")[2].partition(". ")[0]
    for words, said in (
        ("or of unknown width", "the output of a block is not known"),
        ("is not known", "where a sub-layer meets the residual stream is not known"),
        ("computes scores by itself", "some attention computes its scores by itself"),
        ("the output of", "the output of a block is not one state for each token"),
        ("none of the", "no block has such a sub-layer"),
        (": no layer with the role", "no block has such a sub-layer"),
        ("reads no tokens", "it reads no tokens"),
        ("no norm matches", "no module is called a norm"),
        ("called with more than its input", "some norm has two inputs"),
        ("cannot have an adapter at its input", "nothing can stand in front of its first block"),
    ):
        if words in text:
            return said
    return "not all places in every block"


def of_types(model_types: Iterable[str]) -> Iterator[tuple[str, Cells]]:
    """The cells of model types, one after the other, each within `SECONDS` of one core."""

    def late(number: int, frame: FrameType | None) -> None:
        raise _Late

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    before = signal.signal(signal.SIGPROF, late)
    try:
        for model_type in model_types:
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                found = cells(model_type)
            except _Late:
                found = unrun(f"takes more than {SECONDS} s")
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            yield model_type, found
    finally:
        signal.signal(signal.SIGPROF, before)
        torch.set_num_threads(threads)


def unrun(reason: str) -> Cells:
    """The cells of a model type that no method ran on."""
    return dict.fromkeys(columns(), "") | {"why not": reason}


def sweep(model_types: Sequence[str], workers: int) -> dict[str, Cells]:
    """The cells of model types, from processes of their own.

    Args:
        model_types: which.
        workers: how many processes at a time.
    """
    batches = [model_types[i : i + _BATCH] for i in range(0, len(model_types), _BATCH)]
    found: dict[str, Cells] = {}
    with ThreadPoolExecutor(workers) as pool:
        for part in pool.map(_batch, batches):
            found.update(part)
    return found


def _batch(model_types: Sequence[str]) -> dict[str, Cells]:
    found: dict[str, Cells] = {}
    while left := [t for t in model_types if t not in found]:
        process = subprocess.run(
            [sys.executable, "-m", __package__, "--types", *left],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=False,
        )
        rows = [json.loads(x) for x in process.stdout.splitlines() if x.startswith("[")]
        found.update(rows)
        if len(rows) < len(left):
            found[left[len(rows)]] = unrun("ends its process")
    return found


def more(found: Mapping[str, Cells]) -> survey.Columns:
    """The columns and their totals."""
    names = columns()
    ran = [x for x in found.values() if any(x[n] for n in names[:-1])]
    count = collections.Counter(n for x in ran for n in names[:-1] if x[n].startswith(GREEN))
    whole = sum(all(x[n].startswith(GREEN) for n in names[:-1]) for x in ran)
    each = ", ".join(f"{n} {count[n]}" for n in names[:-1])
    chosen = collections.Counter(filter(None, map(named, ran)))
    others = ", ".join(f"{n} {chosen[n]}" for n in sorted(chosen))
    return survey.Columns(
        names,
        {name: tuple(x[n] for n in names) for name, x in found.items()},
        (
            f"model types whose tiny model ran with adapters: {len(ran)}",
            f"of these with all columns green: {whole} ({each})",
            f"types on which the methods of the column `{ANOTHER}` were run: {others}",
        ),
        _NOTES.format(whole=", ".join(WHOLE)),
    )


def read(page: str) -> dict[str, Cells]:
    """The cells of a page."""
    names = columns()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| ")]
    table = {row[1].strip(): [c.strip() for c in row[8:-1]] for row in rows}
    return {
        name: dict(zip(names, row, strict=True))
        for name, row in table.items()
        if name not in ("model type", "---") and len(row) == len(names)
    }
