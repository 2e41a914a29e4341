"""`AdapterPool`: rows with adapters of a pool against each adapter alone, and what it keeps."""

from __future__ import annotations

import asyncio
import copy
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from families import tiny_config, tiny_inputs
from pools import zipf
from snapshots import stir
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from variants import VARIANTS
from waiting import until

from adapterzoo import AdapterSetup, formats, init
from adapterzoo.errors import (
    AdapterZooError,
    BatchError,
    CheckpointError,
    CompositionError,
    ConfigError,
    DuplicateNameError,
    StateError,
    UnknownNameError,
)
from adapterzoo.serving import AdapterPool

KINDS = {
    "lora": ("lora[r=4]", "lora[r=8,alpha=4]", "lora[r=2,use_rslora=True]"),
    "dora": ("dora[r=4]", "dora[r=2]"),
    "ia3": ("ia3", "ia3[alpha=2]"),
    "boft": ("boft", "boft"),
    "oft": ("oft[r=0,oft_block_size=4]",) * 2,
    "bottleneck": ("seq_bn", "seq_bn[reduction_factor=4]"),
    "parallel bottleneck": ("par_bn[reduction_factor=4]", "par_bn[reduction_factor=8]"),
    "bottleneck with a norm": ("double_seq_bn[ln_before=True]",) * 2,
    "other layers": ("lora[r=4,target_modules='all-linear']", "lora[leave_out=[0]]"),
}


# of `VARIANTS`; the others depend on the sequence, share modules, or add what has no stack
ACTING = {
    "adapter_plus[init_weights='bert']", "boft", "boft[boft_n_butterfly_factor=2,boft_dropout=0.3]",
    "dora[convention='adapterhub']", "dora[dropout=0.1]", "ia3", "lora[dropout=0.1]",
    "lora[dropout=0.1]|par_bn", "mtl_lora[n_up_projection=2]", "oft[oft_block_size=4]",
    "oft[oft_block_size=8,block_share=True,coft=True,eps=0.5]",
    "oft[r=4,oft_block_size=0,use_cayley_neumann=False,module_dropout=0.3]",
    "par_bn[scaling='learned',ln_before=True]", "seq_bn[dropout=0.1]",
}  # fmt: skip


def model_of(family="llama", dtype=torch.float64):
    torch.manual_seed(0)
    config = tiny_config(family)
    config.max_position_embeddings = 256
    return init(
        AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype).eval()
    )


def saved(model, folder, texts, std=0.3):
    """Folders of adapters with values of their own, and what runs one of them alone."""
    folders = {}
    for seed, (name, text) in enumerate(texts.items()):
        model.add_adapter(name, text)
        stir(model, name, seed=seed + 1, std=std)
        folders[name] = folder / name
        model.save_adapter(folders[name], name)
        model.delete_adapter(name)

    def alone(name, run):
        if name is None:
            return run()
        model.load_adapter(folders[name], load_as="alone", set_active=True)
        try:
            return run()
        finally:
            model.delete_adapter("alone")

    return folders, alone


@torch.no_grad()
def compared(model, folders, alone, inputs, batches, **options):
    """Rows of mixed batches against each adapter alone."""
    key = next(iter(inputs))
    most = inputs[key].shape[0]

    def run(rows=slice(None)):
        return model(**{name: t[rows] for name, t in inputs.items()})[0]

    want = {name: alone(name, run) for name in [None, *folders]}
    with AdapterPool(model, folders, **options) as pool:
        for names in batches:
            assert len(names) <= most
            with pool.use(names):
                found = run(slice(len(names)))
            for row, name in enumerate(names):
                torch.testing.assert_close(found[row], want[name][row], rtol=0, atol=1e-10)
            assert pool.metrics()["slots_in_use"] == 0
        # the test can fail: the adapters differ
        assert all((want[name] - want[None]).abs().max() > 1e-3 for name in folders)
    assert torch.equal(run(), want[None])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_each_adapter_alone(kind, tmp_path):
    model = model_of()
    texts = {f"a{n}": text for n, text in enumerate(KINDS[kind])}
    folders, alone = saved(model, tmp_path, texts)
    ids = {"input_ids": torch.randint(3, 60, (4, 7))}
    batches = [["a0", None, "a1", "a0"], ["a1"], [None, None], [*texts][::-1]]
    compared(model, folders, alone, ids, batches, slots=len(texts))


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5", "bart", "vit", "mistral", "deberta-v2"])
@pytest.mark.parametrize("text", ["lora", "seq_bn", "dora"])
def test_in_models_of_other_types(family, text, tmp_path):
    torch.manual_seed(0)
    model = init(AutoModel.from_config(tiny_config(family)).double().eval())
    folders, alone = saved(model, tmp_path, {"a": text, "b": text})
    inputs = tiny_inputs(family)
    inputs = {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()}
    rows = next(iter(inputs.values())).shape[0]
    compared(model, folders, alone, inputs, [["a", "b"][:rows], ["b", None][:rows]], slots=2)


