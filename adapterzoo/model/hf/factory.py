"""Classes of models with adapters, made from transformers' own.

One factory makes both kinds. A class of transformers with adapters keeps its name and its head
(`init`, `load_model`); a class with named heads has a base model of transformers below it
(`AutoAdapterModel`).
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
import re
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from adapterzoo.config import AdapterConfig
from adapterzoo.errors import StateError, naming
from adapterzoo.folders.names import INTERFACE as INTERFACE_FILE
from adapterzoo.inject.adapted import positions_of, set_class
from adapterzoo.inject.tokens import recorded_call
from adapterzoo.model import batches
from adapterzoo.model.adapterhub.config import AdaptersConfig
from adapterzoo.model.batches import RowNames, TaskIds
from adapterzoo.model.fusion import recorded
from adapterzoo.model.heads.forward import label_arguments
from adapterzoo.model.mixin import AdapterModelMixin
from adapterzoo.model.sharding import peft_layer
from adapterzoo.model.state import base_prefix, config_of

from . import adapter_folders, config_entry, guards
from .config_entry import Interface, format_of, restore
from .generation import GeneratesWithAdapters, counting
from .task_classes import HeadTypes

M = TypeVar("M", bound=nn.Module)

# if a family has several language models, prefer the one with the whole base model
_GENERATING = (
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
)

# pipelines that check class names, for tasks of named heads
_PIPELINES = (
    "audio-classification",
    "document-question-answering",
    "image-classification",
    "ner",
    "sentiment-analysis",
    "text-classification",
    "token-classification",
    "video-classification",
)
_GENERATING_PIPELINES = ("image-text-to-text", "text-generation")

# of models with several towers, such as `get_text_features`
_FEATURES = re.compile(r"get_\w+_features")

# of the constructor; `from_pretrained` passes it there
INTERFACE = "adapter_interface"


def own_config(value: Any, memo: dict[int, Any]) -> Any:
    """Copy a config, as labels and adapters are written to it; shared configs stay shared."""
    return copy.deepcopy(value, memo) if isinstance(value, PreTrainedConfig) else value


# --- the factory ---

_classes: dict[tuple[Any, ...], type[nn.Module]] = {}


def class_of(*made_from: Any) -> type[Any]:
    """Return the class made from one of transformers, or from the arguments of `_make_named`."""
    if made_from not in _classes:
        made: Any = (_make_named if len(made_from) > 1 else _make_static)(*made_from)
        made._made_from, made.__reduce_ex__ = made_from, _reduce
        _classes[made_from] = made
    return _classes[made_from]


def _reduce(model: Any, protocol: Any) -> tuple[Any, ...]:
    """Pickle the arguments of the class, from which unpickling makes it again."""
    made_from = vars(type(model)).get("_made_from")
    if made_from is None:
        return cast("tuple[Any, ...]", object.__reduce_ex__(model, protocol))
    return blank, made_from, model.__getstate__()


def blank(*made_from: Any) -> nn.Module:
    """Return an empty model, for copies and pickles, of a class by what it is made from."""
    made: type[nn.Module] = class_of(*made_from)
    return made.__new__(made)


def _make_static(cls: type[nn.Module]) -> type[nn.Module]:
    members: dict[str, Any] = {
        "_plain_class": cls,
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        "forward": with_rows(cls.forward),
        **_features(cls, on_base=False),
    }
    generates = (GeneratesWithAdapters,) if issubclass(cls, GenerationMixin) else ()
    made = type(cls.__name__, (*generates, AdapterModelMixin, cls), members)
    if generates:
        counting(made)

    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        memo: dict[int, Any] = {}
        interface = kwargs.pop(INTERFACE, None)
        args = tuple(own_config(value, memo) for value in args)
        kwargs = {key: own_config(value, memo) for key, value in kwargs.items()}
        cast("Any", super(made, self)).__init__(*args, **kwargs)
        self._start_adapters()
        config_entry.enter_interface(self, config_entry.checked_interface(self, interface))
        restore(self)

    cast("Any", made).__init__ = start
    return made


def _make_named(
    base: type[nn.Module], backbone: type[PreTrainedModel], config_class: type[PreTrainedConfig]
) -> type[nn.Module]:
    """Make the class of models with named heads on a base model.

    Args:
        base: `AdapterModel`.
        backbone: class of the base model.
        config_class: several types of configs may have one base model.
    """
    family: Any = next(
        (c for c in backbone.__mro__[1:] if c.__name__.endswith("PreTrainedModel")), PreTrainedModel
    )
    found = next((table[config_class] for table in _GENERATING if config_class in table), None)
    generating: Any = found[0] if isinstance(found, tuple) else found
    bases: list[type] = [base]
    if generating is not None:
        mixins = [b for b in generating.__bases__ if issubclass(b, GenerationMixin)]
        mixins = [b for b in mixins if not issubclass(b, PreTrainedModel)]
        bases = [GeneratesWithAdapters, *bases, *(mixins or [GenerationMixin])]
    members: dict[str, Any] = {
        "__module__": base.__module__,
        "__doc__": f"A `{backbone.__name__}` with named adapters and named heads.",
        "backbone_class": backbone,
        "head_types": HeadTypes(),
        "input_names": positions_of(backbone.forward),
        "config_class": config_class,
        "base_model_prefix": family.base_model_prefix or "model",
        "_tied_weights_keys": None,
        "forward": _with_signature(base, backbone, generating),
        "load_state_dict": _load_state_dict,
        **_features(backbone, on_base=True),
    }
    name = f"{backbone.__name__.removesuffix('Model')}AdapterModel"
    made = type(name, (*bases, family), members)
    if generating is not None:
        # what the family's language model overrides of generation
        overridable = {*dir(GenerationMixin), "prepare_decoder_input_ids_from_labels"}
        for key, member in vars(generating).items():
            is_method = isinstance(member, types.FunctionType) and not key.startswith("__")
            if is_method and key in overridable:
                setattr(made, key, _of_class(made, member))
        counting(made)
    # late: this import is slow
    from transformers.pipelines.base import SUPPORTED_PEFT_TASKS

    # a pipeline logs an error for a class that is in no table; `AutoModelFor…` does not read this
    for task in (*_PIPELINES, *(() if generating is None else _GENERATING_PIPELINES)):
        SUPPORTED_PEFT_TASKS.setdefault(task, []).append(name)
    return made


# --- their methods ---


def _load_state_dict(self: Any, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Load tensors as `nn.Module.load_state_dict`; keys may lack the prefix of the base model."""
    prefix, mine = base_prefix(self), self.state_dict().keys()
    missing = mine - state_dict.keys()
    # such as those of T5ForConditionalGeneration, which has the parts of a T5Model
    bare = {key for key in state_dict if key not in mine and prefix + key in missing}
    if bare:
        state_dict = {prefix + k if k in bare else k: t for k, t in state_dict.items()}
    return nn.Module.load_state_dict(self, state_dict, *args, **kwargs)


