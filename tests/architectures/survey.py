"""The survey: what anatomy finds in every model type of transformers, as one table.

Search every model type that `AutoModel.from_config` builds on the meta device from its default
configuration, and prove its stream sites by following the residual stream through a run (`flow`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from adapterzoo.anatomy import Anatomy, Block, find
from adapterzoo.anatomy.sites import ATTENTION_ROLES, MLP_ROLES

from . import finder
from .flow import likeness, prove
from .meta_inputs import of_block, of_model
from .tiny_configs import tiny_configs


@dataclass(frozen=True, slots=True)
class Line:
    """What the survey says of one model type.

    Attributes:
        model_type: as in `config.model_type`.
        blocks: number of blocks, 0 when there are none or the model could not be built.
        roles: the roles found in its blocks.
        stream: `post`, `pre` or both: where the norms of its blocks stand.
        has_attention: whether the model has attention.
        complete: whether every block has all roles and stream sites of its sub-layers.
        plain: whether all sub-layers read the stream and are added to it, and nothing else.
        proven: how many of the different blocks ran and were proven, of how many.
        remark: why something is missing, or why the model could not be built.
        wrong: what the proof found wrong; empty, or a test fails.
        targets: the layers that the default LoRA adapts.
    """

    model_type: str
    blocks: int = 0
    roles: tuple[str, ...] = ()
    stream: str = ""
    has_attention: bool = False
    complete: bool = False
    plain: bool = False
    proven: tuple[int, int] = (0, 0)
    remark: str = ""
    wrong: str = ""
    targets: tuple[str, ...] = ()


NEEDS_PACKAGE = "not built: needs a package that is not installed"
# models with attention that has no layers to adapt, or that is no stack of blocks
_UNREADABLE = {
    "mobilevitv2": "its attention and feed-forward part are convolutions",
    "ibert": "its quantized layers pass scaling factors beside their output",
    "squeezebert": "its layers are grouped convolutions",
    "xlnet": "its projections are three-dimensional parameters",
}


def survey(part: slice = slice(None)) -> Iterator[Line]:
    """The lines of model types, in alphabetical order; models are built one by one."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    for model_type in sorted(MODEL_MAPPING_NAMES)[part]:
        model = _build(model_type)
        if isinstance(model, str):
            yield Line(model_type, remark=model, targets=_of_a_tiny_one(model_type))
        else:
            yield line(model_type, model)


def _of_a_tiny_one(model_type: str) -> tuple[str, ...]:
    """The default targets of a type whose default configuration gives no model."""
    from transformers import AutoModel

    configs = tiny_configs(model_type)
    while True:
        try:
            config = next(configs)
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return finder.targets(find(AutoModel.from_config(config)))
        except StopIteration:
            return ()
        except Exception:  # noqa: BLE001 - configurations fail in every way
            continue