@pytest.mark.parametrize("text", VARIANTS)
def test_each_method_acts_in_slots_or_is_refused_by_name(text, tmp_path):
    model = model_of()
    try:
        folders, alone = saved(model, tmp_path, {"a": VARIANTS[text], "b": VARIANTS[text]})
    except AdapterZooError as error:
        pytest.skip(f"{text} is not one for this model: {error}")
    ids = {"input_ids": torch.randint(3, 60, (3, 7))}
    before = {key: t.clone() for key, t in model.state_dict().items()}
    if text in ACTING:
        compared(model, folders, alone, ids, [["a", None, "b"]], slots=2)
    else:
        with pytest.raises(ConfigError, match="cannot act in a slot"):
            AdapterPool(model, folders)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(t, after[key]) for key, t in before.items())


def test_the_law_above_can_fail(tmp_path, monkeypatch):
    from adapterzoo.model.slots import SlotStack

    plain = SlotStack.write
    monkeypatch.setattr(SlotStack, "write", lambda self, slot, v: plain(self, 1 - slot, v))
    model = model_of()
    folders, alone = saved(model, tmp_path, {"a": "lora", "b": "lora"})
    ids = {"input_ids": torch.randint(3, 60, (3, 7))}
    with pytest.raises(AssertionError):
        compared(model, folders, alone, ids, [["a", None, "b"]], slots=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_near_as_each_adapter_alone(dtype, tmp_path):
    model = model_of(dtype=dtype)
    texts = {"a": "lora[r=4]", "b": "dora[r=4]", "c": "boft", "d": "seq_bn"}
    folders, alone = saved(model, tmp_path, texts)
    ids = torch.randint(3, 60, (5, 7))
    names = ["a", None, "b", "c", "d"]
    with torch.no_grad():
        want = torch.stack([alone(n, lambda r=r: model(ids)[0][r]) for r, n in enumerate(names)])
        with AdapterPool(model, folders, slots=1) as pool, pool.use(names):
            found = model(ids)[0]
    # some units in the last place of the largest logit
    unit = torch.finfo(dtype).eps * want.abs().max()
    assert (found - want).abs().max() <= 8 * unit


# --- generation ---


def generated(model, ids, **options):
    given = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    return model.generate(ids, **{**given, **options})


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 2}, {"num_beams": 2, "num_return_sequences": 2}]
)
def test_generation_with_left_padding_and_beams(options, tmp_path):
    model = model_of()
    folders, alone = saved(model, tmp_path, {"a": "lora", "b": "lora[r=2]", "c": "seq_bn"})
    names = ["a", None, "b", "c"]
    ids = torch.randint(3, 60, (4, 6))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    given = {"attention_mask": mask, **options}
    times = options.get("num_return_sequences", 1)
    rows = [slice(row * times, row * times + times) for row in range(4)]
    want = [alone(n, lambda: generated(model, ids, **given)) for n in names]
    with AdapterPool(model, folders, slots=2) as pool, pool.use(names):
        found = generated(model, ids, **given)
    for own, whole in zip(rows, want, strict=True):
        assert torch.equal(found[own], whole[own])


