"""Methods of PEFT's models, and of transformers' mixin for PEFT, for every model with adapters.

Methods of `AdapterModelMixin` also take PEFT's arguments.
"""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from adapterzoo import formats
from adapterzoo.anatomy import in_whole
from adapterzoo.averaging import LINEAR_OF_PEFT
from adapterzoo.compat.adapters import AdaptersMethods
from adapterzoo.composition import Stack, are_merged
from adapterzoo.config import FLAG, MAX_WIDTH, AdapterConfig, Choice, Range
from adapterzoo.contracts import FactoredAdapter
from adapterzoo.errors import CheckpointError, ConfigError, SiteError, StateError, listing
from adapterzoo.formats import fit
from adapterzoo.formats import peft as format_of_peft
from adapterzoo.formats.checkpoint import from_plain
from adapterzoo.formats.peft.reading import is_saved, task_of
from adapterzoo.formats.peft.writing import HEADED
from adapterzoo.inject.building import plain_modules
from adapterzoo.inject.layers import uncounted
from adapterzoo.model import (
    AdapterModelMixin,
    adapters,
    averaging,
    checkpointing,
    hotswap,
    merging,
    sharding,
    training,
)
from adapterzoo.model.activation import make_plan, refuse_merged, replan, set_active
from adapterzoo.model.heads import copies
from adapterzoo.model.heads.copies import modules_with, names_of
from adapterzoo.model.heads.named import HeadRecord, record_of, saved_names
from adapterzoo.model.heads.store import fitting
from adapterzoo.model.hf.info import ModelInfo, split_experts
from adapterzoo.model.sharding import class_name, size_of
from adapterzoo.model.state import (
    AdaptedModel,
    AdapterRecord,
    LoadOptions,
    base_prefix,
    config_of,
    modules_of,
    named_tensors,
    own_parameters_of,
    parameters_of,
)
from adapterzoo.names import one_of
from adapterzoo.patterns import ALL_LINEAR, Targets, exactly, is_named
from adapterzoo.peft_arguments import (
    COMMON,
    TASK_TYPES,
    PeftArguments,
    class_of,
    classes_of_peft,
    translated,
)
from adapterzoo.spelling import PeftSpelling, peft_spellings

from .arguments import also_named, is_peft

# --- PEFT's config objects as configs here; PEFT itself is never imported ---

# names of heads that PEFT adds to `modules_to_save` itself, whether the model has them or not
_SAVED = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}
_ADDED = frozenset(name for names in _SAVED.values() for name in names)


