"""Convert an adapter to a method that can express any change of a weight.

The change ΔW of each weight is written as B A, with the factors of the method if it has any, else
with those of a truncated SVD. A certificate says what the conversion changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from adapterzoo import inject
from adapterzoo.anatomy import OutputSlice, Site
from adapterzoo.averaging import Truncated, truncated
from adapterzoo.composition import parse
from adapterzoo.config import MAX_WIDTH, AdapterConfig, Density, Maybe, Range, change_forms
from adapterzoo.contracts import Adapter, FactoredAdapter, WeightAdapter, compute_dtype
from adapterzoo.errors import ConfigError, StateError, in_python
from adapterzoo.inject.building import at_hand, inject_path
from adapterzoo.inject.layers import ExpertAdapters, FusedAdapters, take_slice
from adapterzoo.methods import undrawn
from adapterzoo.model.activation import make_plan, refuse_merged, refuse_taken
from adapterzoo.model.adapters import bring_in, make
from adapterzoo.model.heads import copies
from adapterzoo.model.hf.task_classes import text_config
from adapterzoo.model.sharding import refuse_if_sharded
from adapterzoo.model.state import (
    AdaptedModel,
    AdapterRecord,
    config_of,
    dtype_of,
    layer_in,
    modules_of,
    token_table,
)
from adapterzoo.names import check_name

from .certificate import Certificate, LayerReport


class Change(NamedTuple):
    """The change of one weight.

    Attributes:
        path: the path of the module that holds the weight.
        parameter: the weight's name there; None for the weight of a layer.
        value: `[*experts, d_out, d_in]`, in the widest dtype.
        factors: A and B with B A = value; None: not known.
    """

    path: str
    parameter: str | None
    value: Tensor
    factors: tuple[Tensor, Tensor] | None = None


class Size(NamedTuple):
    """How much of a change to keep; of both limits, the one that gives the lower rank counts.

    Attributes:
        rank: the largest rank; None: not limited.
        energy: the share of the squared singular values; None: all.
    """

    rank: int | None
    energy: float | None

    def check(self) -> None:
        """Check the values.

        Raises:
            ConfigError: one is not legal.
        """
        Maybe(Range(1, MAX_WIDTH))("convert", "rank", self.rank, 8)
        Maybe(Density())("convert", "energy", self.energy, 0.99)


Changes = Callable[[], Iterable[Change]]

_Leaf = tuple[str, str | None, OutputSlice | None]


@torch.no_grad()
def convert(
    model: AdaptedModel,
    name: str,
    to: str,
    size: Size,
    new_name: str | None = None,
    overwrite_ok: bool = False,
    active: bool = False,
    inputs: Mapping[str, Any] | None = None,
) -> Certificate:
    """Add the conversion of an adapter, which does not change unless the result replaces it.

    Args:
        model: the model with the adapter.
        name: the adapter.
        to: the method.
        size: how much of the changes to keep.
        new_name: the name of the result; None: the names of the adapter and the method.
        overwrite_ok: whether an adapter of this name may be replaced.
        active: whether to activate the result as the only adapter.
        inputs: arguments of a call, to compare outputs; None: random ones.

    Raises:
        ConfigError: a value is not legal, or no random inputs can be made.
        StateError: the adapter is more than a change of weights.
    """
    form, target = change_forms.find(to), f"{name}_{to}" if new_name is None else new_name
    size.check()
    check_name(target)
    record = model._adapter_state.find(name)
    refuse_taken(model, target, overwrite_ok)
    head = name if name in model.known_heads() else None
    given = random_inputs(model) if inputs is None else inputs
    made, layers = converted(model, name, form, size)
    before, plain = (outputs(model, each, head, given) for each in (name, None))
    bring_in(model, target, made, active, copies.combined(model, [name], [1.0]))
    after = outputs(model, target, head, given)
    return Certificate(
        target, record.config.architecture, to, tuple(layers),
        "random" if inputs is None else "given", difference(before, after),
        difference(before, plain),
    )  # fmt: skip


@torch.no_grad()
def converted(
    model: AdaptedModel, name: str, form: Any, size: Size
) -> tuple[AdapterRecord, list[LayerReport]]:
    """Return an adapter of another method with the changes of an adapter of the model.

    Args:
        model: the model with the adapter.
        name: the adapter.
        form: the config class of the other method.
        size: how much of the changes to keep.

    Returns:
        The new adapter, which is not yet in the model, and the error of each layer.

    Raises:
        StateError: the adapter is more than a change of weights.
    """
    size.check()
    refuse_if_sharded(model, "Write it before fully_shard(model).")
    refuse_merged(model, name)
    refuse_other(model, name)
    config = form.at_sites_of(model._adapter_state.find(name).config, model.anatomy)
    return with_changes(model, config, lambda: _changes(model, modules_of(model, name)), size)


def refuse_other(model: AdaptedModel, name: str) -> None:
    """Refuse an adapter that does more than change weights of layers.

    Args:
        model: the model with the adapter.
        name: the adapter.

    Raises:
        StateError: it does.
    """
    if copies.tables_of(model, name):
        raise StateError(f"{name!r} has trained embeddings, which would be lost. Keep it as it is.")
    for path, adapter in modules_of(model, name):
        parts = (part for part in adapter.modules() if isinstance(part, Adapter))
        for part in parts if path else ():
            is_change = isinstance(part, WeightAdapter | ExpertAdapters)
            keeps = isinstance(part, WeightAdapter) and part.keeps_weight
            if not is_change or part.stands_alone or keeps:
                what = f"{name!r} has a {type(part).__name__} at {path!r}"
                raise StateError(f"{what}, which is not a change of a weight. Keep it as it is.")


def _changes(model: AdaptedModel, modules: Iterable[tuple[str, Adapter]]) -> Iterator[Change]:
    """Yield the changes that adapters, given with the paths of their layers, make there."""
    for path, adapter in modules:
        # shared modules do not change a weight themselves
        if not path:
            continue
        layer = layer_in(model, path)
        originals = model._adapter_state.originals.get(path, {})
        with at_hand(layer):
            try:
                for parameter, value, factors in inject.changes(layer, adapter, originals):
                    if not bool(value.isfinite().all()):
                        raise StateError("the change is not finite. Look for NaN in the adapter.")
                    yield Change(path, parameter, value, factors)
            except StateError as error:
                raise StateError(f"at {path!r}: {error}") from error


def with_changes(
    model: AdaptedModel, config: Any, changes: Changes, size: Size
) -> tuple[AdapterRecord, list[LayerReport]]:
    """Return the new adapter, which is not yet in the model, and the report of each weight.

    Args:
        model: the model that the adapter is for.
        config: the config of the new adapter, with any ranks.
        changes: returns the changes of the weights at its sites; called twice.
        size: how much of them to keep.
    """
    sites: dict[tuple[str, str | None], list[Site]] = {}
    kept: dict[_Leaf, Truncated] = {}
    for placement in config.placements(model.anatomy):
        site = placement.site
        sites.setdefault(_key(site), []).append(site)
        # factors of no change, where the old adapter makes none
        a, b = torch.zeros(*site.lead, 0, site.d_in), torch.zeros(*site.lead, site.d_out, 0)
        kept[*_key(site), site.output_slice] = Truncated(a, b, is_exact=True)
    for key, beside in sites.items():
        # an adapter of the whole weight takes the change, not those of parts of the same weight
        sites[key] = [site for site in beside if site.output_slice is None] or beside
    dtype = compute_dtype(config.dtype_at(dtype_of(model)))
    ranks: dict[str, int] = {}
    for change in changes():
        for site in sites[change.path, change.parameter]:
            value, factors = _part(change, site.output_slice)
            # the noise of a float64 SVD, and differences too small for the new factors
            precision = max(torch.finfo(dtype).eps, max(value.shape) * torch.finfo(value.dtype).eps)
            found = truncated(value, factors, *size, precision)
            kept[change.path, change.parameter, site.output_slice] = found
            ranks[site.name] = max(ranks.get(site.name, 1), found.a.shape[-2])
    with undrawn(), torch.random.fork_rng(devices=()):
        record = make(model, cast("AdapterConfig", config.of_ranks(ranks)))
    for path, adapter in record.coming.items():
        for parameter, features, leaf in _leaves(adapter):
            own = kept[path, parameter, features]
            leaf.set_factors(own.a, own.b)
    reports = []
    for change in changes():
        made = _changes(model, [(change.path, record.coming[change.path])])
        new = next(c for c in made if c.parameter == change.parameter)
        for site in sites[change.path, change.parameter]:
            features = site.output_slice
            old, now = _part(change, features)[0], _part(new, features)[0]
            norm, error = (float(torch.linalg.vector_norm(t)) for t in (old, old - now))
            names = site.path, site.parameter, site.role if features else None
            own = kept[change.path, change.parameter, features]
            shown = ".".join(filter(None, names))
            reports.append(LayerReport(shown, own.a.shape[-2], norm, error, own.is_exact))
    return record, reports


def _key(site: Site) -> tuple[str, str | None]:
    """Return the module that holds the weight of a site, and the weight's name if it has one."""
    parameter = site.parameter.rpartition(".")[2] if site.parameter else None
    return inject_path(site), parameter


