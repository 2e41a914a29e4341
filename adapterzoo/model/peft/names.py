"""Methods and properties of PEFT's models and of transformers' mixin for PEFT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from torch import Tensor

from adapterzoo.errors import StateError
from adapterzoo.model import merging

from . import in_memory, switching

T = TypeVar("T")


def with_names_of_peft(cls: type[T]) -> type[T]:
    """Decorate a class of models: it gets the members of `NamesOfPeft`."""
    for name, member in vars(NamesOfPeft).items():
        if not name.startswith("_"):
            setattr(cls, name, member)
    return cls


class NamesOfPeft:
    """The members, in one place."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @property
    def active_adapter(self) -> str | list[str] | None:
        """The name of the active adapter; a list of several, None without one."""
        setup = self.active_adapters
        names = [] if setup is None else list(setup.flatten())
        return names if len(names) > 1 else next(iter(names), None)

    def set_adapter(self, adapter_name: str | Sequence[str], inference_mode: bool = False) -> None:
        """Activate an adapter, or several that act as a stack, and let only these be trained.

        The base model's parameters and the mode of the model do not change. `train_adapter` freezes
        the base model, and gives the adapter a head of its own.

        Args:
            adapter_name: a name, or a list of names.
            inference_mode: whether no adapter gets gradients.

        Raises:
            UnknownNameError: an adapter is unknown.
            CompositionError: as `set_active_adapters`.
        """
        switching.activate(self, adapter_name, inference_mode)

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Return a context in which the calling thread uses the base model.

        ```python
        with model.disable_adapter():
            reference = model(**batch).logits
        ```

        Raises:
            StateError: on entering, an adapter is merged.
        """
        return switching.disabled(self)

    def disable_adapters(self) -> None:
        """Deactivate all adapters, until `enable_adapters`.

        Raises:
            StateError: there is none, or one is merged.
        """
        switching.disable(self)

    def enable_adapters(self) -> None:
        """Activate again what `disable_adapters` deactivated.

        Raises:
            StateError: nothing was disabled, and nothing is active.
        """
        switching.enable(self)

    def disable_adapter_layers(self) -> None:
        """Do the same as `disable_adapters`, under PEFT's name."""
        switching.disable(self)

    def enable_adapter_layers(self) -> None:
        """Do the same as `enable_adapters`, under PEFT's name."""
        switching.enable(self)

    def unmerge_adapter(self) -> None:
        """Do the same as `reset_adapter`, under PEFT's name."""
        merging.reset(self)

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """Return the number of trainable parameters, and of all.

        A quantized weight counts as many parameters as before quantization.
        """
        return switching.counts(self)

    def print_trainable_parameters(self) -> None:
        """Print the number of trainable parameters, of all, and their share in percent."""
        trainable, total = switching.counts(self)
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
            StateError: there is no name, and not exactly one adapter is active.
            UnknownNameError: the adapter is unknown.
        """
        return in_memory.tensors_of_peft(self, adapter_name, state_dict)

    def enable_peft_hotswap(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise: an adapter is replaced by loading another one under its name.

        Args:
            *args: of transformers' method.
            **kwargs: the same.

        Raises:
            StateError: always.
        """
        raise StateError(
            "there is nothing to prepare for another rank or scaling. Write "
            "load_adapter(folder, load_as=name, overwrite_ok=True)."
        )