def _build(model_type: str) -> nn.Module | str:
    """The model of the default configuration on the meta device, or why there is none."""
    from transformers import AutoConfig, AutoModel
    from transformers.initialization import no_init_weights

    try:
        config = AutoConfig.for_model(model_type)
        # the default kernel for experts wants a real device
        config._experts_implementation = "batched_mm"
        with torch.device("meta"), no_init_weights(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model: nn.Module = AutoModel.from_config(config)
    except ImportError:
        return NEEDS_PACKAGE
    except Exception as error:  # noqa: BLE001 - default configurations fail in every way
        return f"not built from its default configuration: {type(error).__name__}"
    return model.eval()


def line(model_type: str, model: nn.Module) -> Line:
    """The survey's line for one model on the meta device."""
    anatomy = find(model)
    if not anatomy.blocks:
        reason = _UNREADABLE.get(model_type, "")
        return Line(model_type, remark=reason or anatomy.reason, has_attention=bool(reason))
    kinds: dict[object, Block] = {}
    for block in anatomy.blocks:
        kinds.setdefault(likeness(block), block)
    gaps = sorted({gap for block in kinds.values() for gap in _gaps(block)})
    notes = sorted({block.note for block in kinds.values() if block.note})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdicts = proof(model, anatomy, kinds.values())
    wrongs = sorted({v for v in verdicts.values() if v and "not called" not in v})
    styles = {"post" if b.post_norm else "pre" for b in kinds.values() if b.sublayers}
    found = {s.role for b in kinds.values() for s in (*b.sites, *b.parts)}
    return Line(
        model_type,
        blocks=len(anatomy.blocks),
        roles=tuple(r for r in (*ATTENTION_ROLES, *MLP_ROLES) if r in found),
        stream=" ".join(sorted(styles)),
        has_attention=any(b.has(r) for b in kinds.values() for r in ATTENTION_ROLES),
        complete=not gaps,
        plain=not gaps and not any(b.mixed or b.apart for b in kinds.values()),
        proven=(
            sum(not v for v in verdicts.values()),
            sum(bool(b.sublayers) for b in kinds.values()),
        ),
        remark="; ".join([*gaps, *(note for note in notes if note not in gaps)]),
        wrong="; ".join(wrongs),
        targets=finder.targets(anatomy),
    )


def _gaps(block: Block) -> Iterator[str]:
    """What is missing in a block."""
    roles = {site.role for site in (*block.sites, *block.parts)}
    if roles & {"query", "key", "value", "qkv"}:
        for role in ("query", "key", "value", "attention_out"):
            if role not in roles and role not in block.absent:
                yield f"no {role}"
    if ("mlp_in" in roles) != ("mlp_out" in roles):
        yield "no mlp_out" if "mlp_in" in roles else "no mlp_in"
    if not block.sublayers and roles & {"attention_out", "mlp_out"}:
        yield block.note or "no stream sites"


def proof(model: nn.Module, anatomy: Anatomy, kinds: Iterable[Block]) -> dict[int, str]:
    """The verdicts on one block of each kind, by block number.

    The model runs first, then the towers of the blocks that it did not reach, then blocks alone.
    """
    wanted = {block.layer: block for block in kinds if block.sublayers}
    verdicts: dict[int, str] = {}

    def ran(run: Any, blocks: Iterable[Block]) -> None:
        for layer, verdict in prove(model, blocks, run)[0].items():
            if layer in wanted and (layer not in verdicts or "not called" in verdicts[layer]):
                verdicts[layer] = verdict

    def left() -> list[Block]:
        return [
            block
            for layer, block in wanted.items()
            if layer not in verdicts or "not called" in verdicts[layer]
        ]

    ran(lambda: model(**of_model(model)), anatomy.blocks)
    for tower in _towers(model, left()):
        module = model.get_submodule(tower)
        below = [b for b in anatomy.blocks if b.path.startswith(f"{tower}.")]
        if any(block.layer in {b.layer for b in below} for block in left()):
            ran(lambda module=module: module(**of_model(module)), below)
    for block in left():
        module = model.get_submodule(block.path)
        if module is not model:
            for inputs in of_block(block, module):
                if block in left():
                    ran(lambda module=module, inputs=inputs: module(**inputs), [block])
    return verdicts


def _towers(model: nn.Module, blocks: Iterable[Block]) -> list[str]:
    """Paths of the models within the model that hold the blocks, the innermost first."""
    towers: dict[str, None] = {}
    for block in blocks:
        path = block.path
        while path := path.rpartition(".")[0]:
            if isinstance(getattr(model.get_submodule(path), "main_input_name", None), str):
                towers.setdefault(path)
    return list(towers)


@dataclass(frozen=True, slots=True)
class Columns:
    """Further columns of the table, of those who see more than anatomy does.

    Attributes:
        names: of the columns.
        cells: model type to its cells.
        totals: lines for the top of the page.
        notes: what the columns mean.
    """

    names: tuple[str, ...] = ()
    cells: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    totals: tuple[str, ...] = ()
    notes: str = ""


def render(lines: Iterable[Line], version: str, more: Columns | None = None) -> str:
    """The table as Markdown, totals on top.

    Args:
        lines: of the survey.
        version: of transformers.
        more: further columns.
    """
    lines, more = list(lines), more or Columns()
    names = "".join(f" {name} |" for name in more.names)
    totals = "".join(f"- {total}\n" for total in more.totals)
    built = [x for x in lines if not x.remark.startswith("not built")]
    attentive = [x for x in built if x.has_attention]
    complete = [x for x in attentive if x.complete]
    kinds = sum(x.proven[1] for x in built)
    proven = sum(x.proven[0] for x in built)
    plain = sum(x.plain for x in complete)
    share = 100 * len(complete) / max(1, len(attentive))
    head = f"""# Where adapters can go, for every model type of transformers {version}

Written by `make architectures`; tests compare it with the current results. [Find your
model](architectures.md) is the short form.

- model types: {len(lines)}
- built on the meta device from their default configuration: {len(built)}
- of these with attention: {len(attentive)}
- of these with all roles and stream sites: {len(complete)} ({share:.1f} %)
- of these with sub-layers that read only the stream and are simply added to it: {plain}
- distinct blocks whose stream sites were verified by a run: {proven} of {kinds}
{totals}
`q k v qkv o` are query, key, value, the fused layer that contains them, and the output projection
of attention; `in gate out` are the layers of the feed-forward part. *Stream* tells whether norms
come before the sub-layers (`pre`) or after the residual additions (`post`). *Proven* counts the
distinct blocks that ran with the default configuration and in which every stream site was verified;
attention or feed-forward parts that the remark excludes do not count.
{more.notes}
| model type | blocks | roles | stream | complete | proven | remark |{names}
| --- | --- | --- | --- | --- | --- | --- |{" --- |" * len(more.names)}
"""
    blank = ("",) * len(more.names)
    return head + "".join(_row(x, more.cells.get(x.model_type, blank)) for x in lines)


def finding(lines: Iterable[Line], version: str, more: Columns) -> str:
    """The page to find a model in, as Markdown.

    Args:
        lines: of the survey.
        version: of transformers.
        more: columns of what each method did.
    """
    cells = {t: dict(zip(more.names, row, strict=True)) for t, row in more.cells.items()}
    return finder.render(((x.model_type, x.targets) for x in lines), cells, version)


_SHORT = {"query": "q", "key": "k", "value": "v", "qkv": "qkv", "attention_out": "o"}


def _row(x: Line, more: tuple[str, ...]) -> str:
    roles = " ".join(_SHORT.get(role, role.removeprefix("mlp_")) for role in x.roles)
    complete = ("yes" if x.complete else "no") if x.has_attention else ""
    proven = f"{x.proven[0]}/{x.proven[1]}" if x.blocks else ""
    cells = (x.model_type, str(x.blocks or ""), roles, x.stream, complete, proven, x.remark, *more)
    return f"| {' | '.join(cells)} |\n"
