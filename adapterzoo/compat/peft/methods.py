"""Methods of PEFT's models, and of transformers' mixin for PEFT, at every model with adapters.

Methods of `AdapterModelMixin` take PEFT's arguments too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from adapterzoo.compat.adapters import AdaptersMethods
from adapterzoo.composition import Stack
from adapterzoo.errors import ConfigError, SiteError, StateError, listing
from adapterzoo.model import AdapterModelMixin, adapters, hotswap, merging, training
from adapterzoo.model.activation import make_plan, set_active
from adapterzoo.model.sharding import size_of
from adapterzoo.model.state import AdaptedModel, parameters_of
from adapterzoo.names import one_of
from adapterzoo.peft_arguments import also_named, is_peft, or_with_config_of_peft

from . import configs, tensors

DEFAULT = "default"
"""PEFT's name of an adapter without one."""


class PeftMethods:
    """The methods, in one place."""

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
        """Deactivate all adapters, until `enable_adapters`.

        Raises:
            StateError: there is none, or one is merged.
        """
        _refuse_merged(self)
        state, plan = self._adapter_state, self._active.default.plan
        if not state.records:
            raise StateError("the model has no adapter. Write add_adapter('a') first.")
        if plan.setup is not None:
            state.disabled = plan.setup, plan.skip_layers
            set_active(self, None)

    def enable_adapters(self) -> None:
        """Activate again what `disable_adapters` deactivated.

        Raises:
            StateError: nothing was disabled, and nothing is active.
        """
        state = self._adapter_state
        if self._active.default.plan.setup is not None:
            return
        if state.disabled is None or {*state.disabled[0].flatten()} - state.records.keys():
            raise StateError(
                "no adapter was disabled, and none is active. Write set_adapter('a'); adapters: "
                f"{listing(state.records)}."
            )
        set_active(self, *state.disabled)
        state.disabled = None

    def disable_adapter_layers(self) -> None:
        """Do the same as `disable_adapters`, under PEFT's name."""
        PeftMethods.disable_adapters(self)

    def enable_adapter_layers(self) -> None:
        """Do the same as `enable_adapters`, under PEFT's name."""
        PeftMethods.enable_adapters(self)

    def unmerge_adapter(self) -> None:
        """Do the same as `reset_adapter`, under PEFT's name."""
        merging.reset(self)

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """Return the number of trainable parameters, and of all.

        A quantized weight counts as many parameters as before quantization.
        """
        own = [(size_of(p), p.requires_grad) for p in self.parameters()]
        return sum(n for n, is_trained in own if is_trained), sum(n for n, _ in own)

    def print_trainable_parameters(self) -> None:
        """Print the number of trainable parameters, of all, and their share in percent."""
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
            StateError: there is no name, and not exactly one adapter is active.
            UnknownNameError: the adapter is unknown.
        """
        if state_dict is not None:
            raise ConfigError(
                "state_dict: tensors of a sharded model are gathered by save_adapter. Leave it out."
            )
        return tensors.encoded(self, tensors.one_name(self, adapter_name))[1]

    def enable_peft_hotswap(
        self,
        target_rank: int = 128,
        check_compiled: Literal["error", "warn", "ignore"] = "error",
    ) -> None:
        """Load adapters with this rank from now on, and let later ones replace their values.

        After it, `load_adapter` of a name that the model has writes the values in place: see its
        `hotswap`. Methods with a low-rank update get the rank, others keep their sizes.

        Args:
            target_rank: the largest rank of all adapters.
            check_compiled: "error": refuse if the model has adapters; "warn" or "ignore": give
                these the rank too, with or without a warning.

        Raises:
            ConfigError: an argument is not legal, or the rank of an adapter is larger.
            StateError: the model has adapters, or one of them is in use.
        """
        hotswap.enable_slots(self, target_rank, check_compiled)


def _refuse_merged(model: AdaptedModel) -> None:
    if merged := model._adapter_state.merged:
        raise StateError(
            f"{listing(merged)} acts through the base weights, as it is merged. Write "
            f"unmerge_adapter() first."
        )


# --- the model's own methods, with PEFT's arguments ---


_mixin: Any = AdapterModelMixin
_own_add: Any = _mixin.add_adapter
_own_supports: Any = AdaptersMethods.supports_adapter


def _add_adapter(self: Any, *args: Any, **kwargs: Any) -> None:
    # with the config first, as in transformers, the adapter is trained and active afterwards
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
    call = inspect.signature(_own_add).bind(self, *args, **kwargs)
    if is_peft(call.arguments.get("config")):
        _add_from_peft(**call.arguments)
    else:
        _own_add(*call.args, **call.kwargs)
    if first is not None:
        training.train_alone(self, name, unfreezes=not first.inference_mode)


def _add_from_peft(
    self: Any, adapter_name: str, config: Any, set_active: bool = False, **given: Any
) -> None:
    """Add an adapter by a config of PEFT."""
    found = configs.read(self, config)
    check = None
    if getattr(self, "_is_saved_for_peft", False):
        check = functools.partial(tensors.check_savable, self, adapter_name)
    adapters.add(self, adapter_name, found.config, active=set_active, check=check, **given)
    if found.is_frozen:
        for parameter in parameters_of(self, adapter_name):
            parameter.requires_grad_(False)


@functools.wraps(_own_supports)
def _supports_adapter(self: Any, type_or_config: Any) -> bool:
    if is_peft(type_or_config):
        try:
            type_or_config = configs.read(self, type_or_config).config
        except (ConfigError, SiteError):
            return False
    supports: bool = _own_supports(self, type_or_config)
    return supports


MEMBERS = {
    **{name: member for name, member in vars(PeftMethods).items() if not name.startswith("_")},
    "add_adapter": or_with_config_of_peft(_own_add, _add_adapter, "adapter_config", "peft_config"),
    "delete_adapter": also_named(adapter_names="adapter_name")(_mixin.delete_adapter),
    "merge_adapter": also_named(adapter_names="name")(_mixin.merge_adapter),
    "supports_adapter": _supports_adapter,
}
"""What models get: PEFT's methods, and methods that also take PEFT's arguments."""
