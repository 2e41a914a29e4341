"""The machine finds bugs that are planted on purpose, within a fixed number of steps."""

from __future__ import annotations

import pytest
import world
from adapter_rules import AdapterRules
from bad_calls import BadCalls
from call_rules import CallRules
from file_rules import FileRules
from head_rules import HeadRules
from machine import run_seed
from weight_rules import WeightRules

from adapterzoo import AdapterSetup
from adapterzoo.auto import AdapterModel
from adapterzoo.errors import AdapterZooError
from adapterzoo.formats import fit
from adapterzoo.inject.adapted import AdapterDict
from adapterzoo.model import AdapterModelMixin, batches, checkpointing

# of 25 steps each; most bugs are found within the first seed
SEEDS, SEQUENCES = 12, 10


class Small(AdapterRules, HeadRules):
    families = ("bert",)


class WithWeights(AdapterRules, WeightRules):
    """Without heads: with fewer rules, merging and resetting follow each other more often."""

    families = ("bert",)


class WithFiles(Small, FileRules):
    pass


class WithCalls(Small, CallRules):
    pass


class WithBadCalls(Small, BadCalls):
    pass


BUGS = {}


def bug(machine):
    """Register a bug, and which machine is to find it."""

    def register(plant):
        BUGS[plant.__name__] = machine, plant
        return plant

    return register


@bug(Small)
def a_deleted_head_stays_in_the_state_dict(patch):
    right = AdapterModel.delete_head

    def delete_head(self, head_name):
        head = self.get_head(head_name)
        right(self, head_name)
        self.add_module("spare", head)

    patch.setattr(AdapterModel, "delete_head", delete_head)


@bug(Small)
def a_deleted_head_stays_in_the_config(patch):
    right = AdapterModel.delete_head

    def delete_head(self, head_name):
        listed = dict(self.config.prediction_heads)
        right(self, head_name)
        self.config.prediction_heads = listed

    patch.setattr(AdapterModel, "delete_head", delete_head)


@bug(WithWeights)
def a_reset_does_not_restore(patch):
    right = AdapterModelMixin.reset_adapter

    def reset_adapter(self):
        for kept in self._adapter_state.originals.values():
            for tensor in kept.values():
                tensor.mul_(1 + 1e-3)
        right(self)

    patch.setattr(AdapterModelMixin, "reset_adapter", reset_adapter)


@bug(WithFiles)
def a_save_drops_a_tensor(patch):
    right = checkpointing.tensors_of

    def tensors_of(model, name):
        tensors = right(model, name)
        tensors.pop(max(tensors))
        return tensors

    patch.setattr(checkpointing, "tensors_of", tensors_of)


@bug(WithFiles)
def a_load_rounds_values(patch):
    right = fit.fill

    def fill(module, tensors):
        right(module, {k: t.half().to(t.dtype) for k, t in tensors.items()})

    patch.setattr(fit, "fill", fill)


@bug(WithCalls)
def rows_of_a_mixed_batch_are_exchanged(patch):
    right = batches._plan_of_names

    def plan_of_names(model, adapter_names, one_head):
        known = all(n is None or n in model.adapters_config for n in adapter_names)
        return right(model, adapter_names[::-1] if known else adapter_names, one_head)

    patch.setattr(batches, "_plan_of_names", plan_of_names)


@bug(WithCalls)
def a_context_left_by_an_exception_stays(patch):
    right, left_open = AdapterSetup.__exit__, []

    def leave(self, kind, error, trace):
        if kind is None:
            right(self, kind, error, trace)
        else:
            # a context that nothing holds is left when it is collected
            left_open.append(self)

    patch.setattr(AdapterSetup, "__exit__", leave)


@bug(WithWeights)
def training_thaws_a_base_weight(patch):
    right = AdapterModelMixin.train_adapter

    def train_adapter(self, adapter_setup, train_embeddings=False):
        right(self, adapter_setup, train_embeddings)
        next(self.base_model.parameters()).requires_grad_(True)

    patch.setattr(AdapterModelMixin, "train_adapter", train_adapter)


@bug(WithWeights)
def a_copy_shares_its_adapters(patch):
    # an empty one is that of the model that all others are copied from
    patch.setattr(
        AdapterDict,
        "__deepcopy__",
        lambda self, memo: self if len(self) else AdapterDict(),
        raising=False,
    )


@bug(WithBadCalls)
def a_refused_activation_changes_what_is_active(patch):
    right = AdapterModelMixin.set_active_adapters

    def set_active_adapters(self, adapter_setup, skip_layers=None):
        try:
            right(self, adapter_setup, skip_layers)
        except KeyError:
            right(self, next(iter(self.adapters_config), None))
            raise

    patch.setattr(AdapterModelMixin, "set_active_adapters", set_active_adapters)


@bug(WithBadCalls)
def an_unknown_name_is_accepted(patch):
    right = AdapterModelMixin.set_active_adapters

    def set_active_adapters(self, adapter_setup, skip_layers=None):
        right(self, None if "nobody" in repr(adapter_setup) else adapter_setup, skip_layers)

    patch.setattr(AdapterModelMixin, "set_active_adapters", set_active_adapters)


@pytest.fixture(autouse=True)
def _models():
    """A planted bug may spoil the models that are made once."""
    yield
    world._MADE.clear()


def run_seeds(machine):
    for number in range(SEEDS):
        run_seed(number, machine, SEQUENCES, shrinks=False)


@pytest.mark.sweep
@pytest.mark.parametrize("name", BUGS)
def test_the_machine_finds(name, monkeypatch):
    machine, plant = BUGS[name]
    plant(monkeypatch)
    # by a rule, or by an error of the library where there should be none: both are findings
    with pytest.raises((AssertionError, AdapterZooError, LookupError)):
        run_seeds(machine)


@pytest.mark.sweep
@pytest.mark.parametrize("machine", sorted({b[0] for b in BUGS.values()}, key=lambda m: m.__name__))
def test_the_machine_finds_nothing_where_nothing_is_planted(machine):
    run_seed(0, machine, SEQUENCES, shrinks=False)


@pytest.mark.sweep
def test_a_seed_gives_the_same_steps_every_time():
    def steps():
        seen = []

        class Recorded(Small):
            def count(self, operation):
                seen.append(operation)
                super().count(operation)

        run_seed(3, Recorded, 3, shrinks=False)
        return seen

    assert steps() == steps()
