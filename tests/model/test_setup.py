"""AdapterSetup: for the calling thread, for as long as its block runs."""

from __future__ import annotations

import copy
import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from families import tiny_inputs
from snapshots import changes, output, refused, same_bits, snapshot, stir

from adapterzoo import AdapterSetup, Stack
from adapterzoo.errors import CompositionError, StateError, UnknownNameError
from adapterzoo.model.activation import register

# names that no model of another test has: a setup holds for every model that knows its names
A, B = "setup-a", "setup-b"


@pytest.fixture
def model(tiny):
    model = tiny()
    model.add_adapter(A, "par_bn")
    model.add_adapter(B, "lora")
    for name in (A, B):
        stir(model, name)
    return model


def outputs_of(model):
    """The model's output for each of the setups."""
    kept = model.active_adapters
    found = {}
    for setup in (A, B, None):
        model.set_active_adapters(setup)
        found[setup] = output(model)
    model.set_active_adapters(kept)
    return found


def test_a_setup_holds_until_its_block_ends(model):
    expected, before = outputs_of(model), snapshot(model)
    with AdapterSetup(A) as setup:
        assert setup.adapter_setup == Stack(A)
        assert model.active_adapters == Stack(A)
        assert same_bits(expected[A], output(model))
        with AdapterSetup(B):
            assert same_bits(expected[B], output(model))
            with AdapterSetup(None):
                assert model.active_adapters is None
                assert same_bits(expected[None], output(model))
        assert same_bits(expected[A], output(model))
    assert not changes(before, snapshot(model))


def test_an_exception_ends_it(model):
    model.set_active_adapters(B)
    before = snapshot(model)
    with pytest.raises(KeyboardInterrupt), AdapterSetup(A), AdapterSetup(None):
        raise KeyboardInterrupt
    assert not changes(before, snapshot(model))
    with pytest.raises(IndexError), AdapterSetup(A):
        model(input_ids=torch.tensor([[1000]]))
    assert not changes(before, snapshot(model))
    assert not model._active.call.captures


def test_one_object_can_be_used_again_and_nested(model):
    expected, setup = outputs_of(model), AdapterSetup(A)
    for _ in range(2):
        with setup:
            with setup:
                assert same_bits(expected[A], output(model))
            assert same_bits(expected[A], output(model))
        assert same_bits(expected[None], output(model))


def test_heads_go_with_a_setup(model):
    for name in (A, B, "other"):
        model.add_classification_head(name, num_labels=3 if name == A else 2)
    with AdapterSetup(A):
        assert model.active_head == A
        assert output(model).shape == (2, 3)
    with AdapterSetup(A, head_setup=["other", B]):
        assert model.active_head == ["other", B]
    with AdapterSetup(None, head_setup="other"):
        assert model.active_head == "other"
        assert model.active_adapters is None
    assert model.active_head == "other"


def test_it_holds_for_each_model_that_knows_the_names_and_for_no_other(tiny, model):
    other, stranger = copy.deepcopy(model), tiny()
    stranger.add_adapter("setup-c", "lora")
    with AdapterSetup(A):
        assert model.active_adapters == other.active_adapters == Stack(A)
        assert stranger.active_adapters is None
    with AdapterSetup("setup-c"):
        assert model.active_adapters is None
        assert stranger.active_adapters == Stack("setup-c")
    assert other.active_adapters is None


def test_a_setup_of_two_models_fails_as_one(tiny, model):
    other = tiny()
    other.add_adapter("setup-c", "lora")
    setup = AdapterSetup([A, "setup-c"])
    with refused(model, StateError, "setup-c", A, "ignore_empty=True"), setup:
        pass
    assert other.active_adapters is None


@pytest.mark.parametrize(
    ("name", "hint"),
    [("setup-aa", "Did you mean 'setup-a'?"), ("zzz", "Known adapters and heads: ")],
)
def test_unknown_names_raise_unless_ignored(model, name, hint):
    with refused(model, UnknownNameError, repr(name), hint), AdapterSetup(name):
        pass
    setup = AdapterSetup(A, head_setup=name)
    with refused(model, UnknownNameError, repr(name), "adapter or head"), setup:
        pass
    before = snapshot(model)
    with AdapterSetup(name, ignore_empty=True):
        assert not changes(before, snapshot(model))
    with pytest.raises(CompositionError, match="Write 'a' or Stack"):
        AdapterSetup(5)


def test_setups_do_not_keep_models_alive(tiny):
    model = tiny()
    model.add_adapter("setup-gone", "lora")
    with AdapterSetup("setup-gone"):
        pass
    del model
    gc.collect()
    with pytest.raises(UnknownNameError), AdapterSetup("setup-gone"):
        pass