def test_generation_of_an_encoder_decoder(tmp_path):
    torch.manual_seed(0)
    model = init(AutoModelForSeq2SeqLM.from_config(tiny_config("t5")).double().eval())
    folders, alone = saved(model, tmp_path, {"a": "lora", "b": "ia3"}, std=1.0)
    names, ids = ["b", None, "a"], torch.randint(3, 60, (3, 6))
    want = [alone(n, lambda: generated(model, ids)) for n in names]
    with AdapterPool(model, folders, slots=1) as pool, pool.use(names):
        found = generated(model, ids)
    assert all(torch.equal(found[row], whole[row]) for row, whole in enumerate(want))


# --- one graph ---


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.sweep)])
def test_a_compiled_model_has_one_graph_for_all_adapters(backend, tmp_path):
    texts = {f"{kind}{n}": text for kind in KINDS for n, text in enumerate(KINDS[kind])}
    texts = {name.replace(" ", "_"): text for name, text in texts.items()}
    model = model_of()
    folders, _ = saved(model, tmp_path, texts)
    ids = torch.randint(3, 60, (3, 7))
    graphs = []

    def counting(module, inputs):
        graphs.append(module)
        if backend == "eager":
            return module.forward
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(module, inputs)

    source = random.Random(0)
    with torch.no_grad(), AdapterPool(model, folders, slots=3) as pool:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=counting)
        for _ in range(24):
            names = source.choices([None, *texts], k=3)
            with pool.use(names):
                found, want = compiled(ids)[0], model(ids)[0]
            # the norms of a Llama are in float32, whose sums inductor orders otherwise
            bound = 1e-10 if backend == "eager" else 1e-6
            torch.testing.assert_close(found, want, rtol=0, atol=bound)
        assert len(graphs) == 1
        assert pool.metrics()["evicted"] > 0


# --- what it keeps ---


def small(tmp_path, count=6, **options):
    model = model_of(dtype=torch.float32)
    folders, _ = saved(model, tmp_path, {f"a{n}": "lora[r=4]" for n in range(count)})
    return model, folders, AdapterPool(model, folders, **options)


def test_the_least_recently_used_adapter_makes_room(tmp_path):
    *_, pool = small(tmp_path, slots=2)
    with pool:
        for name in ("a0", "a1", "a0", "a2"):
            with pool.use([name]):
                pass
        found = pool.metrics()
        assert (found["hits"], found["misses"], found["evicted"]) == (1, 3, 1)
        with pool.use(["a0", "a2"]):
            assert pool.metrics()["slots_in_use"] == 2
        assert pool.metrics()["hits"] == 3


def test_bytes_stay_below_the_bound(tmp_path):
    model, folders, pool = small(tmp_path, slots=2)
    with pool:
        slots = pool.nbytes
        with pool.use(["a0"]):
            one = pool.nbytes - slots
    with AdapterPool(model, folders, slots=2, max_bytes=slots + 2 * one) as pool:
        for name in [*folders] * 2:
            with pool.use([name]):
                assert pool.nbytes <= slots + 2 * one
        found = pool.metrics()
        assert found["loads"] == 2 * len(folders)
        assert found["evicted_from_cpu"] == 2 * len(folders) - 2
        assert found["cpu_bytes"] + found["slot_bytes"] == pool.nbytes
    with pytest.raises(ConfigError, match=f"Write max_bytes={slots + one}"):
        AdapterPool(model, folders, slots=2, max_bytes=slots + one - 1)
    AdapterPool(model, folders, slots=2, max_bytes=slots + one).close()


def test_a_pinned_adapter_keeps_its_slot(tmp_path):
    *_, pool = small(tmp_path, slots=2, pinned=["a0"])
    with pool:
        for name in ("a1", "a2", "a0"):
            with pool.use([name]):
                pass
        assert pool.metrics()["pinned"] == 1
        assert pool.metrics()["hits"] == 1
        with pytest.raises(ConfigError, match="slots=3"):
            pool.pin("a1")
        with pytest.raises(ConfigError, match="slots=3"), pool.use(["a1", "a2"]):
            pass
        pool.unpin("a0")
        with pool.use(["a1", "a2"]):
            pass


