"""The table of `docs/merged-sites.md`: merged = unmerged at every site, for every model type.

`make merging` runs it and writes the page, whose numbers `test_merged_sites.py` checks.
`ARGS="--types bert t5"` runs these types only; without it, those that the page does not have.
"""

from __future__ import annotations

import argparse
import collections
import copy
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from architectures.table import linear, methods
from architectures.tiny_models import NoTinyModelError, tiny_model
from torch import Tensor, nn

import adapterzoo
from adapterzoo.anatomy import Anatomy, find
from adapterzoo.config import AdapterConfig
from adapterzoo.errors import AdapterZooError
from adapterzoo.testing import TinyModel
from adapterzoo.testing._case import Inputs, flat, seeded

PAGE = Path(__file__).parents[1] / "docs" / "merged-sites.md"
RIGHT, REFUSED, ABSENT, WRONG = "right", "refused", "–", "wrong"
SECONDS = 240
# what an adapter changes may be this much larger than what merging does to it; most is float64,
# but norms, rotations and scores of many models are always float32
SHARE, FLOOR = 1e-4, 1e-6

Cells = dict[str, str]


class _Late(BaseException):
    """A model type takes too long; not an `Exception`, so that nothing catches it."""


def _paths(anatomy: Anatomy, *kinds: str) -> list[str]:
    return [s.path for s in anatomy if s.parameter is None and s.kind in kinds]


def _parameters(anatomy: Anatomy) -> list[str]:
    return [name for name, site in anatomy.weights().items() if site.parameter is not None]


def _copied(anatomy: Anatomy) -> list[str]:
    return [s.path for s in (*anatomy, *anatomy.others) if s.parameter is None and s.path]


def attempts(anatomy: Anatomy) -> dict[str, tuple[str, AdapterConfig | None, list[str]]]:
    """Map a column to the field that names sites, the config without it, and the sites."""
    found: dict[str, tuple[str, AdapterConfig | None, list[str]]] = {}
    tried = methods()
    for name in linear():
        config = tried[name][-1].replace(target_modules=None)
        found[name] = "target_modules", config, _paths(anatomy, "linear")
    lora = AdapterConfig.load("lora[r=2]")
    found["embedding"] = "target_modules", lora, _paths(anatomy, "embedding")
    found["parameter"] = "target_parameters", lora, _parameters(anatomy)
    norms = [site.path for site in anatomy.others if site.kind == "norm"]
    found["ln_tuning"] = "target_modules", AdapterConfig.load("ln_tuning"), norms
    found["roles"] = "", tried["lora"][0], ["roles"] if anatomy.blocks else []
    first = next((p for p in _paths(anatomy, "linear")), None)
    one = None if first is None else lora.replace(target_modules=[first])
    found["modules_to_save"] = "modules_to_save", one, [p for p in _copied(anatomy) if p != first]
    all_biases = None if one is None else one.replace(bias="all")
    found["bias"] = "", all_biases, ["bias"] if anatomy.biases or anatomy.odd_biases else []
    table = anatomy.own_table
    tokens = None if one is None else one.replace(trainable_token_indices=tuple(range(8, 50)))
    found["tokens"] = "", tokens, [] if table is None else [table]
    return found


def cell(
    model: Any, inputs: Inputs, plain: Tensor, field: str, config: AdapterConfig, sites: list[str]
) -> str:
    """Compare merged with unmerged at all sites that are accepted; drop those that are refused.

    Returns:
        A text of a cell; with the error behind it if that is too large.
    """
    left = sites
    while left:
        given = config.replace(**{field: left}) if field else config
        try:
            return _compared(model, inputs, plain, given)
        except AdapterZooError as error:
            text = str(error)
            refused = [site for site in left if f"'{site}'" in text]
        finally:
            if "a" in model.adapters_config:
                model.reset_adapter()
                model.delete_adapter("a")
        if not refused or len(refused) == len(left):
            # of several sites the message names all: try each half alone
            if field and len(left) > 1:
                half = len(left) // 2
                parts = [
                    cell(model, inputs, plain, field, config, p) for p in (left[:half], left[half:])
                ]
                return next((p for p in parts if p.startswith(WRONG)), max(parts))
            return REFUSED
        left = [site for site in left if site not in refused]
    return REFUSED


