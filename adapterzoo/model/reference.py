"""`Reference`: a model as it was before training, over the same base."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import nn

from adapterzoo.errors import StateError

from .sharding import groups_of
from .state import AdaptedModel, own_parameters_of


class Reference(nn.Module):
    """The scores of a model as it was when this was made: copies of what is trained, and no more.

    Parameters of adapters and heads that act, and any others that get gradients, are copied; each
    call puts the copies in their places, without dropout.

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
        # no part of this module, whose parameters would be those of the policy
        vars(self)["policy"] = policy
        self.is_base = is_base
        wanted = {id(p) for p in cast("Any", policy).parameters() if p.requires_grad}
        wanted |= {id(p) for p in own_parameters_of(policy)}
        copies = {} if is_base else {
            p: nn.Parameter(p.detach().clone(), requires_grad=False)
            for p in cast("Any", policy).parameters()
            if id(p) in wanted
        }  # fmt: skip
        self.copies = nn.ParameterList(copies.values())
        self._places = [
            (module, name, copies[p])
            for module in cast("Any", policy).modules()
            for name, p in module._parameters.items()
            if p is not None and p in copies
        ]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the reference.

        Args:
            *args: of the policy.
            **kwargs: the same.

        Raises:
            StateError: the copies cannot take the places of parameters that are sharded.
        """
        with self._acting():
            return self.policy(*args, **kwargs)

    @contextmanager
    def _acting(self) -> Iterator[None]:
        policy = self.policy
        if not self.is_base and groups_of(policy):
            raise StateError(
                "the model is sharded, and a copy of its trained parameters is not. Write "
                "ref_model=…, a model of its own."
            )
        trained = [module for module in policy.modules() if module.training]
        before = [module._parameters[name] for module, name, _ in self._places]
        try:
            for module in trained:
                module.training = False
            for module, name, copy in self._places:
                module._parameters[name] = copy
            if self.is_base:
                with policy.disable_adapter():
                    yield
            else:
                yield
        finally:
            for (module, name, _), own in zip(self._places, before, strict=True):
                module._parameters[name] = own
            for module in trained:
                module.training = True

    def __getattr__(self, name: str) -> Any:
        """Return a member of the policy, such as its config."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(vars(self)["policy"], name)
