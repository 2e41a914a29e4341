"""`Reference`: a model as it was before training, over the same base."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

from torch import nn

from adapterzoo.anatomy import without_wrappers
from adapterzoo.errors import StateError
from adapterzoo.formats import files, fit

from .sharding import groups_of
from .state import AdaptedModel, own_parameters_of

FILE = "reference.safetensors"


class Reference(nn.Module):
    """A model as it was before training, made of copies of what is trained and nothing else.

    Parameters of adapters, and all others that get gradients, are copied. Each call runs the policy
    with the copies in their places and without dropout.

    Attributes:
        policy: the model that is trained.
    """

    policy: Any

    def __init__(self, policy: AdaptedModel, is_base: bool = False) -> None:
        """Copy what is trained.

        Args:
            policy: the model that is trained.
            is_base: whether the reference is the model without its adapters.
        """
        super().__init__()
        # not a submodule: parameters of this module are the copies alone
        vars(self)["policy"] = policy
        self.is_base = is_base
        module = cast("nn.Module", policy)
        own = {id(p) for p in own_parameters_of(policy)}
        by_id: dict[int, nn.Parameter] = {}
        self._by_name: dict[str, nn.Parameter] = {}
        for name, p in () if is_base else module.named_parameters():
            if p.requires_grad or id(p) in own:
                by_id[id(p)] = nn.Parameter(p.detach().clone(), requires_grad=False)
                self._by_name[without_wrappers(name)] = by_id[id(p)]
        self.copies = nn.ParameterList(by_id.values())
        self._places = [
            (part, name, by_id[id(p)])
            for part in module.modules()
            for name, p in part._parameters.items()
            if id(p) in by_id
        ]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the reference.

        Args:
            *args: arguments of the policy.
            **kwargs: the same.

        Raises:
            StateError: the policy is sharded, and the copies are not.
        """
        with self._acting():
            return self.policy(*args, **kwargs)

    def save(self, folder: Path) -> None:
        """Write the copies, if there are any, beside a checkpoint.

        Args:
            folder: the folder of the checkpoint.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        if self._by_name:
            files.write_tensors(folder / FILE, {}, self._by_name)

    def load(self, folder: Path) -> None:
        """Fill the copies with those that `save` wrote, if it wrote any.

        Args:
            folder: the folder of the checkpoint.

        Raises:
            CheckpointError: they do not fit this model; nothing has been filled.
        """
        if not (folder / FILE).is_file():
            return
        saved = files.tensors_in(folder, (FILE,))
        fit.check_fit(type(self.policy).__name__, saved, self._by_name, None)
        for name, copy in self._by_name.items():
            copy.data.copy_(saved[name])

    @contextmanager
    def _acting(self) -> Iterator[None]:
        policy = self.policy
        if not self.is_base and groups_of(policy):
            raise StateError(
                "a sharded model needs a reference model of its own. Write ref_model=…."
            )
        trained = [module for module in policy.modules() if module.training]
        before = [module._parameters[name] for module, name, _ in self._places]
        try:
            for module in trained:
                module.training = False
            for module, name, copy in self._places:
                module._parameters[name] = copy
            with policy.disable_adapter() if self.is_base else nullcontext():
                yield
        finally:
            for (module, name, _), own in zip(self._places, before, strict=True):
                module._parameters[name] = own
            for module in trained:
                module.training = True

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the policy, such as its config."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(vars(self)["policy"], name)
