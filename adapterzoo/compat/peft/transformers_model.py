"""`TransformersModel`: a model that got an adapter through a transformers method."""

from __future__ import annotations

import dataclasses
import importlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from torch import Tensor
from transformers import PreTrainedModel

from adapterzoo import hub
from adapterzoo.errors import ConfigError, FieldError, names_call
from adapterzoo.model import AdapterModelMixin, training
from adapterzoo.model.activation import refuse_taken
from adapterzoo.model.hf.info import name_of

from . import saving
from .arguments import also_named, is_peft
from .methods import DEFAULT
from .model import (
    InjectedModel,
    PeftModel,
    as_peft,
    get_peft_model_state_dict,
    plain_on_error,
)


class TransformersModel(InjectedModel):
    """Mixin of models that got an adapter through a transformers method; they keep its signatures.

    `save_pretrained` saves only the active adapter, as transformers does.
    """

    # how transformers asks whether a model has adapters to save, and something to train
    _hf_peft_config_loaded = True
    _is_saved_for_peft = True

    save_pretrained = PreTrainedModel.save_pretrained

    @names_call
    def add_adapter(self, adapter_config: Any, adapter_name: str | None = None) -> None:
        """Add an adapter, activate it, and train only it.

        Args:
            adapter_config: PEFT's adapter config.
            adapter_name: its name; None: "default".

        Raises:
            DuplicateNameError: the name is taken.
            FieldError: the argument is not a PEFT config.
        """
        if not is_peft(adapter_config) or isinstance(adapter_config, Mapping):
            raise FieldError(f"{adapter_config!r} is not a config of PEFT. Write LoraConfig(r=8).")
        own, name = cast("Any", self), adapter_name or DEFAULT
        adapter_config.base_model_name_or_path = name_of(own)
        cast("Any", AdapterModelMixin).add_adapter(
            own, name, adapter_config, autocast_adapter_dtype=True
        )
        saving.keep(own, name, adapter_config)
        training.train_alone(own, name, unfreezes=not adapter_config.inference_mode)

    @names_call
    def load_adapter(
        self,
        peft_model_id: str | None = None,
        adapter_name: str | None = None,
        peft_config: Any = None,
        adapter_state_dict: Mapping[str, Tensor] | None = None,
        low_cpu_mem_usage: bool = False,
        is_trainable: bool = False,
        hotswap: bool | Literal["auto"] = "auto",
        local_files_only: bool = False,
        adapter_kwargs: Mapping[str, Any] | None = None,
        load_config: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Load an adapter and activate it.

        Args:
            peft_model_id: a folder, or `user/repository` on the Hub.
            adapter_name: the name to give it; None: "default".
            peft_config: PEFT's config, instead of the folder's.
            adapter_state_dict: tensors by PEFT's keys, instead of the folder's.
            low_cpu_mem_usage: has no effect, since an adapter from a file is never initialized
                first.
            is_trainable: True: train only this adapter; False: only use it.
            hotswap: as in `AdapterModelMixin.load_adapter`.
            local_files_only: whether to download nothing.
            adapter_kwargs: where the folder is: `revision`, `subfolder`, `token` and others.
            load_config: config of `from_pretrained`, which found the folder.
            **kwargs: the same as `adapter_kwargs`.

        Returns:
            Transformers' report of mismatches, which is empty, since a difference is an error.

        Raises:
            CheckpointError: the adapter does not fit the model.
            ConfigError: there is neither a folder nor a config with tensors.
            DuplicateNameError: the name is taken.
            UnknownNameError: there is no adapter for a hotswap.
        """
        path = peft_model_id or getattr(load_config, "pretrained_model_name_or_path", None)
        found = {**getattr(load_config, "download_kwargs", {}), **kwargs, **(adapter_kwargs or {})}
        options = {n: found[n] for n in (*hub.OPTIONS, "subfolder") if found.get(n)}
        if local_files_only:
            options["local_files_only"] = True
        own, name = cast("Any", self), adapter_name or DEFAULT
        state = own._adapter_state
        is_new = name not in state.records
        if hotswap is False or (hotswap == "auto" and state.slot_rank is None):
            refuse_taken(own, name, False, "adapter_name='another_name'")
        with tempfile.TemporaryDirectory() as made:
            if adapter_state_dict is not None and peft_config is not None:
                saving.write_folder(Path(made), peft_config, adapter_state_dict)
                path, options = made, {}
            elif path is None or adapter_state_dict is not None:
                raise ConfigError(
                    "an adapter is a folder, or a config with tensors. Write load_adapter('folder')"
                    " or load_adapter(peft_config=config, adapter_state_dict=tensors)."
                )
            cast("Any", PeftModel).load_adapter(
                own, path, name, is_trainable, config=peft_config, hotswap=hotswap, **options
            )
        if is_new:
            training.train_alone(own, name, unfreezes=is_trainable)
            training.require_grad(own, name, is_trainable)
        saving.set_mode(own, name, is_trainable)
        if not is_trainable:
            own.eval()
        return _nothing()

    def get_adapter_state_dict(
        self, adapter_name: str | None = None, state_dict: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return the tensors of an adapter by PEFT's keys for a model that it has not wrapped.

        Args:
            adapter_name: the adapter; None: the first active one.
            state_dict: state dict of the whole model, whose values are taken; None: those that the
                model has.

        Raises:
            CheckpointError: PEFT has no such adapter.
            UnknownNameError: the adapter is unknown.
        """
        name = adapter_name or next(iter(self.active_adapters), DEFAULT)
        return get_peft_model_state_dict(self, state_dict, name)

    @names_call
    @also_named(adapter_names="adapter_name")
    def delete_adapter(self, adapter_name: str | Sequence[str]) -> None:
        """Delete adapters; after the last one, the model is a plain one of its class again.

        Args:
            adapter_name: a name, or several.

        Raises:
            StateError: an adapter is in use.
            UnknownNameError: an adapter is unknown.
        """
        super().delete_adapter(adapter_name)
        if not cast("Any", self)._adapter_state.records:
            del self.peft_config


def add_first(self: PreTrainedModel, adapter_config: Any, adapter_name: str | None = None) -> None:
    """Add an adapter; the model then has the methods of `TransformersModel`."""
    with plain_on_error(self):
        as_peft(self, TransformersModel).add_adapter(adapter_config, adapter_name)


def load_first(
    self: PreTrainedModel, peft_model_id: str | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Load an adapter; the model then has the methods of `TransformersModel`."""
    slots = vars(self).get("_prepare_peft_hotswap_kwargs")
    with plain_on_error(self):
        made = as_peft(self, TransformersModel)
        if slots is not None:
            made.enable_peft_hotswap(**slots)
        return made.load_adapter(peft_model_id, *args, **kwargs)


def _nothing() -> Any:
    """Return transformers' report of a checkpoint in which everything fits."""
    module: Any = importlib.import_module("transformers.modeling_utils")
    cls = module.LoadStateDictInfo
    kinds = {"set": set, "list": list, "dict": dict}
    return cls(**{f.name: kinds[str(f.type).partition("[")[0]]() for f in dataclasses.fields(cls)})