def _compared(model: Any, inputs: Inputs, plain: Tensor, config: AdapterConfig) -> str:
    model.add_adapter("a", config, set_active=True)
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".a." in name and p.is_floating_point():
                p.add_(torch.randn(p.shape, generator=source).to(p), alpha=0.1)
    with torch.enable_grad():
        # some fused computations run without gradients only
        trained = _output(model, inputs).detach()
    acting = _output(model, inputs)
    model.merge_adapter("a")
    merged = _output(model, inputs)
    bound = SHARE * (trained - plain).abs().max() + FLOOR * plain.abs().max()
    error = torch.stack([(trained - merged).abs().max(), (acting - merged).abs().max()]).max()
    return RIGHT if bool(error <= bound) else f"{WRONG} {float(error):.1e} > {float(bound):.1e}"


@torch.no_grad()
def _output(model: nn.Module, inputs: Inputs) -> Tensor:
    return flat(seeded(model, inputs)).double()


def exact(tiny: TinyModel) -> tuple[nn.Module, Inputs]:
    """Return the model in float64 with its inputs; in float32 where float64 does not run."""
    inputs = Inputs(tiny.inputs)
    model = copy.deepcopy(tiny.model).eval().double()
    try:
        runs = bool(_output(model, inputs.double()).isfinite().all())
    except RuntimeError:
        runs = False
    # Canine's mask is 0 times infinity in float64
    return (model, inputs.double()) if runs else (copy.deepcopy(tiny.model).eval(), inputs)


def cells(tiny: TinyModel, columns: Sequence[str] | None = None) -> Cells:
    """Return the cells of one model; of some columns only, if they are given."""
    plain, inputs = exact(tiny)
    before = _output(plain, inputs)
    model: Any = adapterzoo.init(plain)
    found = {}
    for name, (field, config, sites) in attempts(model.anatomy).items():
        if columns is None or name in columns:
            absent = not sites or config is None
            found[name] = ABSENT if absent else cell(model, inputs, before, field, config, sites)
    return found


def unknown(tiny: TinyModel) -> list[str]:
    """Return the layers of which anatomy says something else than a call of the model shows.

    A layer that is not called and yet gets a gradient is read; one that is called is used.
    """
    model, inputs = copy.deepcopy(tiny.model).eval().requires_grad_(True), Inputs(tiny.inputs)
    anatomy = find(model)
    sites = {s.path: s for s in (*anatomy.others, *anatomy) if s.parameter is None}
    called: set[str] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        module.register_forward_pre_hook(lambda *_, path=path: called.add(path))
    y = flat(seeded(model, inputs))
    try:
        (y * torch.linspace(-1, 1, y.numel()).to(y)).sum().backward()
    except RuntimeError:
        # RWKV writes its state in place, so its tiny model has no gradients
        return []
    shared = {path for group in anatomy.shared_tables for path in group}
    found = []
    for path, site in sites.items():
        layer = model.get_submodule(path)
        own = [p for p in layer.parameters(recurse=False) if p.grad is not None]
        is_read = any(p.grad is not None and bool(p.grad.count_nonzero()) for p in own)
        around = isinstance(model.get_submodule(path.rpartition(".")[0]), nn.MultiheadAttention)
        if path in called and not site.is_used:
            found.append(f"{path} is called")
        if path not in called and is_read and not (site.read or around or path in shared):
            found.append(f"{path} is read")
    return found


# --- the page ---

_HEAD = """# Merged and unmerged adapters, on model types of transformers {version}

Merging an adapter into the weights must not change the outputs. This page shows where that was
compared. `make merging` writes it; tests run a part of it again and check its numbers.

- model types: {types}; [{others} others](#not-in-the-table) are not in the table
- cells: {cells}
- right: {right}
- refused: {refused}
- without such a site (`–`): {absent}
- wrong: {wrong}

Each cell tests one method on a tiny model of a type, at every site that accepts it, with random
parameters. `right`: the output before merging, with gradients and under `torch.no_grad()`, equals
the output after `merge_adapter`. `refused`: `add_adapter` or `merge_adapter` raises at every site,
and nothing has changed. `–`: the model has no such site. Models are in float64; parts that a model
itself computes in float32 cause a rounding error of at most {share:.0e} of the adapter's effect.

Methods are tested at all linear layers, including those whose weight the model only reads.
`embedding` is LoRA at all embeddings, `parameter` is LoRA at all matrices that are parameters of
larger modules, such as fused experts and routers, `roles` is LoRA at the parts of fused layers, and
`ln_tuning` is tested at all norms. `modules_to_save` (copies of all other layers), `bias`
(`bias="all"`) and `tokens` (`trainable_token_indices`) are tested together with LoRA at one layer.
Shared tables are refused.

| {columns} | model types |
| {rule} | --- |
"""
_LEFT_OUT = """
## Not in the table

Merging has not been compared on these model types.

"""
_NOT_RUN = "not run"