def from_peft(model: AdaptedModel, config: Any) -> tuple[AdapterConfig, bool]:
    """Return our config for one of PEFT's, and whether the adapter is only used: `inference_mode`.

    Without `target_modules` and `target_parameters`, the layers are those of the method's default
    roles, with fused ones whole.

    Args:
        model: the model to which the adapter will be added.
        config: an object of PEFT, or its dict.

    Raises:
        ConfigError: there is no such method, or a field has no meaning here.
    """
    values = dict(config if isinstance(config, Mapping) else config.to_dict())
    cls = class_of(str(getattr(values["peft_type"], "value", values["peft_type"])), values)
    spelling, arguments = peft_spellings[cls.architecture], classes_of_peft[cls]
    task = _task_in(values)
    own_task = None if model._has_named_heads else task_of(class_name(model))
    tasks = TASK_TYPES if own_task is None else (own_task,)
    if task is not None and task not in tasks:
        raise ConfigError(
            f"task_type={task!r}: a {class_name(model)} has {listing(tasks)}. Write "
            f"task_type={tasks[0]!r}, or add the adapter to a model for that task."
        )
    if "modules_to_save" in values:
        values["modules_to_save"] = _saved(model, values["modules_to_save"], task)
    if values.get("tokenizer_name_or_path") == config_of(model).name_or_path:
        values.pop("tokenizer_name_or_path", None)
    own = {*arguments.fields}
    values = {n: v for n, v in values.items() if n in own or n not in arguments.fixed}
    if unknown := sorted(n for n, v in values.items() if v and n not in own | COMMON.keys()):
        raise ConfigError(
            f"{arguments.class_name}({unknown[0]}={values[unknown[0]]!r}): there is no such field. "
            f"Leave it out; there are {listing(sorted(own), limit=40)}."
        )
    fields = {name: value for name, value in values.items() if name in own}
    given = fields.get("target_modules")
    if given == ALL_LINEAR:
        linear = (
            s
            for s in model.anatomy
            if s.kind == "linear" and s.parameter is None and s.role != "lm_head"
        )
        fields["target_modules"] = names_of(model, linear)
    if spelling.of_parameters:
        # the names are read here, before the config checks them
        Targets()(arguments.class_name, "target_modules", given)
        fields = with_experts(model, fields, given, spelling)
    fields = _that_match(model, fields, arguments)
    numbers = fields.get("layers_to_transform")
    stacks = fields.pop("layers_pattern", None) if numbers is not None else None
    if stacks:
        fields["layers_to_transform"] = None
    made = {**arguments.implied, **translated(spelling.config, fields)}
    found = cast("AdapterConfig", cast("Any", spelling.config)(**made))
    targets = [found.to_dict().get(name) for name in ("target_modules", "target_parameters")]
    if "target_modules" in found.field_names() and not any(targets):
        below = found.below(base_prefix(model), model.anatomy)
        sites = [placement.site for placement in below.placements(model.anatomy)]
        # fused layers are adapted whole
        if any(site.output_slice is not None for site in sites):
            layers: dict[str, Any] = {"target_modules": names_of(model, sites)}
            for name, among in arguments.subsets.items():
                layers[name] = names_of(model, (site for site in sites if among(below, site)))
            found = found.replace(**layers)
    if stacks:
        found = _in_stacks(model, found, stacks, numbers)
    is_frozen = values.get("inference_mode", False)
    FLAG(arguments.class_name, "inference_mode", is_frozen, False)
    return found, is_frozen


def _task_in(values: Mapping[str, Any]) -> Any:
    """Return the task in the fields of a config of PEFT, as a string; None without one."""
    asked = values.get("task_type")
    return getattr(asked, "value", asked)


def _that_match(
    model: AdaptedModel, fields: dict[str, Any], arguments: PeftArguments
) -> dict[str, Any]:
    """Return the fields without names that match no layer; PEFT ignores them if others match.

    Warns:
        UserWarning: there are such names.
    """
    names: Any = fields.get("target_modules")
    if not _is_list(names):
        return fields
    prefix, every = base_prefix(model), plain_modules(cast("nn.Module", model))
    paths = [in_whole(path, prefix) for path in Targets().paths(model.anatomy)]
    paths += [path for path, _ in every]
    idle = {n for n in names if isinstance(n, str) and not any(is_named(p, n) for p in paths)}
    if not idle or len(idle) == len(names):
        return fields
    warnings.warn(
        f"{arguments.class_name}: no layer matches {listing(sorted(idle))} of target_modules. "
        f"Leave out names that are not in a {class_name(model)}.",
        stacklevel=2,
    )
    lists = {n: fields[n] for n in ("target_modules", *arguments.subsets)}
    kept = {n: [v for v in own if v not in idle] for n, own in lists.items() if _is_list(own)}
    return {**fields, **kept}


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple, set, frozenset))


def _saved(model: AdaptedModel, names: Any, task: str | None) -> Any:
    """Return `modules_to_save` as PEFT completes it for a task, without names of no module."""
    are_names = names is None or (_is_list(names) and all(isinstance(n, str) for n in names))
    if model._has_named_heads or not are_names:
        return names
    every = [*(names or ()), *(_SAVED.get(task or "", ()))]
    paths = [path for path, _ in plain_modules(cast("nn.Module", model))]
    kept = [n for n in every if n not in _ADDED or any(is_named(path, n) for path in paths)]
    return [*dict.fromkeys(kept)] or None


