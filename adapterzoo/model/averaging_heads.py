"""Heads that become one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from adapterzoo.averaging import combination, weighted, weighted_sum
from adapterzoo.contracts import upcast
from adapterzoo.errors import CompositionError, listing, names_call

from .shelf import ShelfMixin


class AveragingHeadsMixin(ShelfMixin):
    """`average_head`."""

    @names_call
    @torch.no_grad()
    def average_head(
        self,
        head_name: str,
        head_list: Sequence[str] | Mapping[str, float],
        weights: Sequence[float] | None = None,
        normalize_weights: bool = True,
        overwrite_ok: bool = False,
        set_active: bool = False,
    ) -> None:
        """Add a head whose parameters are Σ wᵢ θᵢ of several others; they stay as they are.

        Args:
            head_name: of the result.
            head_list: the heads, or a dict from heads to weights.
            weights: one for each, of any sign; None: equal ones of sum 1.
            normalize_weights: whether weights are divided by their sum.
            overwrite_ok: whether a head of the name may be replaced, also one of the list.
            set_active: whether the result becomes the active head.

        Raises:
            CompositionError: the heads differ in more than dropout, or the result is not finite;
                nothing has changed, as with every error.
            ConfigError: a value is not legal.
            DuplicateNameError: the name is taken.
            StateError: the model is sharded.
            UnknownNameError: there is no head of a name.
        """
        call = f"average_head({head_name!r})"
        names, own = weighted(head_list, weights, normalize_weights)
        strategy = combination("linear")
        heads = [self._find_head(name, call) for name in names]
        checked = self._free_head_name("average_head", head_name, overwrite_ok)
        kinds = dict.fromkeys(str(head.config.head_type) for head in heads)
        if len(kinds) > 1:
            raise CompositionError(
                f"{call}: the heads are of the types {listing(kinds)}. Write the names of heads of "
                f"one type."
            )
        dicts = [head.config.to_dict() for head in heads]
        strategy.refuse_differing(dicts, {"dropout_prob"}, "the names of heads of one config")
        model = cast("Any", self)
        made = model._built(heads[0].config)
        theirs = [model._own_tensors(head) for head in heads]
        own_tensors = model._own_tensors(made)
        for name, tensors in zip(names, theirs, strict=True):
            if tensors.keys() != own_tensors.keys():
                raise CompositionError(
                    f"{call}: a new head has the tensors {listing(own_tensors)} beside those of "
                    f"the base model, and {name!r} has {listing(tensors)}. Write the names of "
                    f"heads whose output layer was not replaced."
                )
        for key, target in own_tensors.items():
            first = theirs[0][key]
            if not first.is_floating_point():
                target.copy_(first)
                continue
            # a head may have been cast, or moved
            target.data = target.data.to(first.device, first.dtype)
            value = weighted_sum([upcast(tensors[key], first) for tensors in theirs], own)
            strategy.fill(target.data, value, key)
        self._shelve(checked, made, set_active)
