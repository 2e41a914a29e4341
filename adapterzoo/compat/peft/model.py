"""`PeftModel`: a transformers model with adapters and PEFT's methods."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, cast

import torch
import transformers
from torch import Tensor, nn
from transformers.utils import SAFE_WEIGHTS_NAME
from transformers.utils.hub import PushToHubMixin

from adapterzoo import formats, hub
from adapterzoo.anatomy import in_whole, unwrapped
from adapterzoo.composition import Composition
from adapterzoo.config import change_forms
from adapterzoo.errors import ConfigError, StateError, names_call, unknown_name
from adapterzoo.folders.names import CONFIG
from adapterzoo.folders.reading import read_json
from adapterzoo.formats import files, fit
from adapterzoo.formats import peft as format_of_peft
from adapterzoo.formats.peft.reading import task_of
from adapterzoo.inject.adapted import container_of, set_class
from adapterzoo.inject.building import plain_state
from adapterzoo.inject.layers import ExpertAdapters, packing_of
from adapterzoo.methods._copies import LayerCopy, OwnBias, TokenRows
from adapterzoo.model import (
    AdapterModelMixin,
    adapters,
    checkpointing,
    conversion,
    init,
    merging,
    sharding,
    training,
)
from adapterzoo.model.activation import refuse_merged
from adapterzoo.model.conversion import Size
from adapterzoo.model.hf import adapter_folders, owned
from adapterzoo.model.hf.factory import blank
from adapterzoo.model.hf.guards import is_untrained
from adapterzoo.model.hf.info import ModelInfo, name_of
from adapterzoo.model.hf.init_data import InitData, collected
from adapterzoo.model.state import AdaptedModel, base_prefix, dtype_of, modules_of, parameters_of
from adapterzoo.patterns import around

from . import layers, saving, standins, status
from .arguments import also_named, is_peft
from .classes import PeftConfig, from_values, plain_value
from .methods import (
    DEFAULT,
    encoded,
    encoded_record,
    fill,
    has_head,
    one_name,
    trained_tensors,
    trains_base,
)
from .saving import configs_of, embedding_tensors, keep, with_values

# arguments with which accelerate places a model
_PLACING = frozenset(
    ("device_map", "max_memory", "offload_buffers", "offload_dir", "offload_folder",
     "offload_index", "use_safetensors")
)  # fmt: skip


class ActiveAdapters(list[str]):
    """The names of the active adapters; PEFT has a list, and transformers a method.

    Attributes:
        setup: their composition.
    """

    def __init__(self, setup: Composition | None, disabled: Sequence[str] = ()) -> None:
        """List the adapters of a composition.

        Args:
            setup: the composition; None if none is active.
            disabled: the names to list in that case.
        """
        super().__init__(disabled if setup is None else setup.flatten())
        self.setup = setup

    def __call__(self) -> list[str]:
        """Return the names."""
        return list(self)

    def __eq__(self, other: object) -> bool:
        """Compare with a list of names, or with a composition."""
        return self.setup == other if isinstance(other, Composition) else super().__eq__(other)

    __hash__ = None


class InjectedModel:
    """Mixin of models to which PEFT's functions add adapters; `save_pretrained` stays their own.

    Besides these methods a model has those of its class and of `AdapterModelMixin`.
    """

    # the class of the model without a mixin of this file, and the mixin
    _unmixed: ClassVar[type[Any]]
    _mixin: ClassVar[type[Any]]

    @property
    def peft_config(self) -> dict[str, PeftConfig]:
        """The adapters' names → PEFT's configs; changes to a config are saved with it.

        Deleting it deletes the adapters; frameworks remove PEFT's layers in this way.
        """
        return configs_of(self)

    @peft_config.deleter
    def peft_config(self) -> None:
        """Make the model plain; weights with merged adapters stay."""
        own = cast("Any", self)
        layers.put_back(own)
        if own._adapter_state.merged:
            _plainly(own, "merge_and_unload", [])
        else:
            _plainly(own, "unload")

    @property
    def active_adapters(self) -> ActiveAdapters:
        """The names of the active adapters; assign a composition, or a name, to activate it."""
        own = cast("Any", self)
        setup, default = own._active.plan.setup, own._active.default.plan.setup
        disabled = layers.disabled_in(own._adapter_state) if default is None else ()
        return ActiveAdapters(setup, disabled)

    @active_adapters.setter
    def active_adapters(self, setup: Any) -> None:
        cast("Any", self).set_active_adapters(getattr(setup, "setup", setup))

    @also_named(adapter_names="adapter_name")
    def delete_adapter(self, adapter_name: str | Sequence[str]) -> None:
        """Delete adapters; if none is active then, activate the first remaining one, as in PEFT.

        Args:
            adapter_name: a name, or several.

        Raises:
            StateError: an adapter is in use.
            UnknownNameError: an adapter is unknown.
        """
        own = cast("Any", self)
        was_active = own._active.plan.setup is not None
        cast("Any", AdapterModelMixin).delete_adapter(self, adapter_name)
        configs_of(self)
        if was_active and own._active.plan.setup is None and own.adapters_config:
            name = min(own.adapters_config)
            warnings.warn(f"{adapter_name!r} was active; {name!r} is active now.", stacklevel=3)
            training.train_alone(self, name, unfreezes=True)

    def unload(self, *args: Any, **kwargs: Any) -> Any:
        """Return the plain model; the arguments are those of `AdapterModelMixin.unload`.

        Args:
            *args: passed on.
            **kwargs: passed on.
        """
        return _plainly(self, "unload", *args, **kwargs)

    def merge_and_unload(
        self,
        progressbar: bool = False,
        safe_merge: bool = True,
        adapter_names: Sequence[str] | None = None,
    ) -> Any:
        """Merge adapters, and return the plain model.

        Args:
            progressbar: has no effect, since a merge takes one product per layer.
            safe_merge: PEFT's switch; weights that are not finite are always refused.
            adapter_names: None: the active ones.

        Raises:
            StateError: as `AdapterModelMixin.merge_and_unload`.
        """
        return _plainly(self, "merge_and_unload", adapter_names)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle and copy the model by the ingredients of its class."""
        made_from = vars(self._unmixed).get("_made_from", ())
        return _again, (self._mixin, *made_from), cast("Any", self).__getstate__()


