"""`AdapterModelMixin`: all methods of a model with adapters, and how a model gets them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from adapterzoo import inject
from adapterzoo.checkpoint.native import FORMAT
from adapterzoo.composition import from_json, to_json
from adapterzoo.errors import CheckpointError, ConfigError, StateError, listing
from adapterzoo.inject import Adapted, set_class
from adapterzoo.runtime import ActiveState

from . import static_heads
from .averaging import AveragingMixin
from .batching import BatchesContinuously
from .hf.towers import feature_names, with_rows
from .listening import OutputRecorder
from .publishing import PublishingMixin
from .quantised import QuantisedMixin
from .replicas import ReplicasMixin
from .rows import RowNames, RowsMixin, batch_size, named_inputs, repeated
from .summary import SummaryMixin
from .unloading import UnloadingMixin
from .wrapped import peft_layer

M = TypeVar("M", bound=nn.Module)


class AdapterModelMixin(
    UnloadingMixin,
    OutputRecorder,
    PublishingMixin,
    AveragingMixin,
    QuantisedMixin,
    ReplicasMixin,
    RowsMixin,
    SummaryMixin,
):
    """Named adapters for a `PreTrainedModel`; stands before it in the bases of a class."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle by the model's own class where the class was made by `init`."""
        plain = type(self).__dict__.get("_plain_class")
        if plain is None:
            return cast("tuple[Any, ...]", super().__reduce_ex__(protocol))
        return _blank, (plain,), cast("Any", self).__getstate__()

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Save the whole model: base weights, adapters and heads, as transformers does.

        `AutoAdapterModel.from_pretrained` or `load_model` gives it back, with the same adapters
        and heads active.

        Args:
            save_directory: the folder.
            **kwargs: as `PreTrainedModel.save_pretrained` takes them.
        """
        config = cast("Any", self).config
        plan = self._active.default.plan
        vars(config).pop("adapters", None)
        if self._adapter_state.records or self.known_heads():
            config.adapters = {
                "format": FORMAT,
                # a list: JSON keeps its order, transformers sorts the keys of objects
                "adapters": [[name, c.to_dict()] for name, c in self.adapters_config.items()],
                "meta": {
                    name: dict(i.meta) for name, i in self._adapter_state.records.items() if i.meta
                },
                "embeddings": {
                    n: list(t) for n in self._adapter_state.records if (t := self._tables_of(n))
                },
                "merged": list(self._adapter_state.merged),
                "fusions": [
                    [name, list(f.adapters), f.config.to_dict()]
                    for name, f in self._adapter_state.fusions.items()
                ],
                "active": to_json(plan.setup),
                "skip_layers": list(plan.skip_layers),
                "heads": list(plan.heads),
                "static_heads": list(self._adapter_state.copies),
                "known_heads": list(self.known_heads()),
            }
        try:
            cast("Any", super()).save_pretrained(save_directory, **kwargs)
        finally:
            vars(config).pop("adapters", None)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers does it; adapters at the embedding would not fit any more.

        Args:
            *args: as `PreTrainedModel.resize_token_embeddings` takes them.
            **kwargs: the same.

        Raises:
            StateError: an adapter sits at the embedding.
        """
        embedding = cast("Any", self).get_input_embeddings()
        if isinstance(embedding, Adapted):
            raise StateError(
                f"resize_token_embeddings(): the adapters {listing(embedding.adapters)} sit at the "
                f"embedding and have its size. Delete them first: delete_adapter(…)."
            )
        resized = cast("Any", super()).resize_token_embeddings(*args, **kwargs)
        self._adapter_state.anatomy = None
        return resized

    def _restore_adapters(self, quantised: bool = False) -> None:
        """Make the adapters that the config of a saved model lists; their values come later.

        Args:
            quantised: whether layers that shall be quantised are so by now.
        """
        config = cast("Any", self).config
        if getattr(config, "quantization_config", None) is not None and not quantised:
            # its library will replace the layers, and only those of the plain class
            return
        document = vars(config).get("adapters")
        written = _format_of(document)
        if written not in (None, FORMAT):
            raise CheckpointError(
                f"from_pretrained: the adapters in config.json are of the format {written!r}, this "
                f"release reads {FORMAT!r}. Write pip install -U adapterzoo, or take 'adapters' "
                f"out of config.json to load the model without them."
            )
        vars(config).pop("adapters", None)
        if written is None:
            return
        try:
            for name, config in document["adapters"]:
                self.add_adapter(name, config)
            for name, paths in dict(document.get("embeddings", {})).items():
                self._find(name, "config.adapters['embeddings']")
                self._add_table(name, tuple(paths))
            for name, meta in dict(document.get("meta", {})).items():
                known = self._find(name, "config.adapters['meta']")
                self._adapter_state.records[name] = dataclasses.replace(known, meta=dict(meta))
            for name in document["merged"]:
                self._find(name, "config.adapters['merged']")
            self._adapter_state.merged = tuple(document["merged"])
            for name, adapters, config in document.get("fusions", ()):
                self.add_adapter_fusion(
                    adapters, config, name if name != ",".join(adapters) else None
                )
            for owner in document.get("static_heads", ()):
                static_heads.put(self, owner, static_heads.made(self))
            self._active.default.plan = self.make_plan(
                from_json(document["active"]), document["heads"], tuple(document["skip_layers"])
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"from_pretrained: the adapters in config.json cannot be made: {error}. Save the "
                f"model again, or take 'adapters' out of config.json to load it without them."
            ) from error

    @classmethod
    def _load_pretrained_model(cls, model: Any, *args: Any, **kwargs: Any) -> Any:
        """What `from_pretrained` does last: the layers are there, their values come now."""
        model._restore_adapters(quantised=True)
        return cast("Any", super())._load_pretrained_model(model, *args, **kwargs)

    def _replicate_for_data_parallel(self) -> Any:
        replica = cast("Any", super())._replicate_for_data_parallel()
        replica._active = self._active.pinned()
        return replica

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = None, **kwargs: Any
    ) -> None:
        # the backward pass recomputes blocks in threads of its own on CUDA, where the override
        # of the thread that ran the forward is not seen
        func = functools.partial(_pinned, self._active, gradient_checkpointing_func)
        cast("Any", super())._set_gradient_checkpointing(enable, func, **kwargs)


