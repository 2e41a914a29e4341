"""Add, delete, activate, combine and fuse adapters."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from snapshots import stir
from world import NAMES, ROWS, World, adapter_values, fusion_values, same

from adapterzoo import (
    AdapterConfig,
    Average,
    BatchSplit,
    Fuse,
    Parallel,
    Split,
    Stack,
)

CONFIGS = (
    "lora[r=2]",
    "lora[r=3,alpha=5,dropout=0.1,leave_out=[0]]",
    "lora[r=2,use_rslora=True,attn_matrices=['q','k','v','o'],intermediate_lora=True]",
    "lora[lora_bias=True,use_gating=True,r=2]",
    "lora[r=2,init_weights='bert']",
    "dora[r=2]",
    "dora[r=2,dropout=0.1,convention='adapterhub']",
    "dvora[r=2]",
    "boft",
    "boft[boft_block_size=4,boft_n_butterfly_factor=2]",
    "seq_bn[reduction_factor=8]",
    "double_seq_bn[reduction_factor=8,use_gating=True]",
    "par_bn[reduction_factor=8,scaling='learned',ln_before=True]",
    "par_bn[reduction_factor=8,leave_out=[1]]",
    "adapter_plus[reduction_factor=8]",
    "lora[r=2]|seq_bn[reduction_factor=8]",
)
BOTTLENECKS = ("seq_bn[reduction_factor=8]", "double_seq_bn[reduction_factor=8,use_gating=True]")
STRATEGIES = (
    "linear", "lora_linear_only_negate_b", "lora_delta_w_svd", "lora_linear_sqrt", "cat", "svd",
    "magnitude_prune", "ties", "dare_linear", "dare_ties", "ties_svd", "magnitude_prune_svd",
)  # fmt: skip


def compositions(names: list[str], tokens: int) -> st.SearchStrategy[Any]:
    """Compositions of all kinds, nested; some of them do not fit the model."""
    name = st.sampled_from(names)
    pair = st.lists(name, min_size=1, max_size=3, unique=True)
    stacks = pair.map(lambda ns: Stack(*ns))
    averages = st.builds(
        lambda ns, w, flag: Average(*ns, weights=w[: len(ns)], normalize_weights=flag),
        pair, st.sampled_from([[0.5, 0.25, 0.25], [1.0, 2.0, -0.5]]), st.booleans(),
    )  # fmt: skip
    part = st.one_of(name, st.none(), stacks)
    couple = st.tuples(part, part)
    batch = st.builds(
        lambda c, n: BatchSplit(*c, batch_sizes=[n, ROWS - n]), couple, st.integers(1, ROWS - 1)
    )
    split = st.builds(
        lambda c, n: Split(*c, splits=[n, tokens - n]), couple, st.integers(1, tokens - 1)
    )
    parallel = couple.map(lambda c: Parallel(*c))
    nested = st.one_of(
        st.builds(Stack, name, st.one_of(batch, split, averages)),
        st.builds(Parallel, averages, stacks),
        st.builds(
            lambda a, b, n: BatchSplit(a, b, batch_sizes=[n, ROWS - n]),
            st.one_of(averages, split), part, st.integers(1, ROWS - 1),
        ),
    )  # fmt: skip
    one = name.map(Stack)
    return st.one_of(one, stacks, averages, batch, split, parallel, nested)


class AdapterRules(World):
    """Rules about adapters by name."""

    def setups(self) -> st.SearchStrategy[Any]:
        tokens = self.base_output()[0].shape[1]
        return compositions(list(self.ledger.adapters), tokens)

    @rule(
        name=st.sampled_from(NAMES), config=st.sampled_from(CONFIGS), set_active=st.booleans(),
        seed=st.integers(1, 99),
    )  # fmt: skip
    def add(self, name: str, config: str, set_active: bool, seed: int) -> None:
        def call() -> None:
            self.model.add_adapter(name, config, set_active=set_active)

        if name in self.ledger.adapters:
            self.refused("add_adapter of a name that is taken", call)
        elif self.attempt("add_adapter", call):
            self.entered(name, AdapterConfig.load(config), set_active)
            self.fresh_is_identity(name)
            stir(self.model, name, seed, std=0.05)
            self.ledger.values[name] = adapter_values(self.model, name)

    def entered(self, name: str, config: Any, set_active: bool = False) -> None:
        """The ledger of an adapter that has come, at the end of the list."""
        book = self.ledger
        book.adapters.pop(name, None)
        book.adapters[name] = config
        book.values[name] = adapter_values(self.model, name)
        if set_active:
            book.activate(Stack(name))

    def fresh_is_identity(self, name: str) -> None:
        config = self.model.adapters_config[name]
        if config.starts_as_identity and not self.ledger.merged:
            same(self.alone(name), self.base_output(), f"fresh {config!r}")

    @precondition(lambda self: self.started and self.ledger.adapters)
    @rule(data=st.data(), config=st.sampled_from(CONFIGS), set_active=st.booleans())
    def overwrite(self, data: Any, config: str, set_active: bool) -> None:
        name = data.draw(st.sampled_from(list(self.ledger.adapters)))
        if self.held(name):
            self.refused(
                "add_adapter over one that is held",
                lambda: self.model.add_adapter(name, config, overwrite_ok=True),
            )
        elif self.attempt(
            "add_adapter over another",
            lambda: self.model.add_adapter(name, config, overwrite_ok=True, set_active=set_active),
        ):
            self.entered(name, AdapterConfig.load(config), set_active)
            stir(self.model, name, 7, std=0.05)
            self.ledger.values[name] = adapter_values(self.model, name)

    @precondition(lambda self: self.started and self.ledger.merged)
    @rule(data=st.data())
    def overwrite_beside_merged(self, data: Any) -> None:
        """DoRA does not act on merged weights: the old adapter stays where it was."""
        free = self.free_adapters()
        if free:
            name = data.draw(st.sampled_from(free))
            if self.attempt(
                "add_adapter over another",
                lambda: self.model.add_adapter(
                    name, "dora[r=2]", overwrite_ok=True, set_active=True
                ),
            ):
                self.entered(name, AdapterConfig.load("dora[r=2]"), True)

    def held(self, name: str) -> bool:
        return name not in self.free_adapters()

    @precondition(lambda self: self.started and self.ledger.adapters)
    @rule(data=st.data())
    def delete(self, data: Any) -> None:
        book, model = self.ledger, self.model
        name = data.draw(st.sampled_from(list(book.adapters)))
        if self.held(name):
            self.refused("delete_adapter of one that is held", lambda: model.delete_adapter(name))
            return
        active = book.active
        acted = active is not None and name in active.flatten()
        self.must("delete_adapter", lambda: model.delete_adapter(name))
        del book.adapters[name], book.values[name]
        if not acted:
            return
        left = model.active_adapters
        names = [n for n in active.flatten() if n != name] if active is not None else []
        if isinstance(active, Stack) and all(isinstance(c, str) for c in active):
            book.active = Stack(*names) if names else None
        else:
            # what a composition of other kinds becomes: nothing of what is gone, no other name
            assert set(left.flatten() if left else ()) <= set(names), f"{active!r} → {left!r}"
            book.active = left

    @precondition(lambda self: self.started and self.ledger.adapters)
    @rule(data=st.data(), skipped=st.sampled_from([(), (), (0,), (1,)]))
    def activate(self, data: Any, skipped: tuple[int, ...]) -> None:
        setup = data.draw(self.setups(), label="setup")

        def call() -> None:
            self.model.set_active_adapters(setup, skip_layers=skipped or None)
            try:
                self.run()
            except BaseException:
                # a composition that fits the layers and not the batch stays active
                self.model.set_active_adapters(before, skip_layers=self.ledger.skipped)
                self.model.active_head = list(self.ledger.answering)
                raise

        before = self.ledger.active
        if self.attempt(f"activate {type(setup).__name__}", call):
            self.ledger.activate(setup, skipped)

    @precondition(lambda self: self.started)
    @rule()
    def deactivate(self) -> None:
        self.must("set_active_adapters(None)", lambda: self.model.set_active_adapters(None))
        self.ledger.activate(None)

    @precondition(lambda self: self.started and self.ledger.adapters)
    @rule(
        data=st.data(), name=st.sampled_from(NAMES), strategy=st.sampled_from(STRATEGIES),
        overwrite=st.booleans(),
    )  # fmt: skip
    def average(self, data: Any, name: str, strategy: str, overwrite: bool) -> None:
        book = self.ledger
        some = data.draw(
            st.lists(st.sampled_from(list(book.adapters)), min_size=1, max_size=3, unique=True)
        )
        options: dict[str, Any] = {}
        if strategy in ("svd", "lora_delta_w_svd", "ties_svd", "magnitude_prune_svd"):
            options["svd_rank"] = 2
        if "ties" in strategy or "prune" in strategy or "dare" in strategy:
            options["density"] = 0.5
        if "dare" in strategy:
            options["seed"] = 3
        weights = [1.0, 0.5, -0.25][: len(some)]
        if self.attempt(
            f"average_adapter {strategy}",
            lambda: self.model.average_adapter(
                name, some, weights, strategy, overwrite_ok=overwrite, **options
            ),
        ):
            assert overwrite or name not in book.adapters, "a taken name was overwritten"
            self.entered(name, self.model.adapters_config[name])
            if len(some) == 1 and strategy in ("linear", "cat") and not book.merged:
                from world import near

                near(self.alone(name), self.alone(some[0]), f"{strategy} of one adapter")

    # --- fusion ---

    @precondition(lambda self: self.started and len(self.ledger.adapters) > 1)
    @rule(data=st.data(), set_active=st.booleans())
    def fuse(self, data: Any, set_active: bool) -> None:
        book = self.ledger
        some = data.draw(
            st.lists(st.sampled_from(list(book.adapters)), min_size=2, max_size=2, unique=True)
        )
        torch.manual_seed(0)
        if self.attempt(
            "add_adapter_fusion",
            lambda: self.model.add_adapter_fusion(some, set_active=set_active),
        ):
            key = ",".join(some)
            book.fusions[key] = tuple(some)
            book.fusion_values[key] = fusion_values(self.model, key)
            if set_active:
                book.activate(Fuse(*some))

    @precondition(lambda self: self.started and self.ledger.fusions)
    @rule(data=st.data())
    def delete_fusion(self, data: Any) -> None:
        book = self.ledger
        key = data.draw(st.sampled_from(list(book.fusions)))
        acted = "Fuse" in repr(book.active)
        self.must("delete_adapter_fusion", lambda: self.model.delete_adapter_fusion(key))
        del book.fusions[key], book.fusion_values[key]
        if acted:
            assert key not in book.fusions, key
            book.active = self.model.active_adapters

    @precondition(lambda self: self.started and self.ledger.fusions)
    @rule(data=st.data())
    def activate_fusion(self, data: Any) -> None:
        key = data.draw(st.sampled_from(list(self.ledger.fusions)))
        setup = Fuse(*self.ledger.fusions[key])
        if self.attempt("activate Fuse", lambda: self.model.set_active_adapters(setup)):
            self.ledger.activate(setup)

    @precondition(lambda self: self.started and len(self.ledger.adapters) < 2)
    @rule()
    def add_two_bottlenecks(self) -> None:
        """What a fusion needs is too rare otherwise."""
        for name in ("left", "right"):
            if name not in self.ledger.adapters:
                self.must("add_adapter", lambda n=name: self.model.add_adapter(n, BOTTLENECKS[0]))
                stir(self.model, name, 5, std=0.05)
                self.entered(name, AdapterConfig.load(BOTTLENECKS[0]))
