"""`adapters.loading`: weights of other modules, saved and loaded beside an adapter."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .errors import CheckpointError, ConfigError, names_call
from .folders.reading import read_json
from .formats import files, fit
from .model.state import LoadOptions

__all__ = ["WeightsLoader"]


class WeightsLoader(ABC):
    """Saves and loads parameters of a model that belong to neither an adapter nor a head.

    A subclass chooses them by their names in `model.state_dict()`, and is given to the methods that
    save and load adapters: `model.save_adapter(folder, "a", custom_weights_loaders=[loader])`. Its
    files are not downloaded from the Hub: load them from a folder.

    Attributes:
        model: the model whose parameters are saved.
        weights_name: the file of the tensors, in safetensors.
        config_name: the file of their name, in JSON.
    """

    def __init__(
        self,
        model: nn.Module,
        weights_name: str,
        config_name: str,
        use_safetensors: bool = True,
        safe_weights_name: str | None = None,
    ) -> None:
        """Keep the model, and choose the names of the files.

        Args:
            model: the model with the parameters.
            weights_name: a plain name. The extension becomes `.safetensors`; a pickled file of the
                name itself is read, but never written.
            config_name: a plain name.
            use_safetensors: whether the file in safetensors is read if there are both.
            safe_weights_name: its name, if it is not `weights_name` with the other extension.

        Raises:
            ConfigError: a name is a path, or both files have the same name.
        """
        self.model = model
        self.weights_name = safe_weights_name or str(Path(weights_name).with_suffix(".safetensors"))
        self.config_name = config_name
        self._pickled_name = weights_name
        self._use_safetensors = use_safetensors
        names = (config_name, self.weights_name, weights_name)
        if config_name in names[1:] or any(Path(name).name != name for name in names):
            raise ConfigError(
                f"{config_name!r} and {weights_name!r} are not names of two files. Write "
                "'pooler.json' and 'pooler.safetensors'."
            )

    @abstractmethod
    def filter_func(self, name: str) -> Callable[[str], bool]:
        """Return a function that says whether a parameter is one of these weights.

        Args:
            name: the name of the weights.

        Returns:
            A function of a name in `model.state_dict()`.
        """

    @abstractmethod
    def rename_func(self, old_name: str, new_name: str) -> Callable[[str], str]:
        """Return a function that renames a parameter of a file.

        Args:
            old_name: the name under which the weights were saved.
            new_name: the name under which they are loaded.

        Returns:
            A function of a name in the file, to a name in `model.state_dict()`.
        """

    @names_call
    def save(
        self,
        save_directory: str | os.PathLike[str],
        name: str,
        meta_dict: Mapping[str, Any] | None = None,
    ) -> None:
        """Save the weights.

        Args:
            save_directory: the folder; created if missing.
            name: the name of the weights; `save_adapter` gives that of the adapter.
            meta_dict: further JSON values for the config.

        Raises:
            CheckpointError: no parameter is chosen, or the folder cannot be written.
        """
        tensors = self._own(name)
        if not tensors:
            raise CheckpointError(
                f"{type(self).__name__}.filter_func({name!r}) chooses no key of model.state_dict()."
            )
        document = {**(meta_dict or {}), "name": name, "model_class": type(self.model).__name__}
        contents = {
            self.config_name: files.json_bytes(document),
            self.weights_name: files.tensor_bytes(tensors, {}),
        }
        files.write_all(Path(save_directory), contents, stale=[self._pickled_name])

    @names_call
    def load(
        self,
        save_directory: str | os.PathLike[str],
        load_as: str | None = None,
        loading_info: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> tuple[str, str]:
        """Load the weights into the model.

        Args:
            save_directory: the folder.
            load_as: the name to give them; None: the name they were saved under.
            loading_info: a dict that gets "missing_keys" and "unexpected_keys"; both are
                empty, as a difference is an error.
            **kwargs: for subclasses: `load_adapter` gives the name of the adapter as
                `main_load_name`.

        Returns:
            The folder, and the name.

        Raises:
            CheckpointError: a file is missing or damaged, or does not fit the model; nothing has
                been loaded.
        """
        folder = Path(save_directory)
        saved_as = str(read_json(folder / self.config_name).get("name"))
        there = [n for n in (self.weights_name, self._pickled_name) if (folder / n).exists()]
        chosen = there or [self.weights_name]
        tensors = files.read_tensors(folder / chosen[0 if self._use_safetensors else -1])
        name = load_as or saved_as
        rename = self.rename_func(saved_as, name) if load_as else str
        renamed = {rename(key): tensor for key, tensor in tensors.items()}
        own = self._own(name)
        fit.check_fit(type(self.model).__name__, renamed, own, None)
        fit.fill(self.model, renamed)
        LoadOptions(loading_info=loading_info).report()
        return str(folder), name

    def _own(self, name: str) -> dict[str, Tensor]:
        is_chosen = self.filter_func(name)
        with torch.no_grad():
            return {key: t for key, t in self.model.state_dict().items() if is_chosen(key)}