def render(found: Mapping[str, Cells], others: Mapping[str, str], version: str) -> str:
    """Return the page: types with equal cells share a row.

    Args:
        found: cells by model type.
        others: other model types → why there are no cells.
        version: of transformers.
    """
    columns = [*next(iter(found.values()))]
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(found):
        rows.setdefault(tuple(found[name].values()), []).append(name)
    count = collections.Counter(c.partition(" ")[0] for row in found.values() for c in row.values())
    head = _HEAD.format(
        types=len(found), others=len(others), cells=count.total(), right=count[RIGHT],
        refused=count[REFUSED],
        absent=count[ABSENT], wrong=count[WRONG], share=SHARE, version=version,
        columns=" | ".join(columns), rule=" | ".join("---" for _ in columns),
    )  # fmt: skip
    ordered = sorted(rows.items(), key=lambda row: (-len(row[1]), row[1]))
    table = "".join(f"| {' | '.join([*c, ', '.join(names)])} |\n" for c, names in ordered)
    reasons: dict[str, list[str]] = {}
    for name in sorted(others):
        reasons.setdefault(others[name], []).append(name)
    rest = "".join(f"- {why}: {', '.join(reasons[why])}\n" for why in sorted(reasons))
    return head + table + (_LEFT_OUT + rest if rest else "")


def read(page: str) -> dict[str, Cells]:
    """Return the cells of a page, by model type."""
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    if not rows:
        return {}
    columns = rows[0][:-1]
    return {
        name: dict(zip(columns, row[:-1], strict=True))
        for row in rows[2:]
        for name in row[-1].split(", ")
    }


def left_out(page: str) -> dict[str, str]:
    """Return the model types without cells on a page → why."""
    lines = page.partition(_LEFT_OUT)[2].splitlines()
    reasons = (line.removeprefix("- ").rpartition(": ") for line in lines)
    return {name: why for why, _, names in reasons for name in names.split(", ")}


def _of_types(model_types: Iterable[str]) -> Iterator[tuple[str, Cells | str, list[str]]]:
    """Yield the cells of each type, or why there are none, and what anatomy has wrong."""

    def late(number: int, frame: FrameType | None) -> None:
        raise _Late

    signal.signal(signal.SIGPROF, late)
    for name in model_types:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            tiny = tiny_model(name)
            yield name, cells(tiny), unknown(tiny)
        except NoTinyModelError as error:
            yield name, f"no tiny model ({error})", []
        except _Late:
            yield name, f"takes more than {SECONDS} seconds", []
        except (RuntimeError, LookupError, ValueError, TypeError, AttributeError) as error:
            sys.stderr.write(f"{name}: {error}\n")
            yield name, f"ends with {type(error).__name__}", []
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)


def main(arguments: Sequence[str]) -> int:
    """Run the types that the page does not have, or those given; return 1 if a cell is wrong."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    parser = argparse.ArgumentParser(description="Write docs/merged-sites.md.")
    parser.add_argument("--types", nargs="+", help="run these model types only")
    parser.add_argument("--again", action="store_true", help="run all model types again")
    chosen = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: dict[str, Cells] = {}
    others = dict.fromkeys(MODEL_MAPPING_NAMES, _NOT_RUN)
    if PAGE.exists() and not chosen.again:
        page = PAGE.read_text(encoding="utf-8")
        found = read(page)
        others |= left_out(page)
    others = {name: why for name, why in others.items() if name not in found}
    every = (name for name in sorted(MODEL_MAPPING_NAMES) if name not in found)
    failed = False
    for name, row, strange in _of_types(chosen.types or every):
        wrong = []
        if isinstance(row, str):
            others[name] = row
        else:
            found[name] = row
            others.pop(name, None)
            wrong = [f"{column}: {text}" for column, text in row.items() if text.startswith(WRONG)]
        # what has run is kept if the command is stopped
        PAGE.write_text(render(found, others, transformers.__version__), encoding="utf-8")
        failed |= bool(wrong or strange)
        sys.stderr.write("".join(f"{name}: {text}\n" for text in [*wrong, *strange]))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