class GeneratesRows(BatchesContinuously):
    """`generate` with `adapter_names`; stands before transformers' own in the bases of a class."""

    def generate(self, *args: Any, adapter_names: RowNames | None = None, **kwargs: Any) -> Any:
        """As `GenerationMixin.generate`, each row with an adapter of its own where names are given.

        Args:
            *args: as `generate` of transformers takes them, the prompt first.
            adapter_names: for each row of the prompt the adapter, or a composition, that acts on
                it, None for the base model; in place of the active ones. Beams and several
                returned sequences of a row take the same.
            **kwargs: as `generate` of transformers takes them.

        Raises:
            CompositionError: the rows do not fit the prompt.
            StateError: an adapter is merged or an `AdapterSetup` holds, and there are names.
            UnknownNameError: there is no adapter of a name.
        """
        model = cast("AdapterModelMixin", self)
        run = cast("Any", super()).generate
        if not model._rows_start(adapter_names):
            with model._active.call.generating():
                return run(*args, **kwargs)
        prompt = args[0] if args else kwargs.get("inputs")
        given = kwargs if prompt is None else {cast("Any", self).main_input_name: prompt, **kwargs}
        copies = _sequences(kwargs, cast("Any", self).generation_config)
        plan, times = model._rows_plan(given, adapter_names, "generate", copies=copies)
        if times > 1:
            batch = batch_size(given)
            args, kwargs = repeated(args, times, batch), repeated(kwargs, times, batch)
        with model._overridden(plan), model._active.call.generating():
            return run(*args, **kwargs)


def _sequences(given: Mapping[str, Any], default: Any) -> int:
    """How many sequences `generate` works on for each row of the prompt."""
    config = given.get("generation_config") or default
    names = ("num_beams", "num_return_sequences")
    return max(given.get(name) or getattr(config, name, None) or 1 for name in names)


class _Started(AdapterModelMixin):
    """Mixed into transformers' own classes, whose constructors know nothing of adapters."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # labels and adapters are entered in the config
        memo: dict[int, Any] = {}
        args = tuple(_with_own_config(value, memo) for value in args)
        kwargs = {key: _with_own_config(value, memo) for key, value in kwargs.items()}
        super().__init__(*args, **kwargs)
        self._start_adapters()
        self._restore_adapters()


def init(model: M) -> M:
    """Give a model that exists the methods of `AdapterModelMixin`; its head stays as it is.

    Args:
        model: any `PreTrainedModel`; changed in place. It gets a copy of its config.

    Returns:
        The same object.

    Raises:
        StateError: it is not a `PreTrainedModel`, has layers of PEFT, is a part of a model that has
            adapters, or was loaded without the adapters that it was saved with.
    """
    if isinstance(model, AdapterModelMixin):
        return model
    if isinstance(model, nn.Module) and (wrapped := peft_layer(model)) is not None:
        raise StateError(
            f"init({type(model).__name__}): PEFT has wrapped its layer {wrapped!r}. Write "
            f"init(…) of the plain model and load PEFT's checkpoint there, "
            f"load_adapter('folder'); or call unload() of the PeftModel first."
        )
    if "base_model_prefix" not in dir(model):
        raise StateError(
            f"init({type(model).__name__}): adapters are named for a transformers PreTrainedModel. "
            f"Write init(AutoModel.from_pretrained(…))."
        )
    if isinstance(model, Adapted):
        raise StateError(
            f"init({type(model).__name__}): it is a part of a model that has adapters. Call the "
            f"methods of that model, or delete its adapters first."
        )
    if _format_of(vars(cast("Any", model).config).get("adapters")) is not None:
        raise StateError(
            f"init({type(model).__name__}): the model was saved with adapters, which plain "
            f"transformers has not loaded. Write load_model(path, {type(model).__name__})."
        )
    set_class(model, with_adapters(type(model)))
    _own_configs(model)
    cast("Any", model)._start_adapters()
    return model


def load_model(path: str | os.PathLike[str], model_class: type[M], **kwargs: Any) -> M:
    """Load a static model that was saved after `init`, with its adapters.

    Args:
        path: what `save_pretrained` was given.
        model_class: the transformers class it was saved from, or `type(model)`.
        **kwargs: as `from_pretrained` takes them.

    Returns:
        A model of that class, as `init` makes it, with the same adapters active.

    Raises:
        ConfigError: it is not a class of models, but one that looks for them.
    """
    if not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
        raise ConfigError(
            f"load_model({str(path)!r}, {model_class!r}): that is no class of models. Write the "
            f"one that config.json has under 'architectures', such as BertForMaskedLM."
        )
    loaded = cast("Any", with_adapters(model_class)).from_pretrained(path, **kwargs)
    return cast("M", loaded)


def _own_configs(model: nn.Module) -> None:
    """Give a model configs that no other one has, those of its modules still the same objects."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for key, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig):
                vars(module)[key] = _with_own_config(value, memo)


