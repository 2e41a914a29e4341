"""Requests of continuous batching with adapters of a pool, against each alone."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
import transformers
from families import tiny_config
from snapshots import stir
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from adapterzoo import init
from adapterzoo.errors import (
    CheckpointError,
    ConfigError,
    StateError,
    UnknownNameError,
)
from adapterzoo.serving import AdapterPool

pytestmark = pytest.mark.needs("transformers>=5.24", "older ones are refused by name")

TEXTS = {"a": "lora[r=4]", "b": "lora[r=8,alpha=4]", "c": "dora[r=4]", "d": "boft", "e": "seq_bn",
         "f": "lora[r=2]"}  # fmt: skip
SIZES = {"num_blocks": 64, "page_size": 4, "max_batch_tokens": 24, "allow_block_sharing": True,
         "use_async_batching": False}  # fmt: skip


@pytest.fixture(autouse=True)
def quiet():
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    yield
    transformers.logging.set_verbosity(before)


def greedy(tokens=5):
    return GenerationConfig(
        max_new_tokens=tokens, use_cuda_graph=False, do_sample=False, eos_token_id=-1,
        pad_token_id=0,
    )  # fmt: skip


def prompts(*lengths, seed=1):
    source = torch.Generator().manual_seed(seed)
    return [torch.randint(10, 90, (n,), generator=source).tolist() for n in lengths]


class World:
    """A model, folders of adapters, and the tokens that each gives alone."""

    def __init__(self, folder, family="llama", texts=TEXTS):
        torch.manual_seed(0)
        config = tiny_config(family)
        config.max_position_embeddings = 512
        kinds = {"attn_implementation": "sdpa", "experts_implementation": "eager"}
        self.model = init(AutoModelForCausalLM.from_config(config, **kinds).double().eval())
        self.folders = {}
        for seed, (name, text) in enumerate(texts.items()):
            self.model.add_adapter(name, text)
            stir(self.model, name, seed=seed + 1, std=0.3)
            self.folders[name] = folder / name
            self.model.save_adapter(self.folders[name], name)
            self.model.delete_adapter(name)

    def alone(self, given, names, tokens=5):
        found = []
        for prompt, name in zip(given, names, strict=True):
            if name is not None:
                self.model.load_adapter(self.folders[name], load_as="alone", set_active=True)
            out = self.model.generate(torch.tensor([prompt]), generation_config=greedy(tokens))
            found.append(out[0, len(prompt) :].tolist())
            if name is not None:
                self.model.delete_adapter("alone")
        return found

    def batched(self, given, names, tokens=5):
        found = self.model.generate_batch(
            given, generation_config=greedy(tokens), warmup=False, adapter_names=names,
            continuous_batching_config=ContinuousBatchingConfig(**SIZES),
        )  # fmt: skip
        assert [each.error for each in found.values()] == [None] * len(given)
        return [list(each.generated_tokens) for each in found.values()]

    @contextmanager
    def running(self, tokens=5):
        sizes = ContinuousBatchingConfig(**SIZES)
        manager = self.model.init_continuous_batching(greedy(tokens), sizes)
        manager.start()
        try:
            yield manager
        finally:
            manager.stop(hard_stop=True)
            manager.destroy()


def result(manager, key, results):
    """The output of a request, once it has ended."""
    end = time.monotonic() + 60
    while key not in results:
        assert time.monotonic() < end, f"{key} did not end"
        if (found := manager.get_result(timeout=0.1)) and found.is_finished():
            results[found.request_id] = found
    return results[key]


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("slots", [1, 3])
def test_each_request_has_its_adapter(family, slots, tmp_path):
    world = World(tmp_path, family)
    names = ["a", None, "b", "c", "d", "e", "f", "a", None, "b"]
    given = prompts(3, 5, 11, 1, 19, 9, 7, 4, 30, 13)
    want = world.alone(given, names)
    with AdapterPool(world.model, world.folders, slots=slots) as pool:
        assert world.batched(given, names) == want
        metrics = pool.metrics()
        assert metrics["slots_in_use"] == metrics["waiting"] == 0
        assert (metrics["evicted"] > 0) == (slots == 1)
    # and each adapter makes a difference
    other = world.alone(given, [None if name == "a" else "a" for name in names])
    assert all(a != b for a, b in zip(want, other, strict=True))


def test_prefixes_are_shared_within_an_adapter_and_not_across(world):
    counted = []
    table = world.model.get_input_embeddings()
    hook = table.register_forward_pre_hook(lambda _, args: counted.append(args[0].numel()))
    (prompt,) = prompts(16)

    def computed(manager, name, results):
        counted.clear()
        key = manager.add_request(prompt, adapter_name=name, max_new_tokens=2)
        assert result(manager, key, results).error is None
        return sum(counted)

    with AdapterPool(world.model, world.folders, slots=1), world.running() as manager:
        results = {}
        first = {name: computed(manager, name, results) for name in (None, "a", "b", "e")}
        # whole, and one token for the next
        assert set(first.values()) == {len(prompt) + 1}
        again = {name: computed(manager, name, results) for name in (None, "a", "b", "e")}
        assert max(again.values()) < len(prompt)
    hook.remove()


def test_errors_are_those_of_one_request(world, tmp_path):
    given = prompts(5, 6, 7, 8)
    names = ["a", "c", None, "e"]
    want = world.alone(given, names)
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in world.folders["f"].iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    folders = {**world.folders, "broken": broken}
    with AdapterPool(world.model, folders, slots=1) as pool, world.running() as manager:
        file = broken / "adapter.safetensors"
        file.write_bytes(file.read_bytes()[:-8])
        keys = [
            manager.add_request(prompt, adapter_name=name)
            for prompt, name in zip(given, names, strict=True)
        ]
        with pytest.raises(CheckpointError):
            manager.add_request(given[0], adapter_name="broken")
        with pytest.raises(UnknownNameError):
            manager.add_request(given[0], adapter_name="none")
        with pytest.raises(ConfigError, match="no token"):
            manager.add_request([10**6], adapter_name="a")
        results = {}
        for key, tokens in zip(keys, want, strict=True):
            assert result(manager, key, results).generated_tokens == tokens
        assert pool.metrics()["slots_in_use"] == 0
        # nothing is left of the refused ones
        pool.remove("broken")


def test_files_lost_while_a_request_waits_fail_it_alone(world):
    given = prompts(5, 6, 7)
    want = world.alone(given, ["a", "b", "f"])
    with AdapterPool(world.model, world.folders, slots=1) as pool, world.running() as manager:
        results = {}
        with pool.use(["a"]):
            keys = [
                manager.add_request(p, adapter_name=n) for p, n in zip(given, "abf", strict=True)
            ]
            time.sleep(0.3)
            # its turn comes after this
            pool._drop(pool._members["b"])
            for file in world.folders["b"].iterdir():
                file.unlink()
        assert result(manager, keys[0], results).generated_tokens == want[0]
        failed = result(manager, keys[1], results)
        assert failed.error is not None
        assert "'b'" in failed.error or "/b" in failed.error
        assert result(manager, keys[2], results).generated_tokens == want[2]


def test_requests_wait_for_slots_that_batches_use(world):
    (prompt,) = prompts(6)
    want = world.alone([prompt] * 2, ["a", "b"])
    with AdapterPool(world.model, world.folders, slots=1) as pool, world.running() as manager:
        results = {}
        with pool.use(["f"]):
            keys = [manager.add_request(prompt, adapter_name=name) for name in ("a", "b")]
            gone = manager.add_request(prompt, adapter_name="a")
            time.sleep(0.5)
            assert manager.get_result(timeout=0.1) is None
            manager.cancel_request(gone)
        for key, tokens in zip(keys, want, strict=True):
            assert result(manager, key, results).generated_tokens == tokens
        pool.remove("a")


def test_removing_waits_for_requests_in_flight(world):
    given = prompts(6, 7)
    want = world.alone(given, ["a", "b"], 40)
    with (
        AdapterPool(world.model, world.folders, slots=2) as pool,
        world.running(40) as manager,
        ThreadPoolExecutor(1) as other,
    ):
        keys = [manager.add_request(p, adapter_name=n) for p, n in zip(given, "ab", strict=True)]
        removing = other.submit(pool.remove, "a")
        time.sleep(0.01)
        if not removing.done():
            with pytest.raises(StateError, match="being removed"):
                manager.add_request(given[0], adapter_name="a")
        results = {}
        for key, tokens in zip(keys, want, strict=True):
            assert result(manager, key, results).generated_tokens == tokens
        removing.result(30)
        assert "a" not in pool


def test_a_request_that_waits_for_a_slot_keeps_its_adapter(world):
    (prompt,) = prompts(6)
    (want,) = world.alone([prompt], ["a"])
    with (
        AdapterPool(world.model, world.folders, slots=1) as pool,
        world.running() as manager,
        ThreadPoolExecutor(1) as other,
    ):
        with pool.use(["f"]):
            key = manager.add_request(prompt, adapter_name="a")
            removing = other.submit(pool.remove, "a")
            time.sleep(0.3)
            assert not removing.done()
        found = result(manager, key, {})
        assert found.error is None
        assert found.generated_tokens == want
        removing.result(30)


def test_a_manager_outlives_a_pool(world):
    """One that is older than its pool, and a second pool with more kinds of adapters."""
    (prompt,) = prompts(6)
    want = world.alone([prompt] * 3, [None, "a", "e"])
    folders = world.folders
    with world.running() as manager:
        results = {}

        def tokens(name):
            found = result(manager, manager.add_request(prompt, adapter_name=name), results)
            assert found.error is None
            return found.generated_tokens

        with AdapterPool(world.model, {"a": folders["a"]}, slots=1) as pool:
            assert tokens(None) == want[0]
            assert tokens("a") == want[1]
        assert tokens(None) == want[0]
        with pytest.raises(StateError, match="closed"):
            pool.check()
        with AdapterPool(world.model, {"e": folders["e"], "a": folders["a"]}, slots=1):
            assert tokens(None) == want[0]
            assert tokens("e") == want[2]
            assert tokens("a") == want[1]


def test_adapters_of_the_model_run_in_steps_of_their_own(world):
    world.model.add_adapter("own", "lora")
    stir(world.model, "own", seed=9)
    given = prompts(5, 6)
    with AdapterPool(world.model, world.folders, slots=1), world.running(30) as manager:
        results = {}
        key = manager.add_request(given[0], adapter_name="a")
        with pytest.raises(StateError, match="steps of their own"):
            manager.add_request(given[1], adapter_name="own")
        assert result(manager, key, results).error is None
        # once they have ended
        end = time.monotonic() + 10
        while True:
            try:
                key = manager.add_request(given[1], adapter_name="own")
                break
            except StateError:
                assert time.monotonic() < end
        assert result(manager, key, results).error is None


def test_tokens_are_streamed(world):
    (prompt,) = prompts(6)
    (want,) = world.alone([prompt], ["e"])
    with AdapterPool(world.model, world.folders, slots=1), world.running() as manager:
        key = manager.add_request(prompt, adapter_name="e", streaming=True)
        lengths = []
        while not lengths or lengths[-1] < len(want):
            found = manager.get_result(key, timeout=30)
            lengths.append(len(found.generated_tokens))
            assert found.generated_tokens == want[: lengths[-1]]
        assert lengths == [1, 2, 3, 4, 5]