def with_rows(plain: Any, on_base: bool = False, one_head: bool = False) -> Callable[..., Any]:
    """Return a method that also takes `adapter_names` and `task_ids`, which plain does not get.

    Rows are counted, and inputs repeated for `Parallel`, before the plain method runs.

    Args:
        plain: the method of a class of transformers.
        on_base: whether it is a method of the base model's class.
        one_head: whether it does not use heads.
    """
    positions = positions_of(plain)

    @functools.wraps(plain)
    def method(
        self: Any,
        *args: Any,
        adapter_names: RowNames | None = None,
        task_ids: TaskIds | None = None,
        output_adapter_gating_scores: bool | None = None,
        output_adapter_fusion_attentions: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        gates, fusions = output_adapter_gating_scores, output_adapter_fusion_attentions
        if gates or fusions:
            own: Any = {"adapter_names": adapter_names, "task_ids": task_ids}
            run = functools.partial(method, self, *args, **own, **kwargs)
            return recorded(self, run, adapter_names, bool(gates), bool(fusions))
        plan = self._active.plan
        # calls that do not distinguish rows cost only this check
        if adapter_names is not None or task_ids is not None or plan.divides_batch:
            inputs = batches.named_inputs(positions, args, kwargs)
            plan, times = batches.plan_of_call(self, inputs, adapter_names, task_ids, one_head)
            if times > 1:
                args, kwargs = (), batches.repeated(inputs, times, batches.batch_size(inputs))
            with self._active.overridden(plan):
                return method(self, *args, **kwargs)
        if plan.trunk is not None and not plan.trunk.is_started:
            with batches.trunk_started(self, batches.named_inputs(positions, args, kwargs)):
                return method(self, *args, **kwargs)
        model = self.base_model if on_base else self
        if not plan.stacks:
            return plain(model, *args, **kwargs)
        # inner models record their own calls; but if adapters add tokens, inputs of the head, such
        # as labels, must become longer too
        with_head = self._backbone is not self
        if with_head and plan.prompts is None:
            return plain(model, *args, **kwargs)
        call = recorded_call(self, positions, self._active, "", args, kwargs, with_head)
        with call as (given, named):
            return plain(model, *given, **named)

    # Trainer hands on the columns of a dataset that it sees here
    signature, kind = inspect.signature(plain), inspect.Parameter.KEYWORD_ONLY
    own = [inspect.Parameter(n, kind, default=None) for n in ("adapter_names", "task_ids")]
    shown = sorted([*signature.parameters.values(), *own], key=lambda p: p.kind)
    cast("Any", method).__signature__ = signature.replace(parameters=shown)
    return method


def _features(cls: type[nn.Module], on_base: bool) -> dict[str, Any]:
    """Return the methods for the features of one tower of CLIP or the like, with rows."""
    names = (n for n in dir(cls) if _FEATURES.fullmatch(n) and callable(getattr(cls, n)))
    return {name: with_rows(getattr(cls, name), on_base, one_head=True) for name in names}


def _of_class(made: type, function: types.FunctionType) -> types.FunctionType:
    """Return a function whose `super()` refers to a class; decorators around it stay."""
    code, closure = function.__code__, function.__closure__ or ()
    inner = getattr(function, "__wrapped__", None)
    own = None if inner is None else _of_class(made, inner)
    cells = []
    for free, cell in zip(code.co_freevars, closure, strict=True):
        if free == "__class__":
            cell = types.CellType(made)
        elif own is not None and cell.cell_contents is inner:
            cell = types.CellType(own)
        cells.append(cell)
    bound = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )
    bound.__kwdefaults__ = function.__kwdefaults__
    vars(bound).update(vars(function))
    if own is not None:
        vars(bound)["__wrapped__"] = own
    return bound


