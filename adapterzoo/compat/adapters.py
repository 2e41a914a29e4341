"""Methods and properties of `adapters`: other names for the features of a model here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from adapterzoo.config import AdapterConfig
from adapterzoo.contracts import InvertibleAdapter
from adapterzoo.errors import ConfigError, SiteError, StateError
from adapterzoo.inject.adapted import AdapterDict
from adapterzoo.interface import AdapterMethod, AdapterModelInterface
from adapterzoo.model import adapters, fusion
from adapterzoo.model.fusion import FuseArgument
from adapterzoo.model.state import AdapterState, modules_of


class _InvertibleAdapters(AdapterDict):
    """The invertible functions of a model; they are deleted with their adapters."""

    def __delitem__(self, key: str) -> None:
        """Refuse: the layers would keep the function."""
        raise StateError(
            f"del invertible_adapters[{key!r}]: an invertible function is a part of its adapter. "
            f"Write delete_adapter({key!r}), or set_active_adapters(None)."
        )


class AdaptersMethods:
    """The members, in one place."""

    _adapter_state: AdapterState

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @property
    def has_parallel_adapters(self) -> bool:
        """Whether `Parallel` is active."""
        setup = self.active_adapters
        return setup is not None and setup.parallel_channels > 1

    @property
    def adapter_interface(self) -> AdapterModelInterface | None:
        """The interface given to `init`; None without one."""
        return self._adapter_state.interface

    @property
    def model_name(self) -> str | None:
        """The folder or name from which the base model was loaded."""
        name: str | None = self.config.name_or_path
        return name

    @property
    def support_lora_delta_w_svd(self) -> bool:
        """True, because `average_adapter` has the strategy in every model."""
        return True

    @property
    def support_prompt_tuning(self) -> bool:
        """Whether adapters can add tokens to the model's input."""
        return self.supports_adapter(AdapterMethod.prompt_tuning)

    def supports_adapter(self, type_or_config: str | AdapterConfig) -> bool:
        """Return whether `add_adapter` accepts a config: sites, sizes, the model's interface.

        Args:
            type_or_config: a config, a config string, or one of the kinds of `AdapterMethod`.

        Raises:
            ConfigError: the argument is none of these.
        """
        is_kind = isinstance(type_or_config, str)
        found = AdapterMethod.examples.get(type_or_config) if is_kind else None
        config = AdapterConfig.load(type_or_config if found is None else found)
        return _supports(self, config)

    @property
    def invertible_adapters(self) -> AdapterDict:
        """The invertible functions at the embeddings, by adapter; see `get_invertible_adapter`."""
        # a module, since paths of parameters of a base model lead through this property
        found = _InvertibleAdapters()
        for name in self.adapters_config:
            if (adapter := _at_entry(self, name)) is not None:
                found[name] = dict(modules_of(self, name)).get("", adapter)
        return found

    def get_invertible_adapter(self) -> nn.Module | None:
        """Return the invertible function of the first active adapter; None without one.

        Each forward calls this module, `function(x)` at the embeddings and `function(x, rev=True)`,
        its inverse, in a language modeling head, so hooks on it run.
        """
        setup = self.active_adapters
        name = None if setup is None else setup.first()
        adapter = None if name is None else _at_entry(self, name)
        if name is None or adapter is None:
            return None
        function = dict(modules_of(self, name)).get("", adapter)
        # a union has the shared modules of each of its configs
        number = None if adapter.shared_key is None else adapter.shared_key.number
        return function if number is None else function.get_submodule(str(number))

    def get_labels_dict(self) -> dict[int, str] | None:
        """Return class numbers and names of the static head; None if the config has no classes."""
        labels: dict[int, str] | None = getattr(self.config, "id2label", None)
        return None if labels is None else dict(labels)

    def get_labels(self) -> list[str] | None:
        """Return the names of the classes of the static head; None if the config has none."""
        labels = self.get_labels_dict()
        return None if labels is None else list(labels.values())

    def freeze_embeddings(self, freeze: bool = True) -> None:
        """Freeze the token table, or make it trainable.

        Args:
            freeze: False: its parameters get gradients.
        """
        self.get_input_embeddings().requires_grad_(not freeze)

    def adapter_fusion_to(
        self,
        adapter_names: FuseArgument,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Move or cast fusion layers.

        Args:
            adapter_names: the fusion.
            device: None: unchanged.
            dtype: None: unchanged.

        Raises:
            UnknownNameError: the fusion is unknown.
        """
        for _, layer in self.fusion_modules(fusion.as_fuse(adapter_names, None).name):
            layer.to(device=device, dtype=dtype)

    def save_all_adapter_fusions(
        self,
        save_directory: str | os.PathLike[str],
        meta_dict: Mapping[str, Any] | None = None,
        custom_weights_loaders: Sequence[Any] | None = None,
        use_safetensors: bool | None = None,
        *,
        format: str = "native",
    ) -> None:
        """Save each fusion to the sub-folder of its name.

        Args:
            save_directory: the folder of these; created if missing.
            meta_dict: as in `save_adapter_fusion`.
            custom_weights_loaders: as in `save_adapter_fusion`.
            use_safetensors: as in `save_adapter_fusion`.
            format: as in `save_adapter_fusion`.

        Raises:
            CheckpointError: a folder cannot be written, or the format cannot express a fusion.
        """
        for name in self.adapters_config.fusions:
            self.save_adapter_fusion(
                Path(save_directory) / name, name, meta_dict, custom_weights_loaders,
                use_safetensors=use_safetensors, format=format,
            )  # fmt: skip


def _supports(model: Any, config: AdapterConfig) -> bool:
    """Return whether `add` takes a config, with the data that its initial values may need."""
    try:
        adapters.make(model, adapters.for_model(model, config)[0], torch.device("meta"))
    except (ConfigError, SiteError, StateError):
        return False
    return True


def _at_entry(model: Any, name: str) -> InvertibleAdapter | None:
    """Return the adapter's invertible function at the input of the first block, if it has one."""
    entry = model.anatomy.entry
    found = None if entry is None else dict(modules_of(model, name)).get(entry.path)
    # in a union there may be another adapter there
    parts = () if found is None else found.modules()
    return next((part for part in parts if isinstance(part, InvertibleAdapter)), None)
