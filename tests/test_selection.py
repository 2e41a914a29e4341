"""ActiveState: which plan a thread sees, and when."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch

from adapterzoo.composition import Stack
from adapterzoo.composition.compile import SiteStep
from adapterzoo.config import AdapterConfig
from adapterzoo.runtime import ActiveState, Default, Plan
from adapterzoo.testing import Case

A, B, C = (Plan(Stack(name), sites={"at": SiteStep((0,), (name,))}) for name in "abc")


def in_threads(*runs) -> list:
    """What each of the functions returns, run at once; their exceptions are raised here."""
    results: list = [None] * len(runs)

    def call(i: int, run) -> None:
        try:
            results[i] = (run(), None)
        except BaseException as error:  # noqa: BLE001  handed to the caller
            results[i] = (None, error)

    threads = [threading.Thread(target=call, args=(i, run)) for i, run in enumerate(runs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for _, error in results:
        if error is not None:
            raise error
    return [value for value, _ in results]


def test_the_default_holds_for_every_thread():
    selection = ActiveState(Default())
    assert selection.plan.setup is None
    assert in_threads(lambda: selection.plan) == [Plan()]
    in_threads(lambda: setattr(selection.default, "plan", A))
    assert selection.plan is A
    assert in_threads(lambda: selection.plan) == [A]
    with selection.overridden(B):
        assert in_threads(lambda: selection.plan) == [A]


def test_an_override_ends_with_its_block():
    selection = ActiveState(Default())
    selection.default.plan = A
    with selection.overridden(B):
        assert selection.plan is B
        with selection.overridden(C):
            assert selection.plan is C
            with selection.overridden(Plan()):
                assert selection.plan.setup is None
        assert selection.plan is B
    assert selection.plan is A


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit, StopIteration])
def test_an_exception_ends_it_too(error):
    selection = ActiveState(Default())
    selection.default.plan = A
    raised = error("inside")
    caught = None
    try:
        with selection.overridden(B), selection.overridden(C):
            selection.call.captures["at"] = torch.zeros(1)
            raise raised
    except BaseException as seen:  # noqa: BLE001  looked at below
        caught = seen
    assert caught is raised
    assert selection.plan is A
    # no tensor of a broken forward is kept
    assert not selection.call.captures


def test_a_pinned_selection_keeps_what_its_thread_saw():
    selection = ActiveState(Default())
    selection.default.plan = A
    with selection.overridden(B):
        pinned = selection.pinned()
        # one for all layers of a replica, so that taps find their readers
        assert selection.pinned() is pinned
    assert selection.pinned() is not pinned
    selection.default.plan = C
    assert pinned.plan == B
    assert in_threads(lambda: pinned.plan) == [B]
    assert selection.pinned().plan == C


@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_what_is_copied_together_stays_together(how):
    selection = ActiveState(Default())
    one, other = how([selection, selection])
    assert one is other


def test_what_is_active_in_a_model_acts_in_its_threads():
    # a model as it was made: a copy would have got its default in another way
    case = Case(AdapterConfig.load("lora"))
    model, x = case.trained("a"), case.input(2, 5)
    base = model(x)
    model.set_active_adapters("a")
    (seen,) = in_threads(lambda: model(x))
    assert torch.equal(seen, model(x))
    assert not torch.equal(seen, base)