def _in_stacks(model: AdaptedModel, config: AdapterConfig, stacks: Any, numbers: Any) -> Any:
    """Return a config that names its layers with these numbers in `layers_pattern`.

    As in PEFT, a layer named by its whole path is always adapted.

    Raises:
        ConfigError: there is no such layer.
    """
    patterns, prefix = [stacks] if isinstance(stacks, str) else stacks, base_prefix(model)
    expressions = [rf"(?:^|.*?\.){pattern}\.(\d+)\." for pattern in patterns]
    wanted = {numbers} if isinstance(numbers, int) else {*numbers}
    named = config.get("target_modules")
    kept = []
    for placement in config.below(prefix, model.anatomy).placements(model.anatomy):
        path = in_whole(placement.site.path, prefix)
        tried = (re.match(expression, path) for expression in expressions)
        found = next((match for match in tried if match), None)
        # the pattern may have its own groups, and alternatives without a number
        number = None if found is None else found[found.re.groups]
        is_whole = isinstance(named, tuple) and path in named
        kept += [placement.site] if is_whole or (number and int(number) in wanted) else []
    if not kept:
        raise ConfigError(
            f"layers_pattern={stacks!r}, layers_to_transform={numbers!r}: there is no such block. "
            f"Write the last part of one of {listing(model.anatomy.stacks)}, and numbers from 0."
        )
    return config.replace(target_modules=names_of(model, kept))


# --- Names of experts' layers in PEFT's config objects, where transformers 5 has parameters ---


def with_experts(
    model: AdaptedModel, fields: Mapping[str, Any], targets: Any, spelling: PeftSpelling
) -> dict[str, Any]:
    """Return the fields of a config with the former layers of experts as parameters.

    Args:
        model: the model to which the adapter will be added.
        fields: fields of PEFT's config.
        targets: `target_modules` as the user gave it.
        spelling: the method's spelling.

    Raises:
        ConfigError: only some of a parameter's layers are named.
    """
    former, prefix = split_experts(config_of(model).model_type), base_prefix(model)
    names, found = _named(model, targets, former, prefix)
    if not names:
        return dict(fields)
    doubled: dict[str, int] = {}
    for parameter, layers in former.items():
        if missing := [layer for layer in layers if layer not in names]:
            if len(missing) < len(layers):
                shown = targets if isinstance(targets, str) else sorted(targets)
                raise ConfigError(
                    f"target_modules={shown!r} lacks {listing(missing)}, the rest of the experts' "
                    f"{parameter!r}. Write both, or target_parameters=[{parameter!r}]."
                )
        elif len(layers) > 1:
            doubled[rf".*\.{re.escape(parameter)}"] = len(layers)
    taken = {layer for layers in former.values() for layer in layers}
    start = "" if targets == ALL_LINEAR else prefix
    kept = _without(model, fields["target_modules"], taken, start)
    given = fields.get("target_parameters") or ()
    return {
        **fields,
        "target_modules": kept,
        "target_parameters": [*dict.fromkeys((*given, *found))],
        **{
            pattern: {
                **(fields.get(pattern) or {}),
                **{k: n * fields.get(of, spelling.fields[of].default) for k, n in doubled.items()},
            }
            for pattern, of in spelling.patterns.items()
        },
    }


def _without(model: AdaptedModel, targets: Any, taken: set[str], prefix: str) -> Any:
    """Return names, or an expression for paths with the prefix, without layers of some names."""
    if not isinstance(targets, str):
        return sorted(name for name in targets if name.rpartition(".")[2] not in taken)
    layers = [s.path for s in model.anatomy if s.parameter is None]
    own = [path for path in layers if re.fullmatch(targets, f"{prefix}{path}")]
    return exactly(left) if (left := [p for p in own if p.rpartition(".")[2] not in taken]) else []


def _named(
    model: AdaptedModel, targets: Any, former: Mapping[str, tuple[str, ...]], prefix: str
) -> tuple[set[str], list[str]]:
    """Return the former layers that a value of `target_modules` names, and their parameters."""
    every = {layer: parameter for parameter, layers in former.items() for layer in layers}
    if not every or not targets:
        return set(), []
    if targets == ALL_LINEAR:
        return {*every}, [*former]
    if not isinstance(targets, str):
        ends = {str(target).rpartition(".")[2] for target in targets}
        listed = [layer for layer in every if layer in ends]
        return {*listed}, list(dict.fromkeys(every[layer] for layer in listed))
    names: set[str] = set()
    found: dict[str, None] = {}
    for name in model.anatomy.weights():
        for layer, parameter in every.items():
            if name.endswith(f".{parameter}"):
                path = f"{name.removesuffix(parameter)}{layer}"
                if re.fullmatch(targets, f"{prefix}{path}"):
                    names.add(layer)
                    found[name] = None
    return names, [*found]


