"""What is trained: these adapters and their heads, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self, cast

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from adapterzoo.composition import Composition, fusion_key, parse
from adapterzoo.errors import StateError
from adapterzoo.inject.quantised import packing_of, settle
from adapterzoo.methods._table import Table

from . import static_heads
from .sharding import refuse_if_sharded, rest
from .tables import TablesMixin


class TrainingMixin(TablesMixin):
    """`train_adapter` and `freeze_model`."""

    def train_adapter(self, adapter_setup: object, train_embeddings: bool = False) -> None:
        """Freeze everything but these adapters and the active heads, and activate them.

        In a model with a static head an adapter gets its own copy of it, and that is trained.

        Args:
            adapter_setup: a name, a list of names or a composition.
            train_embeddings: whether the embeddings of tokens are trained as well. Each adapter
                gets a table of its own, which acts, is saved and is deleted with it; the base
                model's stays as it is. A language modelling head that is tied to the embeddings
                shares the table where it bears the adapter's name. Output layers of heads that
                are not tied are trained with it, and are frozen without it.

        Raises:
            CompositionError: it is no composition.
            StateError: it names no adapter, or one that cannot have embeddings of its own.
            UnknownNameError: there is no adapter of this name.
        """
        # what a forward of a sharded model has left whole is not what an optimizer shall get
        rest(self)
        setup = parse(adapter_setup)
        if setup is None or not setup.flatten():
            raise StateError(
                f"train_adapter({adapter_setup!r}): there is no adapter to train. Write "
                f"add_adapter('my_task', 'seq_bn') and then train_adapter('my_task')."
            )
        for name in setup.flatten():
            self._find(name, f"train_adapter({adapter_setup!r})")
            self._refuse_if_merged(name, f"train_adapter({adapter_setup!r})")
        if train_embeddings:
            call = f"train_adapter({adapter_setup!r}, train_embeddings=True)"
            for name in setup.flatten():
                if not self._tables_of(name):
                    refuse_if_sharded(self, call, "Write it before fully_shard(model).")
                self._check_table(name, call)
        self._prepare_heads(setup, f"train_adapter({adapter_setup!r})")
        self.set_active_adapters(setup)
        for name in setup.flatten() if train_embeddings else ():
            self._add_table(name)
        model = cast("nn.Module", self)
        model.train()
        settle(model)
        self.freeze_model(True)
        for name in setup.flatten():
            for _, module in self.adapter_modules(name):
                module.requires_grad_(train_embeddings or not isinstance(module, Table))
        self._train_heads(train_embeddings)
        self._hold_statistics()

    def train(self, mode: bool = True) -> Self:
        """Set the mode, as torch does; frozen norms with running statistics stay in evaluation.

        They are part of the base model, and would be changed by every forward in training.

        Args:
            mode: whether to train.
        """
        cast("Any", super()).train(mode)
        if mode and self.has_adapters():
            self._hold_statistics()
        return self

    def _hold_statistics(self) -> None:
        for module in self._backbone.modules():
            tracks = isinstance(module, _NormBase) and module.track_running_stats
            if tracks and not any(p.requires_grad for p in module.parameters(recurse=False)):
                module.training = False

    def freeze_model(self, freeze: bool = True) -> None:
        """Freeze the base model and all adapters, or make the base model trainable.

        Args:
            freeze: True sets `requires_grad` of all of them to False; False sets it to True for
                the base model's own parameters.
        """
        rest(self)
        adapters = {
            id(p) for name in self._adapter_state.records for p in self._parameters_of(name)
        }
        adapters |= {
            id(p) for name in self._adapter_state.fusions for p in self._fusion_parameters(name)
        }
        for parameter in self._backbone.parameters():
            # quantised weights have no gradient, not even those that call themselves floats
            may_train = parameter.is_floating_point() and packing_of(parameter) is None
            may_train = may_train and id(parameter) not in adapters
            if freeze or may_train:
                parameter.requires_grad_(not freeze)

    def _fusion_parameters(self, name: str) -> Iterator[nn.Parameter]:
        """The parameters of the fusion layers of a name."""
        for path in self._adapter_state.fusions[name].paths:
            layer = cast("Any", self._backbone.get_submodule(path))
            yield from layer.adapters[fusion_key(name)].parameters()

    def _prepare_heads(self, setup: Composition, call: str) -> None:
        """Check that `_train_heads` will succeed; nothing changes."""
        static_heads.prepare(self, setup, call)

    def _train_heads(self, train_embeddings: bool = False) -> None:
        """Train the copies that the active adapters have of a static head, made here if need be."""
        trained = list(static_heads.trained(self, self._active.default.plan.setup))
        backbone = {id(p) for p in self._backbone.parameters()}
        for parameter in cast("nn.Module", self).parameters():
            if id(parameter) not in backbone:
                parameter.requires_grad_(False)
        for parameter in trained:
            parameter.requires_grad_(True)
