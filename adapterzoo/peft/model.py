"""`PeftModel`: a model of transformers with adapters, whose methods are those of PEFT."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from transformers import PreTrainedModel

from adapterzoo import hub
from adapterzoo.errors import ConfigError, names_call, unknown_name
from adapterzoo.inject import set_class
from adapterzoo.model import AdapterModelMixin, checkpointing, init
from adapterzoo.model.hf.factory import blank
from adapterzoo.model.hf.hosts import is_untrained
from adapterzoo.model.peft import autocast, in_memory, switching
from adapterzoo.model.state import parameters_of

from . import checkpoints
from .configs import PeftConfig, from_values
from .functions import LoadResult


class PeftModel:
    """Mixin of models that `get_peft_model` returns; adapters are saved alone, in PEFT's format.

    Besides these methods a model has those of its class and of `AdapterModelMixin`.
    """

    # how transformers asks whether a quantized model has something to train
    _hf_peft_config_loaded = True
    _is_saved_for_peft = True

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @classmethod
    def from_pretrained(
        cls,
        model: PreTrainedModel,
        model_id: str | os.PathLike[str],
        adapter_name: str = switching.DEFAULT,
        is_trainable: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Load an adapter into a model of transformers, which is changed in place.

        Args:
            model: of transformers, or one with adapters.
            model_id: a folder, in any format, or `user/repository` on the Hub.
            adapter_name: to give it.
            is_trainable: whether it is trained; otherwise it is only used.
            **kwargs: as `load_adapter` takes them.

        Returns:
            The same object.

        Raises:
            CheckpointError: the adapter does not fit the model; it has no adapter then.
            ConfigError: an argument is not legal.
        """
        with plain_on_error(model):
            made = as_peft(model)
            made.load_adapter(model_id, adapter_name, is_trainable, **kwargs)
        if not is_trainable:
            made.eval()
            made.requires_grad_(False)
        return made

    def add_adapter(self, *args: Any, autocast_adapter_dtype: bool = True, **kwargs: Any) -> None:
        """Add an adapter: `AdapterModelMixin.add_adapter` with parameters in float32.

        Args:
            *args: see there.
            autocast_adapter_dtype: as in `get_peft_model`.
            **kwargs: see there.

        Raises:
            CheckpointError: PEFT's format cannot express what a config of PEFT gives here.
            ConfigError: a value of the config has no meaning here.
        """
        refuse_uninitialized(kwargs.pop("low_cpu_mem_usage", False))
        theirs = cast("Any", AdapterModelMixin)
        theirs.add_adapter(self, *args, autocast_adapter_dtype=autocast_adapter_dtype, **kwargs)

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
    ) -> None:
        """Load an adapter; the first one of the model becomes active.

        Args:
            model_id: a folder, or a name on the Hub; `subfolder` is a part of it.
            adapter_name: to give it; an adapter of this name is replaced.
            is_trainable: whether its parameters get gradients.
            torch_device: where PEFT reads the file; tensors go to the devices of the layers.
            autocast_adapter_dtype: whether parameters in half precision are converted to float32,
                as in `get_peft_model`.
            ephemeral_gpu_offload: must be False.
            low_cpu_mem_usage: a file's tensors are never initialized first, with or without it.
            key_mapping: must be None.
            config: must be None: it is that of the folder.
            **kwargs: as `AdapterModelMixin.load_adapter` takes them.

        Raises:
            CheckpointError: it does not fit the model.
            ConfigError: an argument is not legal.
        """
        autocast.check(autocast_adapter_dtype)
        for name, value in (
            ("ephemeral_gpu_offload", ephemeral_gpu_offload),
            ("key_mapping", key_mapping),
            ("config", config),
        ):
            if value:
                raise ConfigError(
                    f"{name}={value!r}: an adapter is loaded as its folder describes it. Leave it "
                    f"out."
                )
        _check_device(torch_device)
        path = (
            model_id if (below := kwargs.pop("subfolder", None)) is None else Path(model_id, below)
        )
        folder = hub.resolve(path, **{n: kwargs.pop(n) for n in hub.OPTIONS if n in kwargs})
        theirs, own = cast("Any", AdapterModelMixin), cast("Any", self)
        old = own._adapter_state.records.get(adapter_name)
        theirs.load_adapter(
            self, folder, adapter_name=adapter_name, is_trainable=is_trainable,
            **{"overwrite_ok": True, **kwargs},
        )  # fmt: skip
        # a hotswap leaves the places, and the dtype of the slot
        is_new = old is None or own._adapter_state.records[adapter_name].places is not old.places
        if autocast_adapter_dtype and is_new:
            autocast.widen(own, adapter_name)

    @names_call
    def set_adapter(self, adapter_name: str | Sequence[str], inference_mode: bool = False) -> None:
        """Activate an adapter, or several, and train only these, with heads of their own.

        Args:
            adapter_name: a name, or a list of names.
            inference_mode: whether nothing is trained.

        Raises:
            UnknownNameError: an adapter is unknown.
        """
        names = switching.list_of(cast("Any", self), adapter_name)
        own = (p for name in names for p in parameters_of(cast("Any", self), name))
        # of a reference that a Trainer's loss compares with, nothing can be trained
        if inference_mode or is_untrained(self, own):
            switching.activate(cast("Any", self), names, frozen=True)
        else:
            switching.train(self, names if len(names) > 1 else names[0], thaws=True)

    @switching.also_named(adapter_names="adapter_name")
    def delete_adapter(self, adapter_name: str | Sequence[str]) -> None:
        """Delete adapters; if none is active afterwards, the first of the others is, as in PEFT.

        Args:
            adapter_name: a name, or several.

        Raises:
            StateError: one is in use.
            UnknownNameError: an adapter is unknown.
        """
        own = cast("Any", self)
        was_active = own.active_adapters is not None
        cast("Any", AdapterModelMixin).delete_adapter(self, adapter_name)
        if was_active and own.active_adapters is None and own.adapters_config:
            name = min(own.adapters_config)
            warnings.warn(f"{adapter_name!r} was active; {name!r} is active now.", stacklevel=3)
            switching.train(self, name, thaws=True)

    @names_call
    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        safe_serialization: bool = True,
        selected_adapters: Sequence[str] | None = None,
        is_main_process: bool = True,
        **kwargs: Any,
    ) -> None:
        """Save adapters in PEFT's format: "default" in the folder, others in sub-folders.

        If PEFT's format cannot express one of them, none is written.

        Args:
            save_directory: the folder; created if missing.
            safe_serialization: must be True.
            selected_adapters: names; None: all.
            is_main_process: whether this process writes.
            **kwargs: `format` of the files, "peft" if not given; `with_head`, whether heads are
                saved; `state_dict` of the whole model, which `Trainer` gives and which is not read.
                In a trainer's `checkpoint-<step>` all trained tensors are also written to
                `model.safetensors`.

        Raises:
            CheckpointError: PEFT has no such adapter, or the folder cannot be written.
            ConfigError: an argument has no meaning here.
            UnknownNameError: an adapter is unknown.
        """
        of_trainer = "state_dict" in kwargs and kwargs.pop("state_dict") is None
        format, with_head = kwargs.pop("format", "peft"), kwargs.pop("with_head", True)
        if not safe_serialization or kwargs:
            shown = [*kwargs, *(() if safe_serialization else ("safe_serialization",))]
            raise ConfigError(
                f"{shown[0]}: files are written in safetensors, with what each adapter consists "
                f"of. Leave it out."
            )
        known = [*self.adapters_config]
        names = known if selected_adapters is None else list(selected_adapters)
        for name in names:
            if name not in known:
                raise unknown_name("", "adapter", name, known)
        if len(names) > 1:
            checkpointing.check_saving(cast("Any", self), names, format, with_head)
        for name in names if is_main_process else ():
            below = "" if name == switching.DEFAULT else name
            self.save_adapter(
                Path(save_directory) / below, name, with_head=with_head, format=format
            )
        if of_trainer and is_main_process:
            checkpoints.write(cast("Any", self), Path(save_directory))

    def load_state_dict(
        self, state_dict: Mapping[str, torch.Tensor], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load tensors as `nn.Module.load_state_dict`, or those of a trainer's checkpoint.

        Args:
            state_dict: of the whole model; or, if not `strict`, of a trainer's checkpoint.
            strict: whether all keys of the model are needed.
            assign: whether the tensors become the parameters.

        Raises:
            CheckpointError: a checkpoint does not fit; nothing has changed then.
        """
        own = cast("Any", self)
        if not strict and checkpoints.holds_only_trained(own, state_dict):
            checkpoints.fill(own, state_dict)
            return LoadResult([], [])
        return cast("Any", super()).load_state_dict(state_dict, strict=strict, assign=assign)

    @property
    def peft_config(self) -> dict[str, PeftConfig]:
        """The adapters' names to configs of PEFT, as files have them; changes have no effect."""
        return {name: self._peft_config_of(name) for name in self.adapters_config}

    @property
    def active_peft_config(self) -> PeftConfig:
        """The config of the active adapter.

        Raises:
            StateError: not exactly one is active.
        """
        return self._peft_config_of(in_memory.one_name(cast("Any", self), None))

    def _peft_config_of(self, name: str) -> PeftConfig:
        return from_values(in_memory.encoded(cast("Any", self), name)[0], {})

    def get_base_model(self) -> Self:
        """Return the model itself: it is not wrapped."""
        return self

    def unload(self, *args: Any, **kwargs: Any) -> Any:
        """Return the plain model; arguments as of `AdapterModelMixin.unload`.

        Args:
            *args: see there.
            **kwargs: the same.
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
            progressbar: must be False.
            safe_merge: PEFT's switch; weights that are not finite are always refused.
            adapter_names: None: the active ones.

        Raises:
            ConfigError: there is no progress bar.
            StateError: as `AdapterModelMixin.merge_and_unload`.
        """
        if progressbar:
            raise ConfigError("progressbar=True: there is none. Leave it out.")
        return _plainly(self, "merge_and_unload", adapter_names)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle and copy the model by what its class is made from."""
        made_from = vars(type(self).__mro__[2]).get("_made_from", ())
        return _again, made_from, cast("Any", self).__getstate__()


@contextlib.contextmanager
def plain_on_error(model: Any) -> Iterator[None]:
    """Make a model that had no adapters a plain one again if the block raises."""
    was_plain = not isinstance(model, AdapterModelMixin)
    try:
        yield
    except BaseException:
        if was_plain and isinstance(model, AdapterModelMixin):
            model.unload()
        raise


def refuse_uninitialized(low_cpu_mem_usage: bool) -> None:
    """Refuse to add an adapter without values.

    Raises:
        ConfigError: it was asked for.
    """
    if low_cpu_mem_usage:
        raise ConfigError(
            "low_cpu_mem_usage=True: a new adapter has values from the start. Leave it out."
        )


def _check_device(device: Any) -> None:
    try:
        torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"torch_device={device!r} is not a device. Write 'cpu', or leave it out."
        ) from error


def as_peft(model: Any) -> Any:
    """Give a model the methods of `PeftModel`."""
    if not isinstance(model, AdapterModelMixin):
        init(model)
    if not isinstance(model, PeftModel):
        set_class(cast("Any", model), _class_of(type(model)))
    return model


_classes: dict[type[Any], type[Any]] = {}


def _class_of(cls: type[Any]) -> type[Any]:
    """Return the class with the methods of `PeftModel`; it keeps its name."""
    if cls not in _classes:
        members = {"__module__": cls.__module__, "__doc__": cls.__doc__}
        _classes[cls] = type(cls.__name__, (PeftModel, cls), members)
    return _classes[cls]


def _plainly(model: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of a model without the mixin; only its class in transformers may remain."""
    mixed: Any = type(model)
    set_class(model, mixed.__mro__[2])
    try:
        return getattr(model, method)(*args, **kwargs)
    finally:
        if isinstance(model, AdapterModelMixin):
            set_class(cast("Any", model), mixed)


def _again(*made_from: Any) -> Any:
    """Return an empty model with the mixin, for copies and pickles."""
    cls: Any = _class_of(type(blank(*made_from)))
    return cls.__new__(cls)
