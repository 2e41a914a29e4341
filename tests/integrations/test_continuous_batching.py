"""transformers' continuous batching: requests with different adapters against each alone."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from families import tiny_config
from snapshots import stir
from transformers import (
    AutoModelForCausalLM,
    CompileConfig,
    ContinuousBatchingConfig,
    GenerationConfig,
)
from waiting import until

import batching
from adapterzoo import AdapterSetup, AutoAdapterModel, Average, BatchSplit, Split, Stack, init
from adapterzoo import methods as _methods  # noqa: F401  registers the config strings
from adapterzoo.config import config_strings
from adapterzoo.errors import (
    AdapterZooError,
    CompositionError,
    ConfigError,
    StateError,
    UnknownNameError,
)
from adapterzoo.model.hf import batching as hooks

pytestmark = pytest.mark.needs("transformers>=5.24", "older ones are refused by name")

# transformers has requests without an end by this token
GREEDY = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
MIXED = {"a": "lora[r=4]", "b": "dora[r=4]", "c": "boft", "d": "seq_bn", "e": "lora[r=8,alpha=4]"}
PAGE = 4


@pytest.fixture(autouse=True)
def quiet():
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    yield
    transformers.logging.set_verbosity(before)


def model_of(family="llama", adapters=MIXED):
    torch.manual_seed(0)
    config = tiny_config(family)
    config.max_position_embeddings = 512
    # the grouped products of experts do not take float64
    kinds = {"attn_implementation": "sdpa", "experts_implementation": "eager"}
    model = init(AutoModelForCausalLM.from_config(config, **kinds).double())
    for seed, (name, text) in enumerate(adapters.items()):
        add(model, name, text, seed + 1)
    return model.eval()


def add(model, name, config, seed, **kwargs):
    model.add_adapter(name, config, **kwargs)
    stir(model, name, seed=seed, std=0.3)
    model.double()


def prompts(*lengths, seed=1):
    source = torch.Generator().manual_seed(seed)
    return [torch.randint(10, 90, (n,), generator=source).tolist() for n in lengths]


def greedy(tokens=5, **kwargs):
    given = {"max_new_tokens": tokens, "use_cuda_graph": False, **GREEDY, **kwargs}
    return GenerationConfig(**given)


def small(**kwargs):
    sizes = {"num_blocks": 64, "page_size": PAGE, "max_batch_tokens": 24}
    sizes["allow_block_sharing"] = True
    return ContinuousBatchingConfig(**{**sizes, "use_async_batching": False, **kwargs})


def batched(model, given, tokens=5, config=None, **kwargs):
    """Tokens of each prompt by `generate_batch`."""
    found = model.generate_batch(
        given, generation_config=greedy(tokens), continuous_batching_config=config or small(),
        warmup=False, **kwargs,
    )  # fmt: skip
    assert [each.error for each in found.values()] == [None] * len(given)
    return [list(each.generated_tokens) for each in found.values()]


def alone(model, given, names, tokens=5):
    """Tokens of each prompt by `generate`, with its adapter for the whole model."""
    before, found = model.active_adapters, []
    for prompt, name in zip(given, names, strict=True):
        model.set_active_adapters(name)
        out = model.generate(torch.tensor([prompt]), generation_config=greedy(tokens))
        found.append(out[0, len(prompt) :].tolist())
    model.set_active_adapters(before)
    return found


class Running:
    """A manager that runs, its results, and how many tokens the model computes."""

    def __init__(self, model, tokens=5, config=None, **kwargs):
        self.model, self.tokens, self.results = model, 0, {}
        generation = greedy(tokens, **kwargs)
        self.manager = model.init_continuous_batching(generation, config or small())
        table = model.get_input_embeddings()
        self._hook = table.register_forward_pre_hook(self._count)

    def _count(self, _, args):
        self.tokens += args[0].numel()

    def __enter__(self):
        self.manager.start()
        return self

    def __exit__(self, *error):
        self.manager.stop(hard_stop=True)
        self.manager.destroy()
        self._hook.remove()

    def add(self, prompt, **kwargs):
        return self.manager.add_request(prompt, **kwargs)

    def result(self, key):
        """The output of a request, once it has ended."""
        end = time.monotonic() + 60
        while key not in self.results:
            assert time.monotonic() < end, f"{key} did not end"
            if (found := self.manager.get_result(timeout=0.1)) and found.is_finished():
                self.results[found.request_id] = found
        return self.results[key]

    def run(self, prompt, **kwargs):
        """Tokens of a request."""
        found = self.result(self.add(prompt, **kwargs))
        assert found.error is None
        return list(found.generated_tokens)


# --- each request has its adapter ---


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_each_request_has_its_adapter(family):
    model = model_of(family)
    names = ["a", None, "b", "c", "d", "e", Stack("a", "d"), Average("a", "e"), "a", None]
    given = prompts(3, 5, 11, 1, 19, 9, 7, 4, 30, 13)
    calls = []
    hook = model.get_input_embeddings().register_forward_hook(lambda *_: calls.append(1))
    found = batched(model, given, adapter_names=names)
    hook.remove()
    assert found == alone(model, given, names)
    # far less than one after the other
    assert len(calls) < 20
    # and each adapter makes a difference
    other = [None if name == "a" else "a" for name in names]
    assert all(a != b for a, b in zip(found, alone(model, given, other), strict=True))


@pytest.mark.parametrize("family", batching.FAMILIES)
@pytest.mark.parametrize(
    ("count", "adapters"), [(24, 6), pytest.param(200, 32, marks=pytest.mark.sweep(whole=True))]
)
def test_many_adapters_in_one_batch(family, count, adapters):
    found = batching.run(family, count, adapters, tokens=4)
    assert found.equal == count
    assert found.across == 0
    assert found.hits > 0
    # timed by `make batching`
    assert found.ratio > 0


OPTIONS = (
    "lora[use_gating=True]", "seq_bn[use_gating=True]",
    "seq_bn[use_gating=True,convention='paper']",
    "lora[alora_invocation_tokens=[5,6]]", 'lora[target_modules="all-linear"]',
    'lora[modules_to_save=["lm_head"]]', 'lora[modules_to_save=["embed_tokens","lm_head"]]',
    'lora[target_modules=["lm_head","q_proj"]]', 'lora[target_modules=["embed_tokens"]]',
    "lora[trainable_token_indices=[5,6,7]]", "lora[lora_bias=True]",
    'lora[target_parameters=["experts.gate_up_proj"]]', "miss[r=4]",
)  # fmt: skip
# a union is of other configs
METHODS = [text for text in config_strings if text != "union"]


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
@pytest.mark.parametrize("text", [*METHODS, *OPTIONS])
def test_a_method_is_right_in_a_mixed_step_or_refused(family, text):
    model = model_of(family, {"l": "lora[r=4]"})
    try:
        add(model, "x", text, 5)
    except AdapterZooError:
        pytest.skip("the method has no place in this model")
    given, names = prompts(7, 3, 12, 9, 18), ["x", None, "x", "l", "x"]
    given[0][2:4] = given[2][4:6] = [5, 6]
    wants = alone(model, given, names)
    with Running(model) as running:
        keys, refused = [], False
        for prompt, name in zip(given, names, strict=True):
            try:
                keys.append(running.add(prompt, adapter_name=name))
            except StateError as error:
                # of its own method, or of that of one in flight
                refused = "'x'" in str(error)
                keys.append(None)
        for key, want in zip(keys, wants, strict=True):
            assert key is None or list(running.result(key).generated_tokens) == want
    assert refused or all(keys)
    # all of the method, or all others beside one that must be alone
    assert [key is None for key in keys] in (
        [False] * 5, [name == "x" for name in names], [name != "x" for name in names]
    )  # fmt: skip


EXPERTS = {
    "x": 'lora[r=4,target_parameters=["gate_up_proj","down_proj"]]',
    "y": 'dora[r=4,target_parameters=["experts.down_proj","gate.weight"]]',
    "z": "lora[r=2,intermediate_lora=True]",
    "l": "lora[r=4]",
}


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_requests_with_adapters_of_experts_share_steps(family):
    model = model_of(family, EXPERTS)
    names = ["x", None, "y", "l", "x", "z", Stack("x", "l"), "y"]
    given = prompts(3, 5, 11, 1, 19, 9, 7, 4)
    calls = []
    hook = model.get_input_embeddings().register_forward_hook(lambda *_: calls.append(1))
    found = batched(model, given, adapter_names=names)
    hook.remove()
    assert found == alone(model, given, names)
    assert len(calls) < 16
    other = [None if name == "x" else "x" for name in names]
    assert all(a != b for a, b in zip(found, alone(model, given, other), strict=True))


class Scaled(torch.nn.Module):
    """Computes with a matrix of its own, like parts of models that are no layers."""

    def __init__(self, width):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.eye(width))

    def forward(self, x):
        return x @ self.scale


def test_an_adapter_that_must_be_alone_is_right_alone():
    """A parameter that a module computes with, which rows of a batch share."""
    torch.manual_seed(0)
    config = tiny_config("llama")
    config.max_position_embeddings = 512
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    for layer in plain.model.layers:
        layer.mlp = torch.nn.Sequential(layer.mlp, Scaled(config.hidden_size))
    model = init(plain.double()).eval()
    add(model, "l", "lora[r=4]", 1)
    add(model, "x", 'lora[r=4,target_parameters=["scale"]]', 2)
    given = prompts(7, 3)
    assert batched(model, given, adapter_names=["x", "x"]) == alone(model, given, ["x", "x"])
    with pytest.raises(StateError, match=r"'x' adapts .*unknown.*Add them when these have ended"):
        batched(model, given, adapter_names=["x", "l"])
    wants = alone(model, given, "xl", 40)
    with Running(model, tokens=40) as running:
        key = running.add(given[0], adapter_name="x")
        with pytest.raises(StateError, match=r"add_request\(\): 'x' adapts"):
            running.add(given[1], adapter_name="l")
        assert list(running.result(key).generated_tokens) == wants[0]
        until(lambda: not running.manager.requests.pins)
        assert running.run(given[1], adapter_name="l") == wants[1]


def test_tokens_are_streamed():
    model = model_of()
    given, names = prompts(5, 9, 13), ["a", "c", None]
    wants = alone(model, given, names)
    with Running(model) as running:
        keys = [
            running.add(p, adapter_name=n, streaming=True)
            for p, n in zip(given, names, strict=True)
        ]
        seen = {key: [] for key in keys}
        while not all(len(each) == 5 for each in seen.values()):
            if found := running.manager.get_result(timeout=1):
                seen[found.request_id].append(list(found.generated_tokens))
    for key, want in zip(keys, wants, strict=True):
        assert seen[key] == [want[: n + 1] for n in range(5)]


def test_children_have_the_adapter_of_their_parent():
    model = model_of()
    given, names = prompts(2, 9, 14), ["a", "d", "b"]
    wants = alone(model, given, names)
    # samples of one token are the likeliest
    with Running(model, num_return_sequences=3, do_sample=True, top_k=1) as running:
        keys = [running.add(p, adapter_name=n) for p, n in zip(given, names, strict=True)]
        for key, want in zip(keys, wants, strict=True):
            for each in (key, f"{key}__child#0", f"{key}__child#1"):
                assert list(running.result(each).generated_tokens) == want
        until(lambda: not running.manager.requests.pins)


def test_a_prompt_in_parts_of_one_token():
    """A part without a new token precedes requests that have one, in a step of one token each."""
    model = model_of(adapters={"x": 'lora[modules_to_save=["lm_head"]]', "l": "lora[r=4]"})
    given, names = prompts(6, 2, 9), ["x", "l", None]
    config = small(max_batch_tokens=3, scheduler_type="prefill_first")
    assert batched(model, given, 9, config, adapter_names=names) == alone(model, given, names, 9)


@pytest.mark.long
@pytest.mark.parametrize("active", [None, "a"])
def test_steps_of_fixed_lengths_that_are_compiled(active):
    """Only steps of what was active when the manager was made run compiled, or as a graph."""
    model = model_of()
    model.set_active_adapters(active)
    names = [None, "a", None, "b", None, None]
    given = prompts(5, 9, 7, 3, 11, 6)
    compiling = CompileConfig(backend="eager", fullgraph=False, mode=None)
    for asked in (names, None):
        config = small(varlen_compile_config=compiling, q_padding_interval_size=16)
        found = batched(model, given, config=config, adapter_names=asked)
        assert found == alone(model, given, asked or [active] * 6)


def test_a_model_with_named_heads():
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config("llama"), attn_implementation="sdpa").double()
    model.add_causal_lm_head("lm")
    for seed, (name, text) in enumerate({"a": "lora[r=4]", "i": "seq_bn_inv"}.items()):
        add(model, name, text, seed + 1)
    model.double().eval()
    model.active_head = "lm"
    given, names = prompts(5, 9, 7), ["a", "i", None]
    assert batched(model, given, adapter_names=names) == alone(model, given, names)
    model.add_causal_lm_head("a")
    model.double()
    model.active_head = "lm"
    with pytest.raises(CompositionError, match="have the heads 'a' and 'lm'"):
        batched(model, given, adapter_names=names)


# --- what acts is fixed where a request is added ---


def test_what_is_active_where_a_request_is_added_acts_on_it():
    model = model_of()
    given = prompts(9)[0]
    want = {name: alone(model, [given], [name], 12)[0] for name in ("a", "b", None)}
    assert len({tuple(each) for each in want.values()}) == 3
    with Running(model, tokens=12) as running:
        model.set_active_adapters("a")
        first = running.add(given)
        with AdapterSetup("b"):
            second = running.add(given)
            assert batched(model, [given], 12) == [want["b"]]
            with ThreadPoolExecutor(1) as pool:
                third = pool.submit(running.add, given).result()
        model.set_active_adapters(None)
        fourth = running.add(given)
        for key, name in ((first, "a"), (second, "b"), (third, "a"), (fourth, None)):
            assert list(running.result(key).generated_tokens) == want[name]


def test_generate_batch_without_names_has_what_is_active():
    model = model_of()
    given = prompts(9, 5)
    for name in ("a", None, Stack("a", "d")):
        model.set_active_adapters(name)
        assert batched(model, given) == alone(model, given, [name] * 2)
        settings = greedy()
        settings.continuous_batching_config = small()
        paged = {"cache_implementation": "paged", "generation_config": settings}
        found = model.generate(torch.tensor([given[1]]), **paged)
        assert found.flatten()[len(given[1]) :].tolist() == alone(model, given[1:], [name])[0]


def test_a_kept_manager_answers_for_other_adapters():
    model = model_of()
    given = prompts(9, 17)
    for name in ("a", "b", None, "a"):
        model.set_active_adapters(name)
        found = batched(model, given, persistent_manager=True)
        assert found == alone(model, given, [name] * 2)
    model.merge_adapter("a")
    model.set_active_adapters(None)
    assert batched(model, given, persistent_manager=True) == found
    model.reset_adapter()
    assert batched(model, given) == alone(model, given, [None] * 2)
    model.destroy_cached_continuous_batching_manager()


def test_a_changed_adapter_has_other_keys_and_values():
    model = model_of()
    given = prompts(17)
    before = batched(model, given, adapter_names=["a"], persistent_manager=True)
    stir(model, "a", seed=77, std=0.3)
    after = batched(model, given, adapter_names=["a"], persistent_manager=True)
    assert after == alone(model, given, ["a"]) != before
    model.destroy_cached_continuous_batching_manager()


def test_a_run_computes_norms_once(monkeypatch):
    model = model_of(adapters={"b": "dora[r=4]"})
    model.set_active_adapters("b")
    seen, plain = [], torch.linalg.vector_norm
    counting = lambda *args, **kwargs: seen.append(1) or plain(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(torch.linalg, "vector_norm", counting)
    model(torch.tensor(prompts(5)))
    once = len(seen)
    seen.clear()
    batched(model, prompts(5, 9))
    assert len(seen) == once > 0


# --- adapters come and go while requests run ---


def test_a_deletion_waits_for_the_requests_in_flight():
    model = model_of()
    given, names = prompts(9, 7, 11), ["a", "b", "a"]
    wants = alone(model, given, names, 60)
    layer = weakref.ref(dict(model.adapter_modules("a"))["layers.0.self_attn.q_proj"])
    with Running(model, tokens=60) as running:
        keys = [running.add(p, adapter_name=n) for p, n in zip(given, names, strict=True)]
        deleting = threading.Thread(target=model.delete_adapter, args=("a",))
        deleting.start()
        until(lambda: running.manager.requests.leaving["a"])
        with pytest.raises(StateError, match=r"'a' is being deleted or replaced"):
            running.add(given[0], adapter_name="a")
        for key, want in zip(keys, wants, strict=True):
            assert list(running.result(key).generated_tokens) == want
        deleting.join(60)
        assert "a" not in model.adapters_config
        with pytest.raises(UnknownNameError, match=r"add_request\(\): .*'a'"):
            running.add(given[0], adapter_name="a")
        assert running.run(given[1], adapter_name="b") == wants[1]
        # nothing keeps its memory
        gc.collect()
        assert layer() is None


def test_a_replaced_adapter_is_the_old_one_for_requests_in_flight(tmp_path):
    model = model_of()
    given = prompts(9)
    model.save_adapter(tmp_path, "e")
    old, new = (alone(model, given, [name], 60)[0] for name in ("a", "e"))
    with Running(model, tokens=60) as running:
        key = running.add(given[0], adapter_name="a")
        model.load_adapter(tmp_path, load_as="a", overwrite_ok=True)
        assert list(running.result(key).generated_tokens) == old
        assert running.run(given[0], adapter_name="a") == new


def test_adapters_are_added_and_deleted_while_others_run():
    model = model_of()
    given = prompts(9, 12, 5)
    wants = alone(model, given, ["a", None, "d"], 40)
    with Running(model, tokens=40) as running:
        keys = []
        for turn in range(6):
            pairs = zip(given, ["a", None, "d"], strict=True)
            keys.append([running.add(p, adapter_name=n) for p, n in pairs])
            name = f"new{turn}"
            # each at layers that no other adapter is at, which change their class
            config = ("ia3", "lora[target_modules='all-linear']", "ln_tuning")[turn % 3]
            add(model, name, config, 50 + turn)
            with running.manager.pause():
                want = alone(model, given[:1], [name], 40)[0]
            assert running.run(given[0], adapter_name=name) == want != wants[0]
            model.delete_adapter(name)
        for each in keys:
            assert [list(running.result(key).generated_tokens) for key in each] == wants


def test_others_may_be_activated_and_base_weights_may_not_change():
    model = model_of()
    given = prompts(9)
    (want,) = alone(model, given, ["a"], 40)
    with Running(model, tokens=40) as running:
        model.set_active_adapters("a")
        key = running.add(given[0])
        model.set_active_adapters("b")
        for change in (lambda: model.merge_adapter("c"), lambda: model.merge_adapter("a")):
            with pytest.raises(StateError, match=r"manager\.stop\(\)"):
                change()
        with pytest.raises(StateError, match=r"1 requests .* use 'a'. Wait for their results"):
            model.hotswap_adapter("e", into="a")
        assert list(running.result(key).generated_tokens) == want


def test_a_deletion_that_would_wait_for_ever_is_refused():
    model = model_of()
    given = prompts(9)
    running = Running(model, tokens=200, config=small(num_blocks=128))
    running.add(given[0], adapter_name="a")
    with pytest.raises(StateError, match=r"does not run. Write manager.start\(\)"):
        model.delete_adapter("a")
    with running:
        with running.manager.pause():
            with pytest.raises(StateError, match="is paused here"):
                model.delete_adapter("a")
            model.delete_adapter("c")
        running.manager.cancel_request("req_0")
        model.delete_adapter("a")
        key = running.add(given[0], adapter_name="b")
    # a manager that has stopped holds nothing
    model.delete_adapter("b")
    assert key == "req_1"


# --- bad requests ---


def test_a_bad_request_fails_alone():
    model = model_of(adapters={**MIXED, "r": "loreft"})
    positions = model.config.max_position_embeddings
    given, names = prompts(9, 12, 5), ["a", None, "d"]
    wants = alone(model, given, names, 30)
    bad = [
        (given[0], {"adapter_name": "nobody"}, UnknownNameError, "nobody"),
        (given[0], {"adapter_name": 5}, UnknownNameError, "5"),
        (given[0], {"adapter_name": "r"}, StateError, r"reads the prompt.*Write generate"),
        (given[0], {"adapter_name": BatchSplit("a", "b", batch_sizes=1)}, StateError, "divide"),
        (given[0], {"adapter_name": Split("a", "b", splits=1)}, StateError, "divide"),
        ([], {}, ConfigError, "the prompt is empty"),
        ([5, 99999], {}, ConfigError, "there is no token 99999"),
        ([5, -1], {}, ConfigError, "there is no token -1"),
        ([5, 1.5], {}, ConfigError, "has 'float'"),
        ([5, "6"], {}, ConfigError, "has 'str'"),
        ([5] * positions, {}, ConfigError, f"the model has {positions} positions"),
        ([5] * (positions - 3), {"max_new_tokens": 4}, ConfigError, "Write max_new_tokens=3"),
        (given[0], {"request_id": "mine"}, StateError, "'mine' is in flight"),
        (given[0], {"request_id": "mine__child#0"}, StateError, "is in flight"),
    ]
    with Running(model, tokens=30) as running:
        running.add(given[0], request_id="mine", adapter_name="a", max_new_tokens=90)
        keys = []
        for prompt, kwargs, error, match in bad:
            with pytest.raises(error, match=rf"(?s)add_request\(\): .*{match}"):
                running.add(prompt, **kwargs)
            keys.append([running.add(p, adapter_name=n) for p, n in zip(given, names, strict=True)])
        key = running.add(given[0], adapter_name="a", temperature="hot")
        assert "temperature" in running.result(key).error
        for prompt, new in (([5] * 200, 200), (given[0], 250)):
            with pytest.raises(ConfigError, match="the cache holds 256"):
                running.add(prompt, adapter_name="a", max_new_tokens=new)
        for each in keys:
            assert [list(running.result(key).generated_tokens) for key in each] == wants
        running.result("mine")
        until(lambda: not running.manager.requests.pins)


def test_a_request_without_an_end_fills_the_cache():
    model = model_of()
    running = Running(model, config=small(num_blocks=8), max_new_tokens=None)
    # added before there is a cache
    long = running.add([5] * 100, adapter_name="a")
    with running:
        assert "the cache holds 32" in running.result(long).error
        found = running.result(running.add(prompts(9)[0], adapter_name="a"))
        assert found.error is None
        assert len(found.prompt_ids) + len(found.generated_tokens) == 32


def test_generate_batch_refuses_before_it_starts():
    model = model_of(adapters={"a": "lora[r=4]", "r": "loreft"})
    given = prompts(9, 12)
    for names, error, match in (
        (["a", "nobody"], UnknownNameError, "nobody"),
        (["a", "r"], StateError, "reads the prompt"),
        (["a"], ConfigError, "1 names for 2 requests"),
        ("ab", ConfigError, "1 names for 2 requests"),
    ):
        with pytest.raises(error, match=rf"(?s)generate_batch\(.*{match}"):
            batched(model, given, adapter_names=names)
    with pytest.raises(ConfigError, match="request 1: the prompt is empty"):
        batched(model, [given[0], []], adapter_names=["a", None])
    with pytest.raises(StateError, match="adapter_names"):
        batched(model, given, task_ids=[0, 1])
    with AdapterSetup("a"), pytest.raises(StateError, match="Leave the block first"):
        batched(model, given, adapter_names=["a", None])
    model.merge_adapter("a")
    with pytest.raises(StateError, match=r"Write reset_adapter\(\)"):
        batched(model, given, adapter_names=["a", None])


def test_other_versions_are_refused_by_name(monkeypatch):
    model = model_of()
    # transformers may have replaced its module since the library imported it
    monkeypatch.setattr(hooks.transformers, "__version__", "5.99.0")
    for call in (
        lambda: batched(model, prompts(5)),
        lambda: batched(model, prompts(5), adapter_names=["a"]),
        lambda: model.init_continuous_batching(greedy(), small()),
    ):
        with pytest.raises(StateError, match=r"tested with transformers '5.24'.* is 5.99.0"):
            call()


# --- blocks of the prefix cache ---


def test_a_prefix_is_shared_within_an_adapter_and_not_across():
    model = model_of()
    # the same values under another name
    add(model, "a2", MIXED["a"], 1)
    (given,) = prompts(8 * PAGE + 2)
    names = ("a", "b", None, "e", "c", "d")
    wants = dict(zip(names, alone(model, [given] * 6, names), strict=True))

    def computed(running, name):
        before = running.tokens
        found = running.run(given, adapter_name=name)
        assert found == wants["a" if name == "a2" else name]
        return running.tokens - before

    with Running(model, config=small(num_blocks=512)) as running:
        new = len(given) + 4
        for name in names:
            assert computed(running, name) == new
        for name in (*names, "a2"):
            assert computed(running, name) == new - 8 * PAGE


def test_an_invocation_shares_the_blocks_of_the_base_model_before_it():
    adapters = {
        name: f"lora[r=4,target_modules=['q_proj','v_proj'],alora_invocation_tokens={tokens}]"
        for name, tokens in (("x", [5, 6]), ("y", [5, 6]), ("z", [7]))
    }
    model = model_of(adapters=adapters)
    (given,) = prompts(10 * PAGE + 2)
    # the last occurrence counts, whose tokens are in two blocks
    given[2:4] = given[6 * PAGE - 1 : 6 * PAGE + 1] = [5, 6]
    absent = [token if token not in (5, 6, 7) else 9 for token in given]
    earlier = [*given[: 6 * PAGE], 9, *given[6 * PAGE + 1 :]]
    cases = [
        # prompt, adapter, blocks that the cache has
        (given, None, 0), (given, "x", 5), (given, "y", 5), (given, "x", 10), (given, "y", 10),
        (given, None, 10), (given, "z", 10), (absent, None, 0), (absent, "x", 10),
        # the block with tokens 2 and 3 is the first that the adapter changes
        (earlier, None, 6), (earlier, "x", 0), (earlier, "x", 10), (earlier, "y", 0),
    ]  # fmt: skip
    wants = [alone(model, [prompt], [name])[0] for prompt, name, _ in cases]
    assert len({tuple(wants[i]) for i in (0, 1, 2)}) == 3
    with Running(model, config=small(num_blocks=512)) as running:
        for (prompt, name, blocks), want in zip(cases, wants, strict=True):
            before = running.tokens
            assert running.run(prompt, adapter_name=name) == want
            assert running.tokens - before == len(prompt) + 4 - blocks * PAGE
        # mixed in one step
        keys = [running.add(prompt, adapter_name=name) for prompt, name, _ in cases]
        assert [list(running.result(key).generated_tokens) for key in keys] == wants