def test_what_is_in_use_is_not_pulled_away(model):
    hint = "Leave the block"

    def check():
        with refused(model, StateError, f"'{A}'", hint):
            model.delete_adapter(A)
        with refused(model, StateError, f"'{A}'", hint):
            model.add_adapter(A, "lora", overwrite_ok=True)

    for block in (AdapterSetup(A), AdapterSetup(Stack(B, A))):
        with block:
            check()
            # an outer block comes back, so its adapters are in use as well
            with AdapterSetup(None):
                check()
            assert output(model).isfinite().all()
    with AdapterSetup(B), AdapterSetup(None), refused(model, StateError, f"'{B}'", hint):
        model.merge_adapter(B)
    model.merge_adapter(B)
    merged = output(model)
    with AdapterSetup(B):
        assert same_bits(merged, output(model))
        with refused(model, StateError, "reset_adapter()", hint.removesuffix(" first")):
            model.reset_adapter()
    model.reset_adapter()
    model.delete_adapter(A)


def test_a_deleted_head_is_gone_from_every_block(model):
    model.add_classification_head("h")
    model.active_head = None
    with AdapterSetup(A, head_setup="h"):
        with AdapterSetup(B):
            model.delete_head("h")
            assert model.active_head is None
        assert model.active_head is None
        assert output(model).shape[-1] == 32


# --- threads ---


def in_threads(*runs):
    """Run the functions at once, each in a thread of its own; their results."""
    start = threading.Barrier(len(runs))

    def go(run):
        start.wait(timeout=30)
        return run()

    with ThreadPoolExecutor(len(runs)) as pool:
        return [f.result(timeout=60) for f in [pool.submit(go, run) for run in runs]]


def test_threads_with_setups_of_their_own_never_mix(model):
    expected = outputs_of(model)
    shared = AdapterSetup(A)

    def run(setup, block):
        for _ in range(10):
            with block if block is not None else AdapterSetup(setup):
                if not same_bits(expected[setup], output(model)):
                    return False
            if not same_bits(expected[None], output(model)):
                return False
        return True

    runs = [(A, None), (B, None), (None, None), (A, shared), (A, shared)]
    assert all(in_threads(*(lambda r=r: run(*r) for r in runs)))


def test_one_setup_object_in_two_threads_ends_in_each(model):
    # they leave in the order in which they came, so a pile for both would close the wrong one
    setup, entered, inside, left = AdapterSetup(A), *(threading.Event() for _ in range(3))

    def first():
        with AdapterSetup(B):
            with setup:
                entered.set()
                assert inside.wait(timeout=30)
            left.set()
            return model.active_adapters

    def second():
        assert entered.wait(timeout=30)
        with setup:
            inside.set()
            assert left.wait(timeout=30)
            here = model.active_adapters
        return here, model.active_adapters

    assert in_threads(first, second) == [Stack(B), (Stack(A), None)]


def test_a_thread_started_inside_sees_the_default(model):
    model.set_active_adapters(B)
    expected = outputs_of(model)
    with AdapterSetup(A):
        (seen,) = in_threads(lambda: output(model))
        assert same_bits(expected[A], output(model))
    assert same_bits(expected[B], seen)


def test_models_may_come_and_go_while_setups_are_entered(tiny, model):
    made = [copy.copy(tiny()) for _ in range(100)]
    stop, interval = threading.Event(), sys.getswitchinterval()

    def come_and_go():
        while not stop.is_set():
            alive = [copy.copy(m) for m in made]
            for m in alive:
                register(m)

    def enter():
        try:
            for _ in range(20):
                with AdapterSetup(A):
                    assert model.active_adapters == Stack(A)
        finally:
            stop.set()

    sys.setswitchinterval(1e-6)
    try:
        in_threads(enter, come_and_go, come_and_go)
    finally:
        sys.setswitchinterval(interval)


# --- DataParallel ---


def replicate(model):
    """What torch.nn.parallel.replicate does, with the device left out: tensors as attributes."""
    modules = list(model.modules())
    made = {module: module._replicate_for_data_parallel() for module in modules}
    for module in modules:
        for name, child in module._modules.items():
            setattr(made[module], name, None if child is None else made[child])
        for name, parameter in module._parameters.items():
            if parameter is not None:
                setattr(made[module], name, parameter.detach().clone().requires_grad_(True))
        for name, buffer in module._buffers.items():
            made[module]._buffers[name] = buffer
    return made[model]


def test_replicas_at_once_do_not_mix_what_they_tap(model):
    model.set_active_adapters(A)
    rows = [{k: v[i : i + 1] for k, v in tiny_inputs("bert", batch=4).items()} for i in range(4)]
    expected = [output(model, **row) for row in rows]
    replicas = [replicate(model) for _ in rows]
    pairs = list(zip(replicas, rows, strict=True))
    for _ in range(10):
        seen = in_threads(*(lambda m=m, row=row: output(m, **row) for m, row in pairs))
        assert all(same_bits(x, y) for x, y in zip(expected, seen, strict=True))