class _Wrapper:
    """PEFT's wrapper of a module, with a part `model`; here `model` is the whole module."""

    def __init__(self, model: nn.Module) -> None:
        vars(self)["model"] = model

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the module, for `isinstance`."""
        return type(self.model)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["model"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.model, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


class PeftModel(InjectedModel, metaclass=standins.ModelType):
    """Mixin of models that `get_peft_model` returns; only the adapters are saved, in PEFT's format.

    Besides these methods a model has those of its class and of `AdapterModelMixin`.
    """

    # by this, transformers asks whether a quantized model has something to train
    _hf_peft_config_loaded = True
    _is_saved_for_peft = True

    @staticmethod
    def _called(*args: Any, **kwargs: Any) -> Any:
        return get_peft_model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Find what PEFT's wrappers hold: `base_model`, and `model` in that, are the model."""
        try:
            return cast("Any", super()).__getattr__(name)
        except AttributeError:
            if name not in ("base_model", "model"):
                raise
        own: Any = self
        return _Wrapper(own) if name == "base_model" and "model" in own._modules else self

    @classmethod
    def from_pretrained(
        cls,
        model: nn.Module,
        model_id: str | os.PathLike[str],
        adapter_name: str = DEFAULT,
        is_trainable: bool = False,
        config: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Load an adapter into a model, which is changed in place.

        Args:
            model: a transformers model, any other module, or one with adapters.
            model_id: a folder, in any format, or `user/repository` on the Hub.
            adapter_name: the name to give it.
            is_trainable: True: train the adapter; False: only use it.
            config: PEFT's config, instead of the folder's.
            **kwargs: as `load_adapter` takes them.

        Returns:
            The same object.

        Raises:
            CheckpointError: the adapter does not fit the model; the model then has no adapter.
            ConfigError: an argument is invalid.
        """
        with plain_on_error(model):
            made = as_peft(model)
            made.load_adapter(model_id, adapter_name, is_trainable, config=config, **kwargs)
        saving.set_mode(made, adapter_name, is_trainable)
        if not is_trainable:
            made.eval()
            made.requires_grad_(False)
        return made

    def add_adapter(self, *args: Any, autocast_adapter_dtype: bool = True, **kwargs: Any) -> None:
        """Add an adapter: `AdapterModelMixin.add_adapter` with parameters in float32.

        Args:
            *args: as in `add_adapter`.
            autocast_adapter_dtype: as in `get_peft_model`.
            **kwargs: as in `add_adapter`, and `low_cpu_mem_usage`, as in `get_peft_model`.

        Raises:
            CheckpointError: PEFT's format cannot express the adapter that a PEFT config gives here.
            ConfigError: a value of the config has no meaning here.
        """
        on_meta = kwargs.pop("low_cpu_mem_usage", False)
        for value in (*args, *kwargs.values()):
            runtime = getattr(value, "runtime_config", None)
            _refuse_offload(getattr(runtime, "ephemeral_gpu_offload", False))
        mixin, own = cast("Any", AdapterModelMixin), cast("Any", self)
        before = {*own.adapters_config}
        mixin.add_adapter(self, *args, autocast_adapter_dtype=autocast_adapter_dtype, **kwargs)
        given = next((v for v in (*args, *kwargs.values()) if hasattr(v, "to_dict")), None)
        for name in {*own.adapters_config} - before:
            if is_peft(given) and not isinstance(given, Mapping):
                keep(own, name, given)
            if on_meta:
                _to_meta(own, name)
            if name not in self.active_adapters:
                for parameter in parameters_of(own, name):
                    parameter.requires_grad_(False)

    @names_call
    def load_adapter(
        self,
        model_id: str | os.PathLike[str],
        adapter_name: str,
        is_trainable: bool = False,
        torch_device: torch.device | str | None = None,
        autocast_adapter_dtype: bool = True,
        ephemeral_gpu_offload: bool = False,
        low_cpu_mem_usage: bool = False,
        key_mapping: Mapping[str, str] | None = None,
        *,
        config: Any = None,
        **kwargs: Any,
    ) -> LoadResult:
        """Load an adapter; the first one of the model becomes active.

        Args:
            model_id: a folder, or a name on the Hub; `subfolder` is a part of it.
            adapter_name: the name to give it; an adapter of this name is replaced.
            is_trainable: whether its parameters get gradients.
            torch_device: has no effect: tensors are read on the CPU and go to the devices of the
                layers.
            autocast_adapter_dtype: whether parameters in half precision are converted to float32,
                as in `get_peft_model`.
            ephemeral_gpu_offload: must be False.
            low_cpu_mem_usage: has no effect, since an adapter from a file is never initialized
                first.
            key_mapping: regular expressions for PEFT's keys in the file → what to write instead.
            config: PEFT's config, instead of the folder's.
            **kwargs: as for `AdapterModelMixin.load_adapter`; `torch_dtype` is `dtype`. The
                arguments for accelerate's placement (`device_map`, `max_memory`, `offload_dir`, …)
                have no effect, since an adapter is placed with its layers.

        Returns:
            Two empty lists, since a mismatch is an error.

        Raises:
            CheckpointError: the adapter does not fit the model.
            ConfigError: an argument is invalid.
        """
        _refuse_offload(ephemeral_gpu_offload)
        below = kwargs.pop("subfolder", None)
        path = model_id if below is None else Path(model_id, below)
        path, fingerprint = hub.pinned(path)
        folder = hub.resolve(path, **{n: kwargs.pop(n) for n in hub.OPTIONS if n in kwargs})
        kwargs = {n: value for n, value in kwargs.items() if n not in _PLACING}
        if "torch_dtype" in kwargs:
            kwargs["dtype"] = kwargs.pop("torch_dtype")
        mixin, own = cast("Any", AdapterModelMixin), cast("Any", self)
        old = own._adapter_state.records.get(adapter_name)
        with saving.changed(folder, config, key_mapping) as changed:
            mixin.load_adapter(
                self, changed, adapter_name=adapter_name, is_trainable=is_trainable,
                **{"overwrite_ok": True, "fingerprint": fingerprint, **kwargs},
            )  # fmt: skip
        if config is not None:
            keep(own, adapter_name, config)
        # a hotswap keeps the places, and the slot's dtype
        is_new = old is None or own._adapter_state.records[adapter_name].places is not old.places
        if autocast_adapter_dtype and is_new:
            _to_float32(own, adapter_name)
        return LoadResult([], [])

    @names_call
    def set_adapter(self, adapter_name: str | Sequence[str], inference_mode: bool = False) -> None:
        """Activate an adapter, or several, and train only these, with their own heads.

        Args:
            adapter_name: a name, or a list of names.
            inference_mode: whether to train nothing.

        Raises:
            UnknownNameError: an adapter is unknown.
        """
        names = cast("Any", self)._adapter_state.find_all(adapter_name)
        own = (p for name in names for p in parameters_of(cast("Any", self), name))
        # a reference model for a Trainer's loss must not be trained
        if inference_mode or is_untrained(self, own):
            cast("Any", AdapterModelMixin).set_adapter(self, names, inference_mode=True)
        else:
            training.train_alone(self, names if len(names) > 1 else names[0], unfreezes=True)

    def merge_adapter(
        self, adapter_names: str | Sequence[str] | None = None, safe_merge: bool = True
    ) -> None:
        """Merge adapters into the base weights; merged ones stay merged, as in PEFT.

        Args:
            adapter_names: names, in the order in which they act; None: the active ones.
            safe_merge: has no effect: weights that are not finite are always refused.

        Raises:
            StateError: as `AdapterModelMixin.merge_adapter`.
            UnknownNameError: an adapter is unknown.

        Warns:
            UserWarning: some are already merged.
        """
        own, mixin = cast("Any", self), cast("Any", AdapterModelMixin)
        active = own._active.default.plan.setup
        asked = adapter_names or ([] if active is None else [*active.flatten()])
        names = own._adapter_state.find_all(asked)
        if done := [name for name in names if name in own._adapter_state.merged]:
            warnings.warn(f"{done} are already merged, and stay so.", stacklevel=2)
        if rest := [name for name in names if name not in done]:
            mixin.merge_adapter(self, rest if adapter_names else None, safe_merge)

    @names_call
    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        safe_serialization: bool = True,
        selected_adapters: Sequence[str] | None = None,
        save_embedding_layers: str | bool = "auto",
        is_main_process: bool = True,
        **kwargs: Any,
    ) -> None:
        """Save adapters in PEFT's format: "default" in the folder, others in sub-folders.

        If PEFT's format cannot express one of them, none is written. A model card, `README.md`, is
        written or completed.

        Args:
            save_directory: the folder; created if missing.
            safe_serialization: True: write safetensors; False: a pickle.
            selected_adapters: names; None: all.
            save_embedding_layers: whether to save the token tables too; "auto": if the vocabulary
                has another size than in the checkpoint of the base model.
            is_main_process: whether this process writes the files.
            **kwargs: `format` of the files, "peft" if not given; `with_head`, whether heads are
                saved, None: those that adapters have of their own; `state_dict` of the whole model,
                whose values the files get; None: those that the model has. In a trainer's
                `checkpoint-<step>` all trained tensors are also written to `model.safetensors`;
                after `install()`, when a trainer reads the files of adapters, only if the base
                model is trained too.

        Raises:
            CheckpointError: PEFT has no such adapter, or the folder cannot be written.
            ConfigError: an argument has no meaning here.
            UnknownNameError: an adapter is unknown.
        """
        given = kwargs.pop("state_dict", sentinel := object())
        of_trainer, values = given is None, None if given is sentinel else given
        format, with_head = kwargs.pop("format", "peft"), kwargs.pop("with_head", None)
        if kwargs:
            raise ConfigError(f"{next(iter(kwargs))}=…: there is no such option. Leave it out.")
        known = [*self.adapters_config]
        names = known if selected_adapters is None else list(selected_adapters)
        for name in names:
            if name not in known:
                raise unknown_name("", "adapter", name, known)
        own = cast("Any", self)
        heads = {n: has_head(own, n) if with_head is None else with_head for n in names}
        for name in names if len(names) > 1 else ():
            _check_saving(own, name, format, heads[name])
        is_sharded = bool(sharding.groups_of(self))
        # the tensors of a split model are gathered in all processes
        is_split = sharding.split_over(self) is not None
        is_peft_format = format == "peft" and (is_split or not is_sharded)
        tables = embedding_tensors(own, save_embedding_layers) if is_peft_format else {}
        tables = sharding.gathered(tables)
        if is_split and is_peft_format:
            # created in all processes, and kept for the one that writes
            saving.configs_of(own)
        for name in names if is_main_process or is_split else ():
            folder = Path(save_directory, "" if name == DEFAULT else name)
            with with_values(own, name, None if is_sharded else values):
                self.save_adapter(folder, name, with_head=heads[name], format=format)
            if is_peft_format:
                finish = functools.partial(
                    saving.finish, own, name, folder, tables, safe_serialization
                )
                sharding.in_first_process(self, finish)
        if (is_main_process or is_split) and is_peft_format:
            card = functools.partial(saving.write_card, own, Path(save_directory))
            sharding.in_first_process(self, card)
        # `Trainer` reads `model.safetensors` for models that are not of PEFT's class, in preference
        # to all others if it exists; a trainer of sharded models has its own files
        folder = Path(save_directory)
        is_step = re.fullmatch(r"checkpoint-\d+", folder.name) is not None
        is_ours = of_trainer and is_main_process and is_step and not is_sharded
        if is_ours and (trains_base(own) or not _trainers_know_models()):
            trained = trained_tensors(own)
            files.write_tensors(folder / SAFE_WEIGHTS_NAME, {}, trained)

    def load_state_dict(
        self, state_dict: Mapping[str, torch.Tensor], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load tensors as `nn.Module.load_state_dict` does, or those of a trainer's checkpoint.

        Args:
            state_dict: state dict of the whole model; or, if not `strict`, of a trainer's
                checkpoint.
            strict: whether all of the model's keys are required.
            assign: whether the tensors become the parameters.

        Raises:
            CheckpointError: a checkpoint does not fit; then nothing has changed.
        """
        own = cast("Any", self)
        mine = trained_tensors(own)
        is_whole = any(k in state_dict for k in own.state_dict(keep_vars=True) if k not in mine)
        if strict or is_whole:
            return cast("Any", super()).load_state_dict(state_dict, strict=strict, assign=assign)
        fit.check_fit(type(self).__name__, state_dict, mine, None)
        with torch.no_grad():
            for key, tensor in mine.items():
                tensor.copy_(state_dict[key])
        return LoadResult([], [])

    @property
    def active_peft_config(self) -> PeftConfig:
        """The config of the active adapter.

        Raises:
            CheckpointError: PEFT's format cannot express the adapter.
            StateError: not exactly one adapter is active.
        """
        return saving.config_of_adapter(self, one_name(cast("Any", self), None))

    @property
    def has_active_enabled_adapter(self) -> bool:
        """Whether any adapter acts in this thread."""
        return cast("Any", self)._active.plan.setup is not None

    @property
    def prefix(self) -> str:
        """The common part of the names of the active adapter's parameters, such as "loras.".

        Raises:
            StateError: not exactly one adapter is active.
        """
        own = cast("Any", self)
        modules = modules_of(own, one_name(own, None))
        return f"{container_of(next(module for _, module in modules))}."

    @property
    def modules_to_save(self) -> set[str] | None:
        """The names in `modules_to_save` of the active adapter's config; None without any."""
        names = getattr(self.active_peft_config, "modules_to_save", None)
        return {*names} if names else None

    @property
    def base_model_torch_dtype(self) -> torch.dtype:
        """The dtype of the base model."""
        return dtype_of(self)

    @property
    def prompt_encoder(self) -> nn.ModuleDict:
        """The trained modules of each adapter that adds tokens, or keys and values, by name."""
        found = {
            name: nn.ModuleList(dict.fromkeys(m for _, m in modules_of(cast("Any", self), name)))
            for name, config in self.peft_config.items()
            if getattr(config, "is_prompt_learning", False)
        }
        if not found:
            raise AttributeError("prompt_encoder")
        return nn.ModuleDict(found)

    def supports_lora_conversion(self, adapter_name: str = DEFAULT) -> bool:
        """Return whether `convert_to_lora` accepts an adapter: whether it is a change of weights.

        Args:
            adapter_name: the adapter.

        Raises:
            UnknownNameError: the adapter is unknown.
        """
        own = cast("Any", self)
        own._adapter_state.find(adapter_name)
        try:
            conversion.refuse_other(own, adapter_name)
        except StateError:
            return False
        return True

    @property
    def targeted_module_names(self) -> list[str]:
        """The paths of the layers with adapters, adapter by adapter, without copies."""
        return list(dict.fromkeys(name for name, parameter in self._targets() if not parameter))

    @property
    def targeted_parameter_names(self) -> list[str]:
        """The paths of the parameters with their own adapters, adapter by adapter."""
        names = (f"{name}.{parameter}" for name, parameter in self._targets() if parameter)
        return list(dict.fromkeys(names))

    def _targets(self) -> Iterator[tuple[str, str]]:
        """Yield the path of each adapted layer, and of its parameter if only that is adapted."""
        own = cast("Any", self)
        prefix = base_prefix(own)
        for name in own.adapters_config:
            for path, module in own.adapter_modules(name):
                if not isinstance(module, (LayerCopy, OwnBias, TokenRows)):
                    parts = module._modules if isinstance(module, ExpertAdapters) else ("",)
                    yield from ((in_whole(path, prefix), part) for part in parts)

    def set_requires_grad(
        self, adapter_names: str | Sequence[str], requires_grad: bool = True
    ) -> None:
        """Set whether the parameters of adapters get gradients; this does not activate them.

        Args:
            adapter_names: a name, or several.
            requires_grad: whether they get gradients.

        Raises:
            UnknownNameError: an adapter is unknown.
        """
        for name in cast("Any", self)._adapter_state.find_all(adapter_names):
            for parameter in parameters_of(cast("Any", self), name):
                parameter.requires_grad_(requires_grad)

    def get_layer_status(self) -> Any:
        """Return the adapters of each layer: `get_layer_status(model)`."""
        return status.get_layer_status(cast("Any", self))

    def get_model_status(self) -> Any:
        """Return the adapters of the model: `get_model_status(model)`."""
        return status.get_model_status(self)

    @contextlib.contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Return a context that uses the base model; merged adapters are unmerged in it."""
        own = cast("Any", self)
        merged = own._adapter_state.merged
        if merged:
            merging.reset(own)
        try:
            with cast("Any", AdapterModelMixin).disable_adapter(self):
                yield
        finally:
            if merged:
                own.merge_adapter(list(merged))

    def prepare_model_for_gradient_checkpointing(self, model: Any = None) -> Any:
        """Make gradients reach adapters through frozen embeddings, and return the model.

        Args:
            model: the model with the embeddings; None: this one.
        """
        own = self if model is None else model
        if hasattr(own, "enable_input_require_grads"):
            own.enable_input_require_grads()
        return own

    def create_or_update_model_card(self, output_dir: str | os.PathLike[str]) -> None:
        """Write `README.md`, or complete the metadata of an existing one.

        Args:
            output_dir: folder of the card.
        """
        saving.write_card(self, Path(output_dir))

    def get_base_model(self) -> Self:
        """Return the model itself: it is not wrapped."""
        return self


def _refuse_offload(ephemeral_gpu_offload: bool) -> None:
    if ephemeral_gpu_offload:
        raise ConfigError("ephemeral_gpu_offload=True: layers stay on their devices. Leave it out.")


def _to_meta(model: Any, name: str) -> None:
    """Drop the values of an adapter; its parameters stay, on the meta device."""
    for _, module in modules_of(model, name):
        module.to("meta")


def _targets_in(model: nn.Module, tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the paths of the layers to which the tensors of an adapter belong."""
    there = {path for path, _ in model.named_modules() if path}
    keys = (key.removeprefix("base_model.model.") for key in tensors)
    found = ([path for path in around(key) if path in there] for key in keys)
    return sorted({max(paths, key=len) for paths in found if paths})


@contextlib.contextmanager
def plain_on_error(model: Any) -> Iterator[None]:
    """If the block raises, make a model that had no adapters plain again."""
    was_plain = not isinstance(model, AdapterModelMixin)
    try:
        yield
    except BaseException:
        if was_plain and isinstance(model, AdapterModelMixin):
            model.unload()
        raise


def as_peft(model: Any, mixin: Any = PeftModel) -> Any:
    """Give a model the methods of a mixin; all mixins have those of `InjectedModel`."""
    if not isinstance(model, AdapterModelMixin):
        init(model)
    there = vars(type(model)).get("_mixin")
    if there is not mixin and (there is None or mixin is not InjectedModel):
        plain: Any = type(model) if there is None else cast("Any", model)._unmixed
        set_class(model, _class_of(plain, mixin))
        for each in mixin.__mro__[:-1]:
            owned.own(model, each, *([owned.WHOLE] if each is PeftModel else []))
    return model


def _check_saving(model: AdaptedModel, name: str, format: str, with_head: bool) -> None:
    """Check that a format can express an adapter, before the first of several is written.

    Raises:
        CheckpointError: the format cannot express it.
    """
    # the native format can express everything
    if format != "native":
        stored = checkpointing.checkpoint_of(model, name, with_head, None, format)
        checkpointing.refuse_sharded(model, format)
        formats.encoded(stored, "adapter", format, ModelInfo(model))


def _to_float32(model: AdaptedModel, name: str) -> None:
    """Convert the parameters of a loaded adapter as `autocast_adapter_dtype` does in `add`."""
    before = model._adapter_state.find(name).config
    config = adapters.in_float32(model, before)
    if config == before:
        return
    made = adapters.make(model, config, torch.device("meta"))
    modules = dict(modules_of(model, name))
    for path, like in made.coming.items():
        for find in (nn.Module.named_parameters, nn.Module.named_buffers):
            own = dict(find(modules[path]))
            for key, tensor in find(like):
                own[key].data = own[key].data.to(tensor.dtype)
    adapters.set_config(model, name, made)


def _trainers_know_models() -> bool:
    """Return whether `Trainer` compares with `PeftModel`, and so reads the files of adapters."""
    modules = (sys.modules.get(f"transformers.{name}") for name in ("trainer_utils", "trainer"))
    return any(getattr(module, "PeftModel", None) is PeftModel for module in modules)


class _MixedType(standins.ModelType):
    """The type of the model classes; calling one creates a model."""

    __call__ = type.__call__


@functools.cache
def _class_of(cls: Any, mixin: Any) -> type[Any]:
    """Return the class with the methods of a mixin; it keeps its name."""
    members = {
        "__module__": cls.__module__, "__doc__": cls.__doc__, "_unmixed": cls, "_mixin": mixin,
    }  # fmt: skip
    more = () if hasattr(cls, "push_to_hub") else (PushToHubMixin,)
    return _MixedType(cls.__name__, (mixin, cls, *more), members)


def _plainly(model: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of a model without its mixin; only its transformers class may remain."""
    mixed: Any = type(model)
    set_class(model, mixed._unmixed)
    try:
        return getattr(model, method)(*args, **kwargs)
    finally:
        if isinstance(model, AdapterModelMixin):
            set_class(cast("Any", model), mixed)
        else:
            vars(model).pop("_peft_configs", None)


def _again(mixin: Any, *made_from: Any) -> Any:
    """Return an empty model with a mixin, for copies and pickles."""
    made: Any = type(blank(*made_from))
    cls: Any = _class_of(made, mixin)
    return cls.__new__(cls)


# --- PEFT's functions that add an adapter to a transformers model ---


@names_call
def get_peft_model(
    model: nn.Module,
    peft_config: Any,
    adapter_name: str = DEFAULT,
    mixed: bool = False,
    autocast_adapter_dtype: bool = True,
    revision: str | None = None,
    low_cpu_mem_usage: bool = False,
    init_data: InitData = None,
) -> Any:
    """Add an adapter to a model, which is changed in place, and train it.

    Args:
        model: a transformers model or any other module; its mode does not change.
        peft_config: a config of PEFT, or of this library. As in PEFT it gets the name of the model.
        adapter_name: the name to give it; an adapter of this name is replaced, with a warning.
        mixed: whether `isinstance(model, PeftMixedModel)` is true. Adapters of different methods
            can always be active together.
        revision: revision of the base model, written to the file.
        autocast_adapter_dtype: whether the adapter has float32 parameters over layers in half
            precision, unless its config has a `dtype`. Copies of layers keep their dtype.
        low_cpu_mem_usage: whether to leave the parameters on the meta device, without values, for
            `set_peft_model_state_dict(…, low_cpu_mem_usage=True)`.
        init_data: batches, each with the arguments of a call, for `init_lora_weights="eva"` and
            "corda", which PEFT takes in separate functions; or the weights before quantization
            for "loftq", see `add_adapter`.

    Returns:
        The same object.

    Raises:
        CheckpointError: PEFT's format cannot express what a PEFT config gives in this model.
        ConfigError: a value of the config has no meaning here, or initial values need data.
        StateError: the model has PEFT's layers instead of this library's adapters.
    """
    if peft_config is None:
        raise ConfigError("peft_config=None: no config given. Write LoraConfig(r=8).")
    if is_peft(peft_config) and not isinstance(peft_config, Mapping):
        peft_config.base_model_name_or_path = name_of(model)
        peft_config.revision = revision or peft_config.revision
    with plain_on_error(model):
        made = as_peft(model)
        is_known = adapter_name in made.adapters_config
        if is_known:
            warnings.warn(f"{adapter_name!r} is replaced by a new adapter.", stacklevel=3)
        made.add_adapter(
            adapter_name, peft_config, overwrite_ok=is_known, init_data=init_data,
            autocast_adapter_dtype=autocast_adapter_dtype, low_cpu_mem_usage=low_cpu_mem_usage,
        )  # fmt: skip
    vars(made)["_is_mixed"] = mixed
    training.train_alone(made, adapter_name, not getattr(peft_config, "inference_mode", False))
    return made


@names_call
def inject_adapter_in_model(
    peft_config: Any,
    model: nn.Module,
    adapter_name: str = DEFAULT,
    low_cpu_mem_usage: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
) -> Any:
    """Add an adapter to a model, which keeps its own `save_pretrained`.

    Args:
        peft_config: a config of PEFT.
        model: the model; changed in place.
        adapter_name: the name to give it.
        low_cpu_mem_usage: as in `get_peft_model`.
        state_dict: the adapter's state dict, by PEFT's keys; the layers are those that it names,
            whatever the config says.

    Returns:
        The same object.

    Raises:
        ConfigError: a value of the config has no meaning here.
    """
    if state_dict is not None:
        named = {"target_modules": _targets_in(model, state_dict)}
        if hasattr(peft_config, "feedforward_modules"):
            # IA3 scales the input there
            rows = {key: tensor for key, tensor in state_dict.items() if len(tensor) == 1}
            named["feedforward_modules"] = _targets_in(model, rows)
        peft_config = dataclasses.replace(peft_config, **named)
    with plain_on_error(model):
        made = as_peft(model, InjectedModel)
        made.add_adapter(peft_config, adapter_name=adapter_name, autocast_adapter_dtype=True)
        if low_cpu_mem_usage:
            _to_meta(made, adapter_name)
    return made


# --- PEFT's functions besides `get_peft_model` ---


class LoadResult(NamedTuple):
    """Mismatches of loaded keys; always empty for an adapter, since a difference is an error."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@names_call
def get_peft_model_state_dict(
    model: Any,
    state_dict: Mapping[str, Tensor] | None = None,
    adapter_name: str = DEFAULT,
    unwrap_compiled: bool = False,
    save_embedding_layers: str | bool = "auto",
) -> dict[str, Tensor]:
    """Return the tensors of an adapter, and of its head, by their keys in PEFT's files.

    As in PEFT, keys of a model from `inject_adapter_in_model` lack "base_model.model.".

    Args:
        model: a model with adapters.
        state_dict: state dict of the whole model, whose values are taken; None: those that the
            model has.
        adapter_name: the adapter.
        unwrap_compiled: has no effect, since keys have no steps of torch.compile.
        save_embedding_layers: as in `PeftModel.save_pretrained`.

    Raises:
        CheckpointError: PEFT has no such adapter.
        StateError: the model has no adapters.
        UnknownNameError: the adapter is unknown.
    """
    with saving.whole(model) as own, with_values(own, adapter_name, state_dict):
        found: dict[str, Tensor] = dict(encoded(own, adapter_name)[1])
        found |= embedding_tensors(own, save_embedding_layers)
        if state_dict is not None or own is not model:
            # the values last as long as the block
            found = {key: tensor.detach().clone() for key, tensor in found.items()}
    if isinstance(own, InjectedModel) and not isinstance(own, PeftModel):
        found = {key.removeprefix(saving.PREFIX): tensor for key, tensor in found.items()}
    return found


@names_call
def set_peft_model_state_dict(
    model: Any,
    peft_model_state_dict: Mapping[str, Tensor],
    adapter_name: str = DEFAULT,
    ignore_mismatched_sizes: bool = False,
    low_cpu_mem_usage: bool = False,
) -> LoadResult:
    """Give an adapter, and its head, values from `get_peft_model_state_dict`.

    Args:
        model: a model with adapters.
        peft_model_state_dict: the tensors, by PEFT's keys.
        adapter_name: the adapter.
        ignore_mismatched_sizes: must be False.
        low_cpu_mem_usage: has no effect, since parameters on the meta device always get the
            tensors.

    Returns:
        Two empty lists.

    Raises:
        CheckpointError: the tensors are not the adapter's; nothing has changed.
        ConfigError: `ignore_mismatched_sizes` is True.
        StateError: the model has no adapters.
        UnknownNameError: the adapter is unknown.
    """
    if ignore_mismatched_sizes:
        raise ConfigError("ignore_mismatched_sizes=True: a part would not be loaded. Leave it out.")
    fill(saving.adapted(model), adapter_name, peft_model_state_dict)
    return LoadResult([], [])


@names_call
def get_base_model_state_dict(model: Any) -> dict[str, Tensor]:
    """Return the tensors of the base model, by its keys without adapters.

    Args:
        model: a model with adapters.
    """
    return {key: tensor.detach() for key, tensor in plain_state(unwrapped(model)).items()}


@names_call
def set_base_model_state_dict(
    model: Any, state_dict: Mapping[str, Tensor], strict: bool = True
) -> Any:
    """Give the base model other values; adapters keep theirs.

    Args:
        model: a model with adapters.
        state_dict: the values, by the keys of the base model.
        strict: whether all keys are required, and no others.

    Returns:
        The missing keys, and the keys that are not the base model's.

    Raises:
        RuntimeError: a shape differs, or with `strict` a key; as in `load_state_dict`.
    """
    own = unwrapped(model)
    base = plain_state(own)
    missing, other = [k for k in base if k not in state_dict], [*state_dict.keys() - base.keys()]
    if strict and (missing or other):
        raise RuntimeError(f"keys that are missing: {missing}; that the model lacks: {other}")
    nn.Module.load_state_dict(own, {k: t for k, t in state_dict.items() if k in base}, strict=False)
    return LoadResult(missing, other)


@names_call
def convert_to_lora(
    model: Any,
    rank: float,
    adapter_name: str = DEFAULT,
    progressbar: bool = False,
    compile_kwargs: Mapping[str, Any] | None = None,
) -> tuple[PeftConfig, dict[str, Tensor]]:
    """Return the config and the tensors of a LoRA that changes the weights as an adapter does.

    Args:
        model: the model with the adapter, which does not change.
        rank: the largest rank; or, below 1, the share of Σ σ² to keep in each layer.
        adapter_name: the adapter.
        progressbar: has no effect, since a layer takes one decomposition.
        compile_kwargs: has no effect either.

    Raises:
        ConfigError: the rank is invalid.
        StateError: the adapter is more than a change of weights or merged, or the model has none.
        UnknownNameError: the adapter is unknown.
    """
    own = saving.adapted(model)
    size = Size(None, rank) if isinstance(rank, float) and rank < 1 else Size(int(rank), None)
    made, _ = conversion.converted(own, adapter_name, change_forms.find("lora"), size)
    values, tensors = encoded_record(own, adapter_name, made)
    return from_values(values, {}), tensors


@names_call
def save_as_lora(
    path: str | os.PathLike[str],
    model: Any,
    rank: float,
    adapter_name: str = DEFAULT,
    progressbar: bool = False,
    compile_kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Save the LoRA of `convert_to_lora` as a folder that PEFT loads.

    Args:
        path: the folder; created if missing.
        model: the model with the adapter, which does not change.
        rank: as in `convert_to_lora`.
        adapter_name: the adapter.
        progressbar: as in `convert_to_lora`.
        compile_kwargs: as in `convert_to_lora`.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    config, tensors = convert_to_lora(model, rank, adapter_name, progressbar, compile_kwargs)
    document = {name: plain_value(value) for name, value in config.to_dict().items()}
    files.write_all(
        Path(path),
        {saving.SAFE: files.tensor_bytes(tensors, {}), CONFIG: files.json_bytes(document)},
    )


@names_call
def load_peft_weights(
    model_id: str | os.PathLike[str], device: Any = None, **kwargs: Any
) -> dict[str, Tensor]:
    """Return the tensors in an adapter's folder, by their keys in PEFT's files.

    Args:
        model_id: a folder, or `user/repository`.
        device: the device to put them on; None: the CPU.
        **kwargs: `revision`, `token`, `cache_dir`, `local_files_only`, `force_download`.

    Raises:
        CheckpointError: the folder has no such file.
    """
    tensors = files.tensors_in(hub.resolve(model_id, **kwargs), format_of_peft.FILES)
    return {key: tensor.to(device or "cpu") for key, tensor in tensors.items()}


@names_call
def get_peft_config(config_dict: Mapping[str, Any]) -> PeftConfig:
    """Return the config object for a dict of fields.

    Args:
        config_dict: a config dict with `peft_type`.

    Raises:
        CheckpointError: there is no such method here.
        FieldError: the method can only be read, or there is no such field.
    """
    kind = {"peft_type": config_dict.get("peft_type")}
    return from_values(kind, {k: v for k, v in config_dict.items() if k != "peft_type"})


@names_call
def cast_mixed_precision_params(model: Any, dtype: torch.dtype) -> None:
    """Convert trained parameters to float32, and all others to half precision.

    Args:
        model: a model with adapters.
        dtype: float16 or bfloat16.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point() and packing_of(parameter) is None:
            parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else dtype)


@names_call
def replace_lora_weights_loftq(
    peft_model: Any,
    model_path: str | os.PathLike[str] | None = None,
    adapter_name: str = DEFAULT,
    callback: Callable[[Any, str], bool] | None = None,
) -> None:
    """Give a LoRA adapter the values that best compensate the quantization of its layers.

    The base model does not change. PEFT assumes a scaling of 1; here any scaling works.

    Args:
        peft_model: a quantized model with the adapter.
        model_path: a folder, a file of safetensors, or a name on the Hub, with the weights before
            quantization; None: the source that the model was loaded from.
        adapter_name: the adapter.
        callback: called with the model and the name of each layer after it has got its values;
            if it returns False, the layer gets its former values again.

    Raises:
        ConfigError: no layer is quantized, a weight is missing, or the adapter has no such values.
        StateError: the adapter is merged, or the model has none.
        UnknownNameError: the adapter is unknown.
    """
    own = saving.adapted(peft_model)
    config = own._adapter_state.find(adapter_name).config
    refuse_merged(own, adapter_name)
    sharding.refuse_if_sharded(own, "Write it before fully_shard(model).")
    if not {"init_weights", "init_options"} <= {*config.field_names()}:
        raise ConfigError(
            f"{adapter_name!r} is {config!r}, which quantization cannot start. Write LoRAConfig(…)."
        )
    asked: Any = config.replace(init_weights="loftq", init_options={})
    plan = asked.init_plan(own.anatomy)
    modules: Mapping[str, Any] = dict(modules_of(own, adapter_name))
    for path, weight in collected(own, plan, model_path).items():
        module = modules[path]
        before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
        adapters.init_values(own, path, module, weight)
        name = in_whole(path, base_prefix(own))
        if callback is not None and not callback(peft_model, name):
            with torch.no_grad():
                for key, tensor in module.state_dict(keep_vars=True).items():
                    tensor.copy_(before[key])


@names_call
def prepare_model_for_kbit_training(
    model: Any,
    use_gradient_checkpointing: bool = True,
    gradient_checkpointing_kwargs: Mapping[str, Any] | None = None,
    auto_clear_cache: bool = True,
) -> Any:
    """Freeze a model, convert its parameters in half precision to float32, and save memory.

    A quantized model gets gradient checkpointing; its quantized weights do not change.

    Args:
        model: a transformers model.
        use_gradient_checkpointing: whether a quantized model recomputes activations.
        gradient_checkpointing_kwargs: arguments of `gradient_checkpointing_enable`.
        auto_clear_cache: whether to return memory freed by the conversion to the GPU.

    Returns:
        The same object.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        is_plain = packing_of(parameter) is None
        if is_plain and parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.float()
    for kind in (torch.cuda, torch.xpu) if auto_clear_cache else ():
        if kind.is_available():
            kind.empty_cache()
    if use_gradient_checkpointing and getattr(model, "is_quantized", False):
        # torch's own default, without which it warns
        options = {"use_reentrant": True, **(gradient_checkpointing_kwargs or {})}
        if options["use_reentrant"]:
            model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return model


# --- `AutoPeftModelFor…`: the base model of an adapter's folder, with the adapter ---


class AutoPeftModel:
    """Loader of an adapter and its base model, in the class named by the adapter's config.

    Attributes:
        auto_class: the auto class of transformers; empty: the class in the config.
        task_type: PEFT's name of the task.
    """

    auto_class: ClassVar[str] = ""
    task_type: ClassVar[str | None] = None

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        adapter_name: str = DEFAULT,
        is_trainable: bool = False,
        revision: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Load an adapter and the base model that it was trained on, and activate the adapter.

        Args:
            pretrained_model_name_or_path: the folder of an adapter in any format, or
                `user/repository`.
            adapter_name: the name to give it.
            is_trainable: True: train the adapter; False: only use it.
            revision: the adapter's revision.
            **kwargs: as for the class's `from_pretrained`.

        Raises:
            CheckpointError: the adapter does not name its base model, or does not fit it.
            ConfigError: there is no adapter, or it belongs to another task.
        """
        path = os.fspath(pretrained_model_name_or_path)
        asked = {**kwargs, "revision": revision} if revision else kwargs
        found = adapter_folders.find(path, asked)
        if found is None:
            raise ConfigError(f"{path!r} is not a folder that save_adapter wrote.")
        config = found.path / CONFIG
        values = read_json(config) if config.is_file() else {}
        load = cls._class(values, path)
        at = {} if found.base.revision is None else {"revision": found.base.revision}
        model = load.from_pretrained(found.base.name, **{**kwargs, **at})
        if (found.path / "tokenizer_config.json").is_file():
            # the adapter's tokenizer may have more tokens than the base model
            tokens = len(transformers.AutoTokenizer.from_pretrained(found.path))
            if tokens > model.get_input_embeddings().weight.shape[0]:
                model.resize_token_embeddings(tokens)
        given = {"dtype": model.dtype} if {"dtype", "torch_dtype"} & kwargs.keys() else {}
        given["fingerprint"] = found.fingerprint
        return PeftModel.from_pretrained(model, found.path, adapter_name, is_trainable, **given)

    @classmethod
    def _class(cls, values: dict[str, Any], path: str) -> Any:
        """Return the class of the base model.

        Raises:
            ConfigError: the adapter belongs to another task, or to an unknown class.
        """
        task = values.get("task_type")
        if task is not None and task != cls.task_type:
            fitting = next((c for c in _CLASSES if c.task_type == task), AutoPeftModel)
            raise ConfigError(
                f"{path!r} is of task_type={task!r}. Write "
                f"{fitting.__name__}.from_pretrained({path!r})."
            )
        if cls.auto_class:
            return getattr(transformers, cls.auto_class)
        mapping = values.get("auto_mapping")
        name = mapping.get("base_model_class") if isinstance(mapping, dict) else None
        # only transformers models: a config must not import anything
        found: Any = getattr(transformers, str(name), None)
        is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
        if not is_model or found.config_class is None:
            raise ConfigError(
                f"{path!r} names {name!r}, not a model of transformers. Write "
                f"{_CLASSES[0].__name__}."
            )
        return found


class AutoPeftModelForCausalLM(AutoPeftModel):
    """Loads an adapter of a causal language model."""

    auto_class = "AutoModelForCausalLM"
    task_type = "CAUSAL_LM"


class AutoPeftModelForSeq2SeqLM(AutoPeftModel):
    """Loads an adapter of a sequence-to-sequence model."""

    auto_class = "AutoModelForSeq2SeqLM"
    task_type = "SEQ_2_SEQ_LM"


class AutoPeftModelForSequenceClassification(AutoPeftModel):
    """Loads an adapter of a model that classifies sequences."""

    auto_class = "AutoModelForSequenceClassification"
    task_type = "SEQ_CLS"


class AutoPeftModelForTokenClassification(AutoPeftModel):
    """Loads an adapter of a model that classifies tokens."""

    auto_class = "AutoModelForTokenClassification"
    task_type = "TOKEN_CLS"


class AutoPeftModelForQuestionAnswering(AutoPeftModel):
    """Loads an adapter of a model that finds answers."""

    auto_class = "AutoModelForQuestionAnswering"
    task_type = "QUESTION_ANS"


class AutoPeftModelForFeatureExtraction(AutoPeftModel):
    """Loads an adapter of a base model."""

    auto_class = "AutoModel"
    task_type = "FEATURE_EXTRACTION"


_CLASSES = AutoPeftModel.__subclasses__()


# --- PEFT's model classes, to compare with or to call ---

PeftMixedModel = standins.made(
    "PeftMixedModel",
    lambda _cls, model: isinstance(model, PeftModel) and bool(vars(model).get("_is_mixed")),
    (PeftModel,),
)


def _task_class(name: str, task: str) -> type[Any]:
    """Return PEFT's class of models for a task."""

    def takes(_cls: object, model: object) -> bool:
        return isinstance(model, PeftModel) and task_of(sharding.class_name(model)) == task

    return standins.made(name, takes, (PeftModel,))


TASK_CLASSES = {
    name: _task_class(name, task)
    for name, task in {
        "PeftModelForCausalLM": "CAUSAL_LM",
        "PeftModelForFeatureExtraction": "FEATURE_EXTRACTION",
        "PeftModelForQuestionAnswering": "QUESTION_ANS",
        "PeftModelForSeq2SeqLM": "SEQ_2_SEQ_LM",
        "PeftModelForSequenceClassification": "SEQ_CLS",
        "PeftModelForTokenClassification": "TOKEN_CLS",
    }.items()
}