def test_metrics_in_the_text_of_prometheus(tmp_path):
    *_, pool = small(tmp_path, slots=2)
    with pool:
        with pool.use(["a0", None]):
            text = pool.prometheus()
        lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
        values = {name: float(value) for name, value in lines}
        assert values["adapterzoo_pool_misses_total"] == 1
        assert values["adapterzoo_pool_slots_in_use"] == 1
        kinds = [line.split() for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(kinds) == len(lines)
        assert all((kind[3] == "counter") == kind[2].endswith("_total") for kind in kinds)


# --- threads and tasks ---


@pytest.mark.parametrize(
    ("adapters", "seconds"), [(40, 4), pytest.param(300, 60, marks=pytest.mark.sweep(whole=True))]
)
def test_many_threads_over_few_slots(adapters, seconds, tmp_path):
    report = zipf(tmp_path, adapters, slots=8, threads=8, seconds=seconds)
    assert report["wrong"] == report["lost"] == 0
    assert report["most_bytes"] <= report["bound"]
    assert report["graphs"] == 1
    assert report["evicted"] > 0


def test_batches_wait_in_the_order_in_which_they_came(tmp_path):
    *_, pool = small(tmp_path, slots=1)
    order, threads = [], []

    def one(name):
        with pool.use([name]):
            order.append(name)

    with pool:
        with pool.use(["a0"]):
            for number in range(1, 6):
                threads.append(threading.Thread(target=one, args=(f"a{number}",)))
                threads[-1].start()
                until(lambda number=number: pool.metrics()["waiting"] >= number)
            # it is in a slot, and waits for its turn all the same
            threads.append(threading.Thread(target=one, args=("a0",)))
            threads[-1].start()
            until(lambda: pool.metrics()["waiting"] >= 6)
        for thread in threads:
            thread.join()
        assert order == ["a1", "a2", "a3", "a4", "a5", "a0"]
        assert pool.metrics()["waited_seconds"] > 0


def test_tasks_wait_without_stopping_the_loop_and_may_be_cancelled(tmp_path):
    model, folders, pool = small(tmp_path, slots=2)
    ids = torch.randint(3, 60, (1, 5))
    with torch.no_grad():
        want = {}
        for name in folders:
            with pool.use([name]):
                want[name] = model(ids)[0]

    async def one(name):
        async with pool.use_async([name]):
            with torch.no_grad():
                found = model(ids)[0]
            await asyncio.sleep(0.01)
        assert torch.equal(found, want[name])

    async def all_of_them():
        await asyncio.gather(*(one(name) for name in [*folders] * 3))
        async with pool.use_async(["a0", "a1"]):
            task = asyncio.ensure_future(one("a2"))
            while pool.metrics()["waiting"] < 1:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert pool.metrics()["waiting"] == 0
        await one("a2")

    with pool:
        asyncio.run(asyncio.wait_for(all_of_them(), 60))
        assert pool.metrics()["slots_in_use"] == 0


def test_adding_replacing_and_removing_while_others_run(tmp_path):
    model, folders, pool = small(tmp_path, slots=2)
    ids = torch.randint(3, 60, (1, 5))
    with torch.no_grad(), pool, ThreadPoolExecutor(1) as other:
        with pool.use(["a0"]):
            old = model(ids)[0]
            pool.add("new", folders["a1"])
            replacing = other.submit(pool.add, "a0", folders["a2"], overwrite_ok=True)
            time.sleep(0.05)
            assert not replacing.done()
            # what runs keeps its values
            assert torch.equal(model(ids)[0], old)
            with pytest.raises(StateError, match="being removed"), pool.use(["a0"]):
                pass
        replacing.result(10)
        with pool.use(["a0"]):
            new = model(ids)[0]
        with pool.use(["a2"]):
            assert torch.equal(model(ids)[0], new)
        assert not torch.equal(new, old)
        pool.remove("a0")
        assert "a0" not in pool
        assert len(pool) == len([*pool]) == 6
        with pytest.raises(UnknownNameError, match="a0"), pool.use(["a0"]):
            pass


# --- what ends early, comes together, or fails ---


@contextmanager
def slowly_read(monkeypatch):
    """Let threads wait in the middle of reading an adapter until the event is set."""
    go, reading = threading.Event(), threading.Semaphore(0)
    plain = formats.read

    def slow(*args, **kwargs):
        reading.release()
        assert go.wait(20)
        return plain(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(formats, "read", slow)
        try:
            yield go, reading
        finally:
            go.set()


def one(model, pool, name, ids=((5, 6, 7),)):
    with torch.no_grad(), pool.use([name]):
        return model(torch.tensor(ids))[0]


def test_waiting_batches_fail_when_the_pool_is_closed(tmp_path):
    *_, pool = small(tmp_path, slots=1)
    with ThreadPoolExecutor(3) as other:
        with pool.use(["a0"]):
            waiting = [other.submit(pool.use([name]).__enter__) for name in ("a1", "a2")]
            until(lambda: pool.metrics()["waiting"] == 2)
            closing = other.submit(pool.close)
            # before the running one ends
            for each in waiting:
                with pytest.raises(StateError, match="closed"):
                    each.result(20)
            assert not closing.done()
        closing.result(20)
    with pytest.raises(StateError, match="closed"), pool.use([None]):
        pass
    with pytest.raises(StateError, match="closed"):
        pool.add("new", tmp_path / "a0")
    assert pool.metrics()["cpu_bytes"] == 0


def test_a_block_never_waits_for_itself(tmp_path):
    model, folders, pool = small(tmp_path, slots=1)
    with pool:
        want = {name: one(model, pool, name) for name in ("a0", "a1")}
        with pool.use(["a0"]):
            with pytest.raises(StateError, match="one use"), pool.use(["a1"]):
                pass
            with pytest.raises(StateError, match="after its block"):
                pool.remove("a0")
            with pytest.raises(StateError, match="after its block"):
                pool.add("a0", folders["a1"], overwrite_ok=True)
            with pytest.raises(StateError, match="after its block"):
                pool.close()
            assert torch.equal(one(model, pool, "a0"), want["a0"])
            with pool.use([None]):
                pass
        assert pool.metrics()["slots_in_use"] == pool.metrics()["waiting"] == 0
        assert torch.equal(one(model, pool, "a1"), want["a1"])


def test_tasks_that_wait_leave_threads_to_those_that_run(tmp_path):
    model, _, pool = small(tmp_path, slots=1)

    async def task(name):
        async with pool.use_async([name]):
            await asyncio.to_thread(model, torch.tensor([[5, 6]]))

    async def all_of_them():
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(2))
        await asyncio.gather(*(task(f"a{n % 6}") for n in range(12)))

    with pool:
        asyncio.run(asyncio.wait_for(all_of_them(), 30))


def test_a_task_that_is_cancelled_while_it_reads_gives_its_slot_back(tmp_path, monkeypatch):
    model, _, pool = small(tmp_path, slots=1)

    async def cancelled(go, reading):
        async def task():
            async with pool.use_async(["a0"]):
                raise AssertionError

        running = asyncio.ensure_future(task())
        await asyncio.to_thread(reading.acquire)
        for _ in range(2):
            running.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(running, 5)
        go.set()

    with pool:
        with slowly_read(monkeypatch) as (go, reading):
            asyncio.run(cancelled(go, reading))
            until(lambda: pool.metrics()["slots_in_use"] == 0)
        one(model, pool, "a1")


def is_refused(call, name):
    try:
        call(name)
    except StateError:
        return True
    return False


def test_an_adapter_is_not_removed_while_it_is_read(tmp_path, monkeypatch):
    model, folders, pool = small(tmp_path, slots=2)
    with pool, ThreadPoolExecutor(2) as other:
        new = one(model, pool, "a1")
        with slowly_read(monkeypatch) as (go, reading):
            using = other.submit(one, model, pool, "a0")
            reading.acquire()
            removing = other.submit(pool.remove, "a0")
            until(lambda: is_refused(pool.unpin, "a0"))
            assert not removing.done()
            go.set()
            using.result(20)
            removing.result(20)
        pool.add("a0", folders["a1"])
        assert torch.equal(one(model, pool, "a0"), new)


def test_what_is_replaced_while_it_is_read_ahead_is_not_kept(tmp_path, monkeypatch):
    model, folders, pool = small(tmp_path, slots=2)
    with pool, ThreadPoolExecutor(2) as other:
        new = one(model, pool, "a1")
        with slowly_read(monkeypatch) as (go, reading):
            ahead = other.submit(pool.prefetch, "a0")
            reading.acquire()
            replacing = other.submit(pool.add, "a0", folders["a1"], overwrite_ok=True)
            time.sleep(0.05)
            go.set()
            ahead.result(20)
            replacing.result(20)
        assert torch.equal(one(model, pool, "a0"), new)


def test_two_threads_do_not_add_one_name(tmp_path, monkeypatch):
    _, folders, pool = small(tmp_path, slots=2)
    with pool, ThreadPoolExecutor(2) as other:
        with slowly_read(monkeypatch) as (go, _):
            adding = [other.submit(pool.add, "new", folders[n]) for n in ("a1", "a2")]
            time.sleep(0.1)
            go.set()
            errors = [each.exception(20) for each in adding]
        assert sorted(type(error) for error in errors if error) == [DuplicateNameError]


def test_unpinned_while_it_is_read(tmp_path, monkeypatch):
    *_, pool = small(tmp_path, slots=2)
    with pool, ThreadPoolExecutor(1) as other:
        with slowly_read(monkeypatch) as (go, reading):
            pinning = other.submit(pool.pin, "a0")
            reading.acquire()
            pool.unpin("a0")
            go.set()
            pinning.result(20)
        assert pool.metrics()["pinned"] == pool.metrics()["slots_in_use"] == 0
        # nothing is added if it cannot be pinned
        pool.pin("a0")
        with pytest.raises(ConfigError, match="slots=3"):
            pool.add("new", tmp_path / "a1", pinned=True)
        assert "new" not in pool


def test_a_waiting_batch_whose_adapter_gets_another_kind_fails(tmp_path):
    model = model_of(dtype=torch.float32)
    folders, _ = saved(model, tmp_path, {"a": "lora", "b": "seq_bn", "c": "lora", "d": "seq_bn"})
    with AdapterPool(model, folders, slots=1) as pool, ThreadPoolExecutor(1) as other:
        with pool.use(["c"]):
            waiting = other.submit(pool.use(["a", "b"]).__enter__)
            until(lambda: pool.metrics()["waiting"] == 1)
            pool.add("a", folders["d"], overwrite_ok=True)
        with pytest.raises(ConfigError, match="slots=2"):
            waiting.result(20)
        one(model, pool, "c")


def test_bytes_stay_below_the_bound_while_threads_read(tmp_path, monkeypatch):
    model, folders, pool = small(tmp_path, slots=2)
    with pool:
        slots = pool.nbytes
        pool.prefetch("a0")
        bytes_of_one = pool.nbytes - slots
    bound = slots + bytes_of_one
    inside, most = [], []
    plain = AdapterPool._load

    def load(self, *args):
        inside.append(bytes_of_one)
        most.append(self.nbytes + sum(inside))
        time.sleep(0.01)
        try:
            return plain(self, *args)
        finally:
            inside.pop()

    monkeypatch.setattr(AdapterPool, "_load", load)
    with AdapterPool(model, folders, slots=2, max_bytes=bound) as pool, ThreadPoolExecutor(4) as o:
        list(o.map(pool.prefetch, [*folders] * 2))
        pool.add("new", folders["a0"])
        assert pool.nbytes <= bound
    assert max(most) <= bound


def test_adapters_of_another_dtype_than_the_model(tmp_path):
    model = model_of(dtype=torch.bfloat16)
    folders, _ = saved(model, tmp_path, {"a": "lora[r=4]", "b": "lora[r=4]"})
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        model.load_adapter(folders["a"], dtype=torch.float32, load_as="x", set_active=True)
        want = model(ids)[0]
        model.delete_adapter("x")
        with AdapterPool(model, folders, slots=1, dtype=torch.float32) as pool:
            size = pool.nbytes
            assert torch.equal(one(model, pool, "a", [[5, 6, 7]]), want)
            # the slot and what is kept on the CPU have the same size
            assert pool.nbytes - size == size


@pytest.mark.parametrize("how", ["inference mode", "autocast"])
def test_the_mode_in_which_an_adapter_is_read_does_not_matter(how, tmp_path):
    model = model_of(dtype=torch.float32)
    texts = {"a": "dora[r=4]", "b": "boft", "c": "lora[r=4]"}
    folders, _ = saved(model, tmp_path, texts)
    with AdapterPool(model, folders, slots=1) as pool:
        want = {name: one(model, pool, name) for name in texts}

    def mode():
        is_cast = how == "autocast"
        return torch.autocast("cpu", torch.bfloat16) if is_cast else torch.inference_mode()

    with mode():
        pool = AdapterPool(model, folders, slots=1, max_bytes=None)
        for name in texts:
            with pool.use([name]):
                pass
    with pool:
        for name in texts:
            assert torch.equal(one(model, pool, name), want[name])
        pool.add("d", folders["c"])
        assert torch.equal(one(model, pool, "d"), want["c"])


# --- the model ---


def test_a_model_changes_while_it_has_a_pool(tmp_path):
    model = model_of(dtype=torch.float32)
    folders, _ = saved(model, tmp_path, {"a": "dora[r=4]", "b": "lora[r=4]"})
    with AdapterPool(model, folders, slots=1) as pool:
        want = {name: one(model, pool, name) for name in folders}
        plain = one(model, pool, None)

        def unchanged():
            return all(torch.equal(one(model, pool, name), want[name]) for name in folders)

        model.add_adapter("x", "dora", set_active=True)
        stir(model, "x", seed=9)
        assert unchanged()
        with AdapterSetup("x"):
            assert unchanged()
        with pool.use(["a"]):
            with AdapterSetup("x"), torch.no_grad():
                assert not torch.equal(model(torch.tensor([[5, 6, 7]]))[0], want["a"])
            with torch.no_grad():
                assert torch.equal(model(torch.tensor([[5, 6, 7]]))[0], want["a"])
        with pytest.raises(StateError, match=r"close\(\)"):
            model.merge_and_unload()
        model.delete_adapter("x")
        assert unchanged()
        model.train()
        with pytest.raises(StateError, match="training mode"), pool.use(["a"]):
            pass
        model.eval()
        assert not any("slots" in key for key in model.state_dict())
        model.save_pretrained(tmp_path / "saved")
        # a copy has no pool, and may get one
        twin = copy.deepcopy(model)
        with AdapterPool(twin, folders, slots=1) as second:
            assert torch.equal(one(twin, second, "a"), want["a"])
            assert torch.equal(one(twin, second, None), plain)
        assert unchanged()
    assert type(model.unload()) is type(model)


# --- errors ---


def test_what_is_refused_changes_nothing(tmp_path):
    model, folders, pool = small(tmp_path, slots=2)
    ids = torch.randint(3, 60, (2, 5))

    def fails(kind, words, *names):
        with pytest.raises(kind, match=words), pool.use([*names]):
            model(ids)
        assert pool.metrics()["slots_in_use"] == pool.metrics()["waiting"] == 0

    model.add_adapter("wide", "lora[r=8]")
    model.save_adapter(tmp_path / "wide", "wide")
    model.add_adapter("dora", "dora")
    model.save_adapter(tmp_path / "dora", "dora")
    model.add_adapter("prefix", "prefix_tuning")
    model.save_adapter(tmp_path / "prefix", "prefix")
    model.add_adapter("layers", "lora[r=4,target_modules='all-linear']")
    model.save_adapter(tmp_path / "layers", "layers")
    with pool:
        fails(UnknownNameError, "'other'", "other")
        fails(CompositionError, "no rows")
        fails(ConfigError, "slots=3", "a0", "a1", "a2")
        fails(BatchError, r"^use\(…\) names 1 row: the batch has 2 rows", "a0")
        with pytest.raises(CompositionError, match="write a list"), pool.use("a0"):
            pass
        with pytest.raises(ConfigError, match="larger than the slots"):
            pool.add("wide", tmp_path / "wide")
        with pytest.raises(ConfigError, match="larger than the slots"):
            pool.add("layers", tmp_path / "layers")
        with pytest.raises(ConfigError, match="no slots of the kind"):
            pool.add("dora", tmp_path / "dora")
        with pytest.raises(DuplicateNameError, match="overwrite_ok=True"):
            pool.add("a0", folders["a1"])
        with pytest.raises(CheckpointError):
            pool.add("none", tmp_path / "nothing")
        with pytest.raises(StateError, match="already has a pool"):
            AdapterPool(model, folders)
        model.merge_adapter("wide")
        with pytest.raises(StateError, match="reset_adapter"), pool.use(["a0"]):
            pass
        model.reset_adapter()
    with pytest.raises(StateError, match="closed"), pool.use(["a0"]):
        pass
    with pytest.raises(ConfigError, match="cannot act in a slot"):
        AdapterPool(model, {"p": tmp_path / "prefix"})
    with pytest.raises(ConfigError, match="slots=8"):
        AdapterPool(model, folders, slots=0)
    with pytest.raises(ConfigError, match="no adapters"):
        AdapterPool(model)
    for options in ({"adapters": str(folders["a0"])}, {"configs": "lora"}, {"pinned": "a0"}):
        with pytest.raises(ConfigError, match=r"^AdapterPool\(\w+\): .* is not a list\. Write \["):
            AdapterPool(model, **{"adapters": folders, **options})
    with pytest.raises(ConfigError, match="Write dtype=torch"):
        AdapterPool(model, folders, dtype="float32")


def test_an_adapter_of_another_base_is_refused(tmp_path):
    folders, _ = saved(model_of("gpt2"), tmp_path, {"a": "lora"})
    with pytest.raises(CheckpointError, match="differences from this"):
        AdapterPool(model_of(), folders)


def test_room_for_later_adapters(tmp_path):
    model = model_of()
    folders, _ = saved(model, tmp_path, {"a": "lora[r=16]", "b": "seq_bn"})
    with AdapterPool(model, configs=["lora[r=16]", "seq_bn"], slots=2) as pool:
        for name, folder in folders.items():
            pool.add(name, folder, pinned=True)
        assert pool.metrics()["pinned"] == 2
        assert pool.metrics()["slots_in_use"] == 2


def test_names_come_from_the_folders(tmp_path):
    model = model_of()
    folders, _ = saved(model, tmp_path, {"a": "lora", "b": "lora"})
    with AdapterPool(model, folders.values(), slots=2) as pool:
        assert [*pool] == ["a", "b"]
        assert "2 adapters" in repr(pool)


def test_a_fingerprint_names_the_files_that_a_pool_loads(tmp_path):
    model, folders, pool = small(tmp_path, slots=2)
    pool.close()
    model.load_adapter(folders["a0"], load_as="a0")
    named = f"{folders['a0']}@{model.adapter_fingerprint('a0')[:12]}"
    with pytest.raises(CheckpointError, match="fingerprint"):
        AdapterPool(model, {"a": named.replace("a0@", "a1@")})
    # a dtype changes the values, and not which files they are
    with AdapterPool(model, {"a": named}, dtype=torch.bfloat16) as pool, pool.use(["a"]):
        pass


@pytest.mark.parametrize("text", ["seq_bn", "seq_bn[non_linearity='tanh']"])
def test_files_that_change_before_their_first_use_are_refused(text, tmp_path):
    model = model_of()
    folders, _ = saved(model, tmp_path, {"a": "seq_bn", "b": text})
    with AdapterPool(model, {"a": folders["a"]}, slots=1) as pool:
        model.load_adapter(folders["b"], load_as="a")
        model.save_adapter(folders["a"], "a")
        with pytest.raises(StateError, match="have changed"), pool.use(["a"]):
            pass
        assert pool.metrics()["slots_in_use"] == 0


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's counts")
def test_a_pool_that_starts_holds_the_values_of_one_adapter_at_a_time(tmp_path):
    model = model_of()
    folders, _ = saved(model, tmp_path, {"a": "lora[r=4000]"})
    status = Path("/proc/self/status")

    def kilobytes(name):
        return int(re.search(rf"{name}:\s*(\d+)", status.read_text())[1])

    size = sum(file.stat().st_size for file in folders["a"].iterdir()) / 1024
    # from now on, the largest memory of this process counts
    Path("/proc/self/clear_refs").write_text("5")
    before = kilobytes("VmRSS")
    with AdapterPool(model, {f"a{n}": folders["a"] for n in range(24)}, slots=1):
        assert kilobytes("VmHWM") - before < 12 * size