# --- tensors of adapters under PEFT's keys, without a file ---


def encoded(
    model: AdaptedModel, name: str, with_head: bool | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return PEFT's config and tensors for an adapter; `with_head=None`: with its head, if any."""
    sharding.refuse_if_fixed(model, "Write save_adapter(folder, name).")
    info = ModelInfo(model)
    with_head = has_head(model, name) if with_head is None else with_head
    stored = checkpointing.whole(checkpointing.checkpoint_of(model, name, with_head, None, "peft"))
    return format_of_peft.encoded(formats.exported(stored, info), info)


def has_head(model: AdaptedModel, name: str) -> bool:
    """Return whether an adapter's file has a head: one with its name, or its copy of a static one.

    As in PEFT, files do not hold the head with which a model of `adapterzoo.peft` came.

    Args:
        model: the model with the adapter.
        name: the adapter's name.
    """
    is_of_peft = hasattr(type(model), "_mixin")
    return model._has_named_heads or not is_of_peft or name in model._adapter_state.copies


def encoded_record(
    model: AdaptedModel, name: str, record: AdapterRecord
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return PEFT's config and tensors for an adapter that is not in the model yet.

    Args:
        model: the adapter's model.
        name: the adapter's name.
        record: the adapter's record, with its modules.

    Raises:
        CheckpointError: PEFT has no such adapter.
    """
    records = model._adapter_state.records
    before = dict(records)
    records[name] = record
    try:
        # it gets its head later
        return encoded(model, name, with_head=True)
    finally:
        records.clear()
        records.update(before)


def check_savable(model: AdaptedModel, name: str, record: AdapterRecord) -> None:
    """Check that PEFT's format can express an adapter that is not in the model yet.

    Args:
        model: the model that gets the adapter.
        name: the adapter's name.
        record: the adapter's record, with its modules.

    Raises:
        CheckpointError: it cannot.
    """
    try:
        encoded_record(model, name, record)
    except CheckpointError as error:
        kind = type(record.config).__name__
        raise CheckpointError(
            f"save_pretrained could not write {name!r}: {error} To train it, write "
            f"adapterzoo.{kind}(…), and save_pretrained(folder, format='native')."
        ) from error


def one_name(model: AdaptedModel, name: str | None) -> str:
    """Return the name, or the only active adapter's.

    Raises:
        StateError: not exactly one adapter is active.
    """
    if name is not None:
        return name
    setup = model._active.plan.setup
    names = () if setup is None else setup.flatten()
    if len(names) != 1:
        known = listing(model._adapter_state.records)
        raise StateError(f"{listing(names)} are active. Write one of {known}.")
    return names[0]


def fill(model: AdaptedModel, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Give an adapter, and its head, the values under PEFT's keys; all or nothing.

    Raises:
        CheckpointError: the tensors are not the adapter's.
    """
    refuse_merged(model, name)
    theirs, _ = encoded(model, name)
    stored = format_of_peft.decoded(theirs, tensors, ModelInfo(model))
    adapter, document = stored.adapter, stored.metadata["head"]
    own = dict(modules_of(model, name))
    config = model._adapter_state.find(name).config
    adapter = from_plain(config, adapter, model.anatomy)
    fit.check_fit(type(model).__name__, adapter, named_tensors(own, keep_vars=True), None)
    enter = None
    if document is not None:
        asked = LoadOptions(overwrite_ok=True)
        enter = fitting(model, HeadRecord(document, stored.head), name, asked)
    values = fit.by_path(adapter)
    for path, module in own.items():
        fit.fill(module, values.get(path, {}))
    # an existing head keeps its tensors, which an optimizer may hold
    there = record_of(model, name) if name in saved_names(model) else None
    if there is not None:
        with torch.no_grad():
            for key in stored.head.keys() & there.tensors.keys():
                there.tensors[key].copy_(stored.head[key])
    elif enter is not None:
        enter()


def _of_adapters(model: AdaptedModel) -> set[int]:
    """Return the identities of the tensors of adapters and heads."""
    state = model._adapter_state
    modules: list[Any] = [m for name in state.records for _, m in modules_of(model, name)]
    modules += [m for name in state.records for m in modules_with(model, name)]
    own = {id(t) for m in modules for t in m.state_dict(keep_vars=True).values()}
    return own | {id(p) for p in own_parameters_of(model)}


def trained_tensors(model: AdaptedModel) -> dict[str, Tensor]:
    """Return the tensors that adapters, heads and training may change, each once."""
    own = _of_adapters(model)
    found: dict[int, tuple[str, Tensor]] = {}
    for key, tensor in model.state_dict(keep_vars=True).items():
        if tensor.requires_grad or id(tensor) in own:
            found.setdefault(id(tensor), (key, tensor))
    return dict(found.values())


def trains_base(model: AdaptedModel) -> bool:
    """Return whether any trained parameter belongs to no adapter and no head."""
    own = _of_adapters(model)
    return any(p.requires_grad and id(p) not in own for p in model.parameters())


# --- the methods ---

DEFAULT = "default"
"""PEFT's name for an unnamed adapter."""


_mixin: Any = AdapterModelMixin
_own_add = _mixin.add_adapter


class PeftMethods:
    """PEFT's methods, and the model's methods that also take PEFT's arguments."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @functools.wraps(_own_add)
    def add_adapter(self: Any, *args: Any, **kwargs: Any) -> None:
        """With the config first, as in transformers, also activate and train the adapter."""
        if "peft_config" in kwargs:
            given = kwargs.pop("peft_config")
            kwargs["config"] = one_of(config=kwargs.get("config"), peft_config=given)
        first = kwargs.pop("adapter_config", None)
        if args and is_peft(args[0]):
            first, args = one_of(adapter_config=first, config=args[0]), args[1:]
        if first is not None:
            given = kwargs.pop("adapter_name", None)
            name = one_of(adapter_name=given, name=args[0] if args else None) or DEFAULT
            args = name, first, *args[1:]
        if is_peft(kwargs.get("config", args[1] if len(args) > 1 else None)):
            call = inspect.signature(_own_add).bind(self, *args, **kwargs)
            _add_from_peft(**call.arguments)
        else:
            _own_add(self, *args, **kwargs)
        if first is not None:
            training.train_alone(self, name, unfreezes=not first.inference_mode)

    def add_weighted_adapter(
        self: Any,
        adapters: Sequence[str],
        weights: Sequence[float],
        adapter_name: str,
        combination_type: str | None = None,
        svd_rank: int | None = None,
        svd_clamp: float | None = None,
        svd_full_matrices: bool = False,
        svd_driver: str | None = None,
        density: float | None = None,
        majority_sign_method: str = "total",
        seed: int | None = None,
    ) -> None:
        """Add a combination of adapters as PEFT does: `average_adapter` with unnormalized weights.

        `combination_type` is `combine_strategy` there, but "linear" is PEFT's, "lora_linear_sqrt";
        None is "svd", or "linear" for methods without low-rank factors, such as (IA)³.
        Other arguments and all errors are those of `average_adapter`.

        Differs from PEFT: DoRA's magnitudes are also combined; with `use_rslora` the result is not
        √r times too large; a single adapter is combined as `combination_type` says; a taken name
        is an error; with `rank_pattern` each layer keeps its rank.
        """
        # PEFT's meaning of the word has another name here
        strategy = LINEAR_OF_PEFT if combination_type == "linear" else combination_type or "svd"
        if combination_type is None and not _have_factors(self, adapters):
            strategy = "linear"
        averaging.average(
            self, adapter_name, adapters, weights, strategy, svd_rank=svd_rank, svd_clamp=svd_clamp,
            svd_full_matrices=svd_full_matrices, svd_driver=svd_driver, density=density,
            majority_sign_method=majority_sign_method, seed=seed,
        )  # fmt: skip

    delete_adapter = also_named(adapter_names="adapter_name")(_mixin.delete_adapter)
    merge_adapter = also_named(adapter_names="name")(_mixin.merge_adapter)

    @functools.wraps(AdaptersMethods.supports_adapter)
    def supports_adapter(self: Any, type_or_config: Any) -> bool:
        """Also accept configs of PEFT."""
        if is_peft(type_or_config):
            try:
                type_or_config = from_peft(self, type_or_config)[0]
            except (ConfigError, SiteError):
                return False
        return AdaptersMethods.supports_adapter(self, type_or_config)

    @property
    def active_adapter(self) -> str | list[str] | None:
        """The name of the active adapter; a list if there are several; None without one."""
        setup = self._active.plan.setup
        names = [] if setup is None else list(setup.flatten())
        return names if len(names) > 1 else next(iter(names), None)

    def set_adapter(self, adapter_name: str | Sequence[str], inference_mode: bool = False) -> None:
        """Activate an adapter, or several that act as a stack, and train only these.

        The base model's parameters and the mode of the model do not change. `train_adapter` freezes
        the base model, and gives the adapter its own head.

        Args:
            adapter_name: a name, or a list of names.
            inference_mode: whether no adapter gets gradients.

        Raises:
            UnknownNameError: an adapter is unknown.
            CompositionError: as `set_active_adapters`.
        """
        names = self._adapter_state.find_all(adapter_name)
        set_active(self, names[0] if len(names) == 1 else Stack(*names))
        for name in self._adapter_state.records:
            training.require_grad(self, name, name in names and not inference_mode)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Return a context in which the calling thread uses the base model.

        ```python
        with model.disable_adapter():
            reference = model(**batch).logits
        ```

        Raises:
            StateError: on entering, an adapter is merged.
        """
        _refuse_merged(self)
        with self._active.entered(make_plan(self, None)):
            yield

    def disable_adapters(self) -> None:
        """Deactivate all adapters until `enable_adapters`.

        Raises:
            StateError: the model has no adapters, or one is merged.
        """
        _refuse_merged(self)
        state, plan = self._adapter_state, self._active.default.plan
        if not state.records:
            raise StateError("the model has no adapter. Write add_adapter('a') first.")
        if plan.setup is not None:
            state.disabled = plan.setup, plan.skip_layers
            set_active(self, None)

    def enable_adapters(self) -> None:
        """Reactivate the adapters that `disable_adapters` deactivated.

        Raises:
            StateError: nothing was disabled and nothing is active.
        """
        state = self._adapter_state
        if self._active.default.plan.setup is not None:
            return
        if state.disabled is None or {*state.disabled[0].flatten()} - state.records.keys():
            raise StateError("disable_adapters() was not called. Write set_adapter('a') instead.")
        set_active(self, *state.disabled)
        state.disabled = None

    # PEFT's names
    disable_adapter_layers, enable_adapter_layers = disable_adapters, enable_adapters

    def unmerge_adapter(self) -> None:
        """Same as `reset_adapter`, under PEFT's name."""
        merging.reset(self)

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """Return the numbers of trainable and of all parameters.

        A quantized weight counts as many parameters as before quantization.
        """
        own = [(size_of(p), p.requires_grad) for p in self.parameters()]
        total = sum(n for n, _ in own) + sum(map(uncounted, self.modules()))
        return sum(n for n, is_trained in own if is_trained), total

    def print_trainable_parameters(self) -> None:
        """Print the numbers of trainable and of all parameters, and their ratio in percent."""
        trainable, total = self.get_nb_trainable_parameters()
        print(  # noqa: T201  PEFT's method prints
            f"trainable params: {trainable:,d} || all params: {total:,d} || "
            f"trainable%: {100 * trainable / total:.4f}"
        )

    def get_adapter_state_dict(
        self, adapter_name: str | None = None, state_dict: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return the tensors of an adapter and of its head by their keys in PEFT's files.

        Args:
            adapter_name: the adapter; None: the active one.
            state_dict: must be None: tensors are those of the model.

        Raises:
            CheckpointError: PEFT has no such adapter.
            ConfigError: a `state_dict` is given.
            StateError: no name is given, and not exactly one adapter is active.
            UnknownNameError: the adapter is unknown.
        """
        if state_dict is not None:
            raise ConfigError("state_dict: the tensors are the model's own. Leave it out.")
        return encoded(self, one_name(self, adapter_name))[1]

    def enable_peft_hotswap(
        self,
        target_rank: int = 128,
        check_compiled: Literal["error", "warn", "ignore"] = "error",
    ) -> None:
        """Load adapters with this rank from now on, so that later ones can replace their values.

        Afterwards, `load_adapter` of a name that the model has writes the values in place: see its
        `hotswap`. Methods with a low-rank update get the rank; others keep their sizes.

        Args:
            target_rank: the largest rank of all adapters.
            check_compiled: "error": refuse if the model has adapters; "warn" or "ignore": also give
                these the rank, with or without a warning.

        Raises:
            ConfigError: an argument is not legal, or the rank of an adapter is larger.
            StateError: the model has adapters, or one of them is in use.
        """
        Range(1, MAX_WIDTH)("hotswap", "target_rank", target_rank, 128)
        Choice("error", "warn", "ignore")("hotswap", "check_compiled", check_compiled, "error")
        records = self._adapter_state.records
        if records and check_compiled != "ignore":
            text = (
                f"the sizes of {listing(records)} change, so a compiled model compiles again. "
                f"Write it before the first adapter is loaded, or check_compiled='ignore'."
            )
            if check_compiled == "error":
                raise StateError(text)
            warnings.warn(text, UserWarning, stacklevel=2)
        for name in records:
            hotswap.with_rank(self, name, target_rank)
        for name in tuple(records):
            hotswap.to_rank(self, name, target_rank)
        self._adapter_state.slot_rank = target_rank


def _add_from_peft(
    self: Any, adapter_name: str, config: Any, set_active: bool = False, **given: Any
) -> None:
    """Add an adapter by a config of PEFT."""
    made, is_frozen = from_peft(self, config)
    check = None
    if getattr(self, "_is_saved_for_peft", False):
        check = functools.partial(check_savable, self, adapter_name)
    adapters.add(self, adapter_name, made, active=set_active, check=check, **given)
    if adapter_name not in self._adapter_state.copies and not self._has_named_heads:
        copies.put(self, adapter_name, _head_of(self, config, made))
        replan(self)
    if is_frozen:
        for parameter in parameters_of(self, adapter_name):
            parameter.requires_grad_(False)


def _have_factors(model: AdaptedModel, names: Sequence[str]) -> bool:
    """Return whether any of some adapters has low-rank factors.

    Raises:
        UnknownNameError: an adapter is unknown.
    """
    modules = [module for name in names for _, module in modules_of(model, name)]
    return any(isinstance(part, FactoredAdapter) for each in modules for part in each.modules())


def _head_of(model: AdaptedModel, config: Any, made: AdapterConfig) -> dict[str, nn.Module]:
    """Return the layers of a static head that PEFT copies for an adapter, by path.

    They are the layers of a task's head, and those that `modules_to_save` names.

    Args:
        model: the model with the adapter.
        config: a PEFT config, or its dict.
        made: this library's config for it.
    """
    values = config if isinstance(config, Mapping) else config.to_dict()
    task = _task_in(values)
    if not peft_spellings[made.architecture].has_layers:
        # its files need the head
        task = task or task_of(class_name(model))
    names = made.get("modules_to_save") or ()
    wanted = {p for p in copies.layers_of(model) if task in HEADED or is_saved(p, names)}
    layers = copies.made(model) if wanted else {}
    return {path: layer for path, layer in layers.items() if path in wanted}


def _refuse_merged(model: AdaptedModel) -> None:
    if merged := model._adapter_state.merged:
        raise StateError(f"{are_merged(merged)}. Write unmerge_adapter() first.")