def _part(
    change: Change, features: OutputSlice | None
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Return the change of some output features, and its factors."""
    if features is None:
        return change.value, change.factors
    value = take_slice(change.value, features, -2)  # [*experts, size, d_in]
    if change.factors is None:
        return value, None
    a, b = change.factors
    return value, (a, take_slice(b, features, -2))


def _leaves(
    adapter: Adapter,
) -> Iterator[tuple[str | None, OutputSlice | None, FactoredAdapter]]:
    """Yield (parameter, part of its features, adapter) for each adapter of one place."""
    if isinstance(adapter, ExpertAdapters):
        for parameter, parts in adapter._modules.items():
            for _, features, leaf in _leaves(cast("Adapter", parts)):
                yield parameter, features, leaf
    elif isinstance(adapter, FusedAdapters):
        for label, features in adapter.slices.items():
            yield None, features, cast("FactoredAdapter", adapter._modules[label])
    else:
        yield None, None, cast("FactoredAdapter", adapter)


_TOKENS, _SAMPLES, _SEED = 16, 4000, 0


def outputs(
    model: AdaptedModel, adapter: str | None, head: str | None, inputs: Mapping[str, Any]
) -> list[Tensor]:
    """Return the floating-point tensors, except the loss, that a call in evaluation mode returns.

    Args:
        model: the model with adapters.
        adapter: the only adapter that acts; None: none does.
        head: the head to use; None: the active one.
        inputs: arguments of the call.
    """
    plan = make_plan(model, parse(adapter), head, ())
    with model._active.entered(plan):
        return plain_outputs(model, inputs)


def plain_outputs(model: Any, inputs: Mapping[str, Any]) -> list[Tensor]:
    """Return the floating-point tensors, except the loss, of a call with the active adapters.

    Args:
        model: any model of transformers.
        inputs: arguments of the call.
    """
    training, device = model.training, next(model.parameters()).device
    given = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    model.eval()
    try:
        with torch.no_grad():
            found = model(**given, return_dict=True)
    finally:
        model.train(training)
    values = [t for key, t in found.items() if key != "loss" and isinstance(t, Tensor)]
    return [t.cpu().double() for t in values if t.is_floating_point()]


def difference(some: list[Tensor], others: list[Tensor]) -> float:
    """Return the largest difference between outputs of two calls."""
    pairs = zip(some, others, strict=True)
    return max((float((a - b).abs().max()) for a, b in pairs if a.numel()), default=0.0)


def random_inputs(model: AdaptedModel) -> dict[str, Tensor]:
    """Return the same random inputs each time: one row of tokens, one image, or one sound clip.

    Raises:
        ConfigError: the model needs other inputs, or more.
    """
    called = cast("Any", model)
    # modules that are not of transformers do not name their input
    main = getattr(called, "main_input_name", "input")
    source = torch.Generator("cpu").manual_seed(_SEED)
    found = _drawn(called, main, token_table(model), source)
    try:
        if found is None:
            raise ValueError(f"it reads {main}")
        given = {k: v.to(called.dtype) if v.is_floating_point() else v for k, v in found.items()}
        outputs(model, None, None, given)
    # a model that needs more inputs raises errors of any kind
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason, inputs = " ".join(str(error).split())[:200], f"inputs={{{main!r}: …}}"
        call = in_python(inputs, f"in Python: model.convert_adapter(…, {inputs})")
        raise ConfigError(
            f"no random inputs can be made for this {type(model).__name__} ({reason}). "
            f"Write {call}, with the arguments of a call."
        ) from error
    return given


def _drawn(
    model: Any, main: str, table: torch.nn.Embedding | None, source: torch.Generator
) -> dict[str, Tensor] | None:
    """Return random inputs; None if the config does not give their sizes."""
    config = config_of(model)
    noise = functools.partial(torch.randn, generator=source, device="cpu")
    if main == "input_ids" and table is not None:
        ids = _tokens(text_config(config), table.num_embeddings, source)  # [1, tokens]
        return {main: ids, **({"decoder_input_ids": ids} if config.is_encoder_decoder else {})}
    size, channels = (getattr(config, name, None) for name in ("image_size", "num_channels"))
    if main == "pixel_values" and size and channels:
        return {
            main: noise(1, channels, *(size if isinstance(size, list | tuple) else (size, size)))
        }
    bins, frames = (getattr(config, n, None) for n in ("num_mel_bins", "max_source_positions"))
    if main == "input_features" and bins and frames and config.is_encoder_decoder:
        start = torch.tensor([[config.decoder_start_token_id or 0]], device="cpu")
        return {main: noise(1, bins, 2 * frames), "decoder_input_ids": start}
    if main == "input_values":
        return {main: noise(1, _SAMPLES)}
    return None


def _tokens(text: Any, count: int, source: torch.Generator) -> Tensor:
    """Return random tokens `[1, tokens]` without padding."""
    positions = getattr(text, "max_position_embeddings", None)
    length = min(_TOKENS, positions - 4) if isinstance(positions, int) else _TOKENS
    special = {getattr(text, f"{name}_token_id", None) for name in ("pad", "bos", "eos")}
    legal = torch.tensor([n for n in range(count) if n not in special], device="cpu")
    ids = legal[torch.randint(len(legal), (1, length), generator=source, device="cpu")]
    end = getattr(text, "eos_token_id", None)
    if isinstance(end, int) and 0 <= end < count:
        # BART and T5 classify at the end of the text
        ids[:, -1] = end
    return ids