def _with_own_config(value: Any, memo: dict[int, Any]) -> Any:
    return copy.deepcopy(value, memo) if isinstance(value, PreTrainedConfig) else value


def _format_of(entry: object) -> str | None:
    """What says that an entry `adapters` of a config is ours; AdapterHub's has no such field."""
    written = entry.get("format") if isinstance(entry, Mapping) else None
    return written if isinstance(written, str) else None


def _pinned(selection: ActiveState, checkpoint: Any, run: Any, *args: Any, **kwargs: Any) -> Any:
    if getattr(checkpoint, "keywords", {}).get("use_reentrant", True):
        args = _differentiable(args)
    resume = selection.resumable()
    if resume is None:
        return checkpoint(run, *args, **kwargs)

    def run_again(*inputs: Any, **named: Any) -> Any:
        with resume():
            return run(*inputs, **named)

    return checkpoint(run_again, *args, **kwargs)


def _differentiable(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inputs of a block, one of them with a gradient.

    The reentrant kind of checkpointing gives a block no gradients where its inputs have none, as
    above a frozen part; transformers sees to that for models of tokens only.
    """
    floating = [i for i, x in enumerate(args) if isinstance(x, Tensor) and x.is_floating_point()]
    if not floating or any(args[i].requires_grad for i in floating) or not torch.is_grad_enabled():
        return args
    first = floating[0]
    return (*args[:first], args[first].detach().requires_grad_(), *args[first + 1 :])


# one subclass for each class of models
_classes: dict[type[nn.Module], type[nn.Module]] = {}


def with_adapters(cls: type[nn.Module]) -> type[nn.Module]:
    """The class with adapters; it keeps its name, which transformers writes to config.json.

    Args:
        cls: a `PreTrainedModel` class; one that has adapters already stays what it is.
    """
    if issubclass(cls, AdapterModelMixin):
        return cls
    if cls not in _classes:
        names: dict[str, Any] = {
            "_plain_class": cls,
            "__module__": cls.__module__,
            "__doc__": cls.__doc__,
        }
        names["forward"] = _with_rows(cls)
        names |= {name: with_rows(cls, name, False) for name in feature_names(cls)}
        generates = (GeneratesRows,) if "generate" in dir(cls) else ()
        _classes[cls] = type(cls.__name__, (*generates, _Started, cls), names)
    return _classes[cls]


def _with_rows(cls: type[nn.Module]) -> Any:
    """The class's forward with `adapter_names`; transformers sees its own arguments only.

    Rows are counted, and the inputs repeated for `Parallel`, before anything runs.
    """
    plain: Any = cls.forward
    positions = inject.positions_of(cls)

    @functools.wraps(plain)
    def forward(
        self: Any,
        *args: Any,
        adapter_names: RowNames | None = None,
        output_adapter_gating_scores: bool | None = None,
        output_adapter_fusion_attentions: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        gates, fused = output_adapter_gating_scores, output_adapter_fusion_attentions
        if gates or fused:
            run = functools.partial(forward, self, *args, adapter_names=adapter_names, **kwargs)
            return self._listening(run, adapter_names, bool(gates), bool(fused))
        # the one look that a model pays for, whatever acts
        rows = self._active.plan.rows
        if adapter_names is None and (rows is None or rows.entered):
            return _run(self, plain, positions, args, kwargs)
        given = named_inputs(positions, args, kwargs)
        plan, times = self._rows_plan(given, adapter_names, "forward")
        if times > 1:
            args, kwargs = (), repeated(given, times, batch_size(given))
        with self._overridden(plan):
            return _run(self, plain, positions, args, kwargs)

    return forward


def _run(
    model: Any,
    forward: Any,
    positions: tuple[str, ...],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """The forward of a model's own class; where it is the base model, the call is recorded."""
    active = model._active
    if not active.plan.stacks or model._backbone is not model:
        return forward(model, *args, **kwargs)
    with inject.recorded(model, positions, active, "", args, kwargs):
        return forward(model, *args, **kwargs)


def _blank(cls: type[nn.Module]) -> nn.Module:
    adapted = with_adapters(cls)
    return adapted.__new__(adapted)
