"""Adapters that become one: averages, task arithmetic, and PEFT's ways of merging them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from adapterzoo import inject
from adapterzoo.averaging import Combination, combination, weighted
from adapterzoo.configs import AdapterConfig, Placement
from adapterzoo.contracts import Adapter
from adapterzoo.errors import CompositionError, listing, names_call
from adapterzoo.inject.building import at_hand
from adapterzoo.methods import generator, undrawn
from adapterzoo.names import check_name

from . import static_heads
from .sharding import refuse_if_sharded
from .tables import TablesMixin


class AveragingMixin(TablesMixin):
    """`average_adapter` and PEFT's `add_weighted_adapter`, once for all methods."""

    @names_call
    @torch.no_grad()
    def average_adapter(
        self,
        adapter_name: str,
        adapter_list: Sequence[str] | Mapping[str, float],
        weights: Sequence[float] | None = None,
        combine_strategy: str = "linear",
        normalize_weights: bool = True,
        overwrite_ok: bool = False,
        set_active: bool = False,
        svd_rank: int | None = None,
        *,
        svd_clamp: float | None = None,
        svd_full_matrices: bool = False,
        svd_driver: str | None = None,
        density: float | None = None,
        majority_sign_method: str = "total",
        seed: int | None = None,
    ) -> None:
        """Add an adapter that several others become; they stay as they are.

        With weights w, parameters θ, and θ₀ the value that changes nothing (1 for BOFT's scale,
        ‖W‖ for DoRA's magnitudes, 0 for all others), the strategies of `adapters` are

        ```
        linear                      θ = θ₀ + Σ wᵢ (θᵢ − θ₀)       any method
        lora_linear_only_negate_b   A = Σ |wᵢ| Aᵢ, B = Σ wᵢ Bᵢ    LoRA, DoRA
        lora_delta_w_svd            B A ≈ Σ wᵢ sᵢ Bᵢ Aᵢ, of rank `svd_rank`
        ```

        and those of PEFT, of LoRA and DoRA with s = 1 in the result and σᵢ = √|wᵢ sᵢ|,

        ```
        lora_linear_sqrt            A = Σ ±σᵢ Aᵢ, B = Σ σᵢ Bᵢ, ± the sign of wᵢ sᵢ (PEFT's "linear")
        cat                         B A = Σ wᵢ sᵢ Bᵢ Aᵢ exactly, the ranks add up
        svd                         B A ≈ the same, of rank `svd_rank`, or the largest of them
        magnitude_prune             as lora_linear_sqrt, of the `density` largest entries of each
        dare_linear                 the same of entries kept at random, divided by density
        ties, dare_ties             the pruned ones, joined where signs agree: `averaging.elected`
        …_svd                       the same on the changes sᵢ Bᵢ Aᵢ, which "svd" makes factors of
        ```

        A negative weight negates what the adapter does in "cat", "svd", "lora_linear_sqrt" and
        "lora_linear_only_negate_b"; in "linear" it turns the sign of A and of B, which cancel.

        Differs from adapters: "lora_delta_w_svd" counts the scaling in, so that the change keeps
        its size at any rank; "linear" turns about θ₀, which is the same for weights of sum 1; a
        dict has the weights as its values.

        Args:
            adapter_name: of the result.
            adapter_list: the adapters, or a dict from adapters to weights.
            weights: one for each, of any sign; None: equal ones of sum 1.
            combine_strategy: see above.
            normalize_weights: whether weights are divided by their sum.
            overwrite_ok: whether an adapter of the name may be replaced, also one of the list.
            set_active: whether the result becomes the active adapter.
            svd_rank: of the result.
            svd_clamp: quantile, 0 to 1, at which entries of A and B are cut.
            svd_full_matrices: whether singular vectors are computed that nobody reads.
            svd_driver: of cuSOLVER: "gesvd", "gesvdj" or "gesvda".
            density: share of the entries that stay, above 0 to 1.
            majority_sign_method: "total": the sign of the sum; "frequency": that of the majority.
            seed: makes what is kept at random reproducible, on every device; None draws from
                torch's default generator.

        Raises:
            CompositionError: the adapters do not fit each other or the strategy, or the result is
                not finite; nothing has changed, as with every error.
            ConfigError: a value is not legal, or has no effect.
            DuplicateNameError: the name is taken.
            StateError: the model is sharded, or an adapter to be replaced is in use.
            UnknownNameError: there is no adapter or strategy of a name.
        """
        call = f"average_adapter({adapter_name!r})"
        check_name(call, adapter_name)
        names, own = weighted(adapter_list, weights, normalize_weights)
        strategy = combination(
            combine_strategy, svd_rank=svd_rank, svd_clamp=svd_clamp,
            svd_full_matrices=svd_full_matrices, svd_driver=svd_driver, density=density,
            majority_sign_method=majority_sign_method, seed=seed,
        )  # fmt: skip
        self._combine(adapter_name, names, own, strategy, seed, overwrite_ok, set_active)

    @names_call
    @torch.no_grad()
    def add_weighted_adapter(
        self,
        adapters: Sequence[str],
        weights: Sequence[float],
        adapter_name: str,
        combination_type: str = "svd",
        svd_rank: int | None = None,
        svd_clamp: float | None = None,
        svd_full_matrices: bool = False,
        svd_driver: str | None = None,
        density: float | None = None,
        majority_sign_method: str = "total",
        seed: int | None = None,
    ) -> None:
        """`average_adapter` in the words of PEFT: weights are taken as they are.

        "linear" is PEFT's, `combine_strategy="lora_linear_sqrt"`; all other names are the same.

        Differs from PEFT: DoRA's magnitudes take part; with `use_rslora` the result is not √r
        times too large; one adapter alone is combined as `combination_type` says; a name that is
        taken is an error; a rank is that of each layer, with `rank_pattern`.

        Args:
            adapters: the adapters.
            weights: one for each, of any sign.
            adapter_name: of the result.
            combination_type: see `average_adapter`.
            svd_rank: the same.
            svd_clamp: the same.
            svd_full_matrices: the same.
            svd_driver: the same.
            density: the same.
            majority_sign_method: the same.
            seed: the same.

        Raises:
            CompositionError: as `average_adapter`.
            ConfigError: the same.
            DuplicateNameError: the same.
            StateError: the same.
            UnknownNameError: the same.
        """
        call = f"add_weighted_adapter({adapter_name!r})"
        check_name(call, adapter_name)
        names, own = weighted(adapters, weights, normalize=False)
        # what the word means to PEFT has another name here
        name = "lora_linear_sqrt" if combination_type == "linear" else combination_type
        strategy = combination(
            name, svd_rank=svd_rank, svd_clamp=svd_clamp,
            svd_full_matrices=svd_full_matrices, svd_driver=svd_driver, density=density,
            majority_sign_method=majority_sign_method, seed=seed,
        )  # fmt: skip
        self._combine(adapter_name, names, own, strategy, seed)

    def _combine(
        self,
        name: str,
        names: Sequence[str],
        weights: Sequence[float],
        strategy: Combination,
        seed: int | None,
        overwrite_ok: bool = False,
        set_active: bool = False,
    ) -> None:
        call = f"average_adapter({name!r})"
        refuse_if_sharded(self, call, "Write it before fully_shard(model).")
        configs = [self._find(each, call).config for each in names]
        self._refuse_taken(name, call, overwrite_ok)
        if own := [each for each in names if self._tables_of(each)]:
            raise CompositionError(
                f"{call}: {listing(own)} has trained embeddings, and tables of tokens are not "
                f"averaged. Write set_active_adapters(Average('a', 'b'))."
            )
        kinds = dict.fromkeys(config.architecture for config in configs)
        if len(kinds) > 1:
            raise CompositionError(
                f"{call}: the adapters are of the methods {', '.join(kinds)}, which have no "
                f"parameters in common. Write set_active_adapters(Average('a', 'b')), or the names "
                f"of adapters of one method."
            )
        config = type(configs[0]).combined(configs, strategy, self.anatomy)
        made = self._combined(config, names, weights, strategy, seed)
        head = static_heads.combined(self, names, weights)
        self._bring_in(name, config, made, set_active)
        if head:
            static_heads.put(self, name, head)

    def _combined(
        self,
        config: AdapterConfig,
        names: Sequence[str],
        weights: Sequence[float],
        strategy: Combination,
        seed: int | None,
    ) -> dict[str, tuple[Adapter, list[Placement]]]:
        """The modules of the result; the model has not changed."""
        # they get their values from others: do not disturb the caller's random numbers
        with undrawn(), torch.random.fork_rng(devices=()):
            made = self._make(config)
        sources: list[dict[str, Any]] = [dict(self.adapter_modules(each)) for each in names]
        for path, (adapter, placements) in made.items():
            if not placements:
                _share(adapter, [modules[path] for modules in sources if path in modules], strategy)
                continue
            there = [i for i, modules in enumerate(sources) if path in modules]
            layer = self._backbone.get_submodule(path)
            with at_hand(layer):
                inject.combine(
                    layer,
                    adapter,
                    [sources[i][path] for i in there],
                    [weights[i] for i in there],
                    strategy.drawing(generator(seed, path)),
                    self._adapter_state.originals.get(path, {}),
                )
        return made


def _share(made: nn.Module, others: Sequence[nn.Module], strategy: Combination) -> None:
    """Give the average what the layers of each adapter share, which must be the same for all."""
    first = others[0].state_dict()
    for other in others[1:]:
        state = other.state_dict()
        if any(not torch.equal(first[key], state[key].to(first[key].device)) for key in first):
            raise CompositionError(
                f"the layers of each adapter share tensors, {listing(first)}, "
                f"and these differ between the adapters. Train them from the same shared tensors, "
                f"or write set_active_adapters(Average('a', 'b'))."
            )
    made.load_state_dict(first)