def _with_signature(
    base: Any, backbone: type[PreTrainedModel], generating: type[PreTrainedModel] | None
) -> Callable[..., Any]:
    """Return a `forward` with the base model's signature, which Trainer and `generate` inspect.

    It has `logits_to_keep` if the family's language model does, so that `generate` requests the
    same logits of both.
    """
    own = inspect.signature(base.forward).parameters
    theirs = inspect.signature(backbone.forward).parameters
    shown = [p for p in theirs.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    shown = [p.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for p in shown]
    # Trainer treats every argument with "label" in its name as required: pass the rarer ones
    # through kwargs
    labels = [
        own["head"].replace(name=name)
        for name in label_arguments()
        if name == "labels" or "label" not in name
    ]
    extra = [own["head"], own["adapter_names"], own["task_ids"], *labels]
    asked = {} if generating is None else inspect.signature(generating.forward).parameters
    if "logits_to_keep" in asked:
        extra.append(own["head"].replace(name="logits_to_keep"))
    extra += [own["return_dict"]] if "return_dict" not in theirs else []
    taken = {p.name for p in shown}
    parameters = [*shown, *(p for p in extra if p.name not in taken), own["kwargs"]]

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return base.forward(self, *args, **kwargs)

    cast("Any", forward).__signature__ = inspect.Signature(parameters)
    return forward


# --- `init` and `load_model`: adapters for models that keep the head of their class ---


def init(
    model: M,
    adapters_config: Mapping[str, AdapterConfig] | None = None,
    interface: Interface = None,
) -> M:
    """Give a model that exists the methods of `AdapterModelMixin`; its head stays as it is.

    A module that is not of transformers takes the methods that act on layers, by the names of
    layers: `LoRAConfig(target_modules=["fc1"])`.

    Python has no type for "this class, and that one too": for type checkers the result is an
    `AdapterModelMixin` and a `PreTrainedModel`, and the argument keeps the type of its class.

    Args:
        model: of transformers, or any module of torch; changed in place. It gets a copy of its
            config.
        adapters_config: adapters to add with fresh parameters: `adapters_config` of another
            model, or names to configs.
        interface: names of its layers, where they are not found; or a folder that holds one.

    Returns:
        The same object.

    Raises:
        ConfigError: the interface does not fit the model.
        StateError: it is not a module of torch, or a scripted one; it has layers of PEFT, is a part
            of a model that has adapters, or was loaded without the adapters that it was saved with.
    """
    with naming(f"init({type(model).__name__})"):
        if isinstance(model, AdapterModelMixin):
            if adapters_config is not None or interface is not None:
                raise StateError("the model has adapters already. Write add_adapter(…).")
            return model
        if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
            raise StateError("not a module whose layers can change. Write init(nn.Module).")
        if guards.guard_of(model) is not None:
            raise StateError("it is a part of a model that has adapters. Write init(…) of that.")
        if (wrapped := peft_layer(model)) is not None:
            raise StateError(f"PEFT has wrapped {wrapped!r}. Call unload() of the PeftModel first.")
        if format_of(vars(config_of(model)).get("adapters")) is not None:
            raise StateError(
                f"its adapters were not loaded. Write load_model(path, {type(model).__name__})."
            )
        given = config_entry.checked_interface(model, interface)
    name = type(model).__name__
    set_class(model, class_of(type(model)))
    memo: dict[int, Any] = {}
    for module in model.modules():
        for key, value in list(vars(module).items()):
            vars(module)[key] = own_config(value, memo)
    made: Any = model
    made._start_adapters()
    config_entry.enter_interface(made, given)
    with naming(f"init({name})"):
        for name, config in (adapters_config or {}).items():
            made.add_adapter(name, config)
        if isinstance(adapters_config, AdaptersConfig):
            for name in adapters_config.fusions:
                fused, names = adapters_config.get_fusion(name)
                made.add_adapter_fusion(names, fused, name)
    return model


def load_model(
    path: str | os.PathLike[str],
    model_class: type[M],
    interface: Interface = None,
    **kwargs: Any,
) -> M:
    """Load a model that was saved with its adapters, or an adapter with its base model.

    Args:
        path: what `save_pretrained` was given; or the folder of an adapter, which becomes active.
        model_class: the transformers class it was saved from, `type(model)`, or `AutoAdapterModel`.
        interface: as in `init`; None: the one that it was saved with.
        **kwargs: as `from_pretrained` takes them.

    Returns:
        A model of that class, as `init` makes it, with the same adapters active.

    Raises:
        StateError: `AutoAdapterModel` takes no interface.
    """
    # a class with named heads finds adapters itself
    finds = getattr(model_class, "_has_named_heads", False) or interface is not None
    if not finds and (adapter := adapter_folders.find(path, kwargs)) is not None:
        load = functools.partial(load_model, model_class=model_class)
        return cast("M", adapter_folders.load(adapter, load, kwargs, has_one_head=True))
    if not issubclass(model_class, PreTrainedModel):
        # a class such as AutoAdapterModel chooses that of the model
        loaded = cast("Any", model_class).from_pretrained(path, **kwargs)
        init(loaded[0] if kwargs.get("output_loading_info") else loaded, interface=interface)
        return cast("M", loaded)
    given = interface
    # a saved model has its interface beside it
    is_path = isinstance(path, (str, os.PathLike))
    if given is None and is_path and (Path(path) / INTERFACE_FILE).is_file():
        given = path
    if given is not None:
        kwargs[INTERFACE] = given
    cls: Any = model_class
    if not issubclass(cls, AdapterModelMixin):
        cls = class_of(cls)
    return cast("M", cls.from_pretrained(path, **kwargs))
