"""AdapterSetup in asyncio tasks: each task sees its own, compiled or not."""

from __future__ import annotations

import asyncio
import copy
import pickle

import pytest
import torch
from families import tiny_inputs
from snapshots import output, same_bits, stir
from torch._dynamo.exc import Unsupported

from adapterzoo import AdapterSetup, Stack
from adapterzoo.errors import StateError

# names that no model of another test has: a setup holds for every model that knows its names
A, B = "tasks-a", "tasks-b"


@pytest.fixture
def model(tiny):
    model = tiny()
    for name, config in ((A, "par_bn"), (B, "lora")):
        model.add_adapter(name, config)
        stir(model, name)
    return model


@pytest.fixture
def compiled(model):
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=32):
        yield torch.compile(model, fullgraph=True, backend="eager")
    torch._dynamo.reset()


def outputs_of(model):
    """The model's output for each of the setups, each set as the default of all threads."""
    found = {}
    for setup in (A, B, None):
        model.set_active_adapters(setup)
        found[setup] = output(model)
    return found


def test_two_tasks_that_interleave_see_their_own(model):
    expected = outputs_of(model)

    async def use(setup, mine, other):
        seen = []
        with AdapterSetup(setup):
            mine.set()
            await other.wait()
            seen.append(output(model))
            with AdapterSetup(None):
                await asyncio.sleep(0)
                seen.append(output(model))
            seen.append(output(model))
        await asyncio.sleep(0)
        return [*seen, output(model)]

    async def main():
        a, b = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(use(A, a, b), use(B, b, a))

    for setup, seen in zip((A, B), asyncio.run(main()), strict=True):
        for want, got in zip((setup, None, setup, None), seen, strict=True):
            assert same_bits(expected[want], got)
    assert model._active.overrides == []


def test_a_task_without_a_setup_does_not_see_that_of_another(model):
    expected = outputs_of(model)
    model.set_active_adapters(B)

    async def inside(entered, left):
        with AdapterSetup(A):
            entered.set()
            await left.wait()

    async def main():
        entered, left = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(inside(entered, left))
        await entered.wait()
        seen = output(model)
        left.set()
        await task
        return seen

    assert same_bits(expected[B], asyncio.run(main()))


def test_tasks_and_threads_started_inside_take_the_setup_along(model):
    expected = outputs_of(model)

    async def child():
        await asyncio.sleep(0)
        first = output(model)
        with AdapterSetup(B):
            await asyncio.sleep(0)
            second = output(model)
        return first, second, output(model)

    async def main():
        with AdapterSetup(A):
            children = await asyncio.gather(child(), child())
            thread = await asyncio.to_thread(output, model)
            return children, thread, output(model)

    children, thread, own = asyncio.run(main())
    for seen in children:
        assert all(same_bits(expected[s], o) for s, o in zip((A, B, A), seen, strict=True))
    assert same_bits(expected[A], thread)
    assert same_bits(expected[A], own)


def test_one_setup_object_in_two_tasks_ends_in_each(model):
    setup = AdapterSetup(A)

    async def first(entered, inside, left):
        with AdapterSetup(B):
            with setup:
                entered.set()
                await inside.wait()
            left.set()
            return model.active_adapters

    async def second(entered, inside, left):
        await entered.wait()
        with setup:
            inside.set()
            await left.wait()
            here = model.active_adapters
        return here, model.active_adapters

    async def main():
        events = asyncio.Event(), asyncio.Event(), asyncio.Event()
        return await asyncio.gather(first(*events), second(*events))

    assert asyncio.run(main()) == [Stack(B), (Stack(A), None)]


def test_tasks_under_a_setup_of_synchronous_code(model):
    expected = outputs_of(model)

    async def use():
        with AdapterSetup(B):
            await asyncio.sleep(0)
            return output(model)

    async def main():
        return [*await asyncio.gather(use(), use()), output(model)]

    with AdapterSetup(A):
        *inner, outer = asyncio.run(main())
        assert all(same_bits(expected[B], seen) for seen in inner)
        assert same_bits(expected[A], outer)
        assert same_bits(expected[A], output(model))
    assert same_bits(expected[None], output(model))


def test_an_adapter_in_use_by_a_task_is_not_deleted(model):
    async def inside(entered, left):
        with AdapterSetup(A):
            entered.set()
            await left.wait()

    async def main():
        entered, left = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(inside(entered, left))
        await entered.wait()
        with pytest.raises(StateError, match="Leave the block"):
            model.delete_adapter(A)
        left.set()
        await task

    asyncio.run(main())
    model.delete_adapter(A)


def test_what_was_deleted_meanwhile_never_runs_as_the_base_model(model):
    async def late(go):
        await go.wait()
        with pytest.raises(StateError, match=f"'{A}' was deleted"):
            output(model)
        with AdapterSetup(B):
            return output(model)

    async def main():
        go = asyncio.Event()
        with AdapterSetup(A):
            task = asyncio.create_task(late(go))
        model.delete_adapter(A)
        go.set()
        return await task

    seen = asyncio.run(main())
    model.set_active_adapters(B)
    assert same_bits(output(model), seen)


def test_copies_inside_a_task_keep_the_default(model):
    async def main():
        with AdapterSetup(A):
            return copy.deepcopy(model), pickle.loads(pickle.dumps(model._active))

    made, selection = asyncio.run(main())
    assert made.active_adapters is None
    assert selection.plan.setup is None


# --- compiled ---


def run(compiled):
    with torch.no_grad():
        return compiled(**tiny_inputs("bert"))[0]


def test_compiled_code_sees_the_setup_of_its_task(model, compiled):
    expected = outputs_of(model)
    model.set_active_adapters(None)

    async def use(setup):
        for _ in range(3):
            await asyncio.sleep(0)
            with AdapterSetup(setup):
                assert torch.equal(run(compiled), expected[setup])
                with AdapterSetup(None):
                    assert torch.equal(run(compiled), expected[None])

    async def main():
        await asyncio.gather(use(A), use(B), use(A))

    asyncio.run(main())
    assert torch.equal(run(compiled), expected[None])
    with AdapterSetup(A):
        assert torch.equal(run(compiled), expected[A])


def test_compiled_code_raises_where_it_cannot_tell(model, compiled):
    expected = outputs_of(model)
    model.set_active_adapters(None)

    async def inside(entered, left):
        with AdapterSetup(A):
            entered.set()
            await left.wait()
            # another task has entered and left a block meanwhile
            with pytest.raises(Unsupported, match=r"without an await"):
                run(compiled)
            return output(model)

    async def main():
        entered, left = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(inside(entered, left))
        await entered.wait()
        with pytest.raises(Unsupported, match=r"another asyncio task is inside an AdapterSetup"):
            run(compiled)
        assert torch.equal(output(model), expected[None])
        with pytest.raises(Unsupported, match=r"without an await"):
            await asyncio.to_thread(run, compiled)
        with AdapterSetup(None):
            assert torch.equal(run(compiled), expected[None])
        left.set()
        return await task

    assert torch.equal(asyncio.run(main()), expected[A])
    assert torch.equal(run(compiled), expected[None])
