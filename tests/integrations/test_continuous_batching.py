"""transformers' continuous batching: the active adapters answer, or it is refused."""

from __future__ import annotations

import pytest
import torch
from families import tiny_config
from snapshots import stir
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from adapterzoo import AdapterSetup, BatchSplit, init
from adapterzoo.errors import StateError

# names that no model of another test has: a setup holds for every model that knows its names
A, B = "batching-a", "batching-b"
PROMPTS = [[5, 6, 7, 8, 9], [5, 6, 7, 8, 9, 10, 11]]
GREEDY = GenerationConfig(
    max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cuda_graph=False
)


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = tiny_config("llama")
    model = init(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval())
    for seed, name in enumerate((A, B)):
        model.add_adapter(name, 'lora[attn_matrices=["q","k","v","o"]]')
        stir(model, name, seed=seed + 1)
    return model


def small(**kwargs):
    return ContinuousBatchingConfig(
        num_blocks=16, block_size=32, max_batch_tokens=64, use_async_batching=False, **kwargs
    )


def batched(model, **kwargs):
    """Tokens of each prompt by continuous batching."""
    found = model.generate_batch(
        PROMPTS, generation_config=GREEDY, continuous_batching_config=small(), warmup=False,
        **kwargs,
    )  # fmt: skip
    return [list(found[key].generated_tokens) for key in sorted(found)]


def alone(model):
    """Tokens of each prompt by `generate`."""
    return [
        model.generate(torch.tensor([p]), generation_config=GREEDY)[0, len(p) :].tolist()
        for p in PROMPTS
    ]


def test_what_is_active_for_all_threads_answers(model):
    for name in (A, None, B):
        model.set_active_adapters(name)
        assert batched(model) == alone(model)


def test_a_run_computes_norms_once(model, monkeypatch):
    model.add_adapter("batching-d", "dora[r=4]", set_active=True)
    seen, plain = [], torch.linalg.vector_norm
    counting = lambda *args, **kwargs: seen.append(1) or plain(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(torch.linalg, "vector_norm", counting)
    model(torch.tensor([PROMPTS[0]]))
    once = len(seen)
    seen.clear()
    found = batched(model)
    assert len(seen) == once > 0
    assert found == alone(model)


def test_a_setup_is_refused_in_place_of_the_base_model(model):
    with AdapterSetup(A):
        with pytest.raises(
            StateError, match=r"does not see an AdapterSetup.*set_active_adapters\(Stack"
        ):
            batched(model)
        with pytest.raises(StateError, match="does not see an AdapterSetup"):
            model.init_continuous_batching(GREEDY, small())
        paged = {"cache_implementation": "paged", "max_new_tokens": 2}
        with pytest.raises(StateError, match="does not see an AdapterSetup"):
            model.generate(torch.tensor([PROMPTS[0]]), **paged)


def test_names_of_rows_are_refused_and_not_ignored(model):
    with pytest.raises(StateError, match=r"generate_batch\(.*adapter_names=….*for all requests"):
        batched(model, adapter_names=[A, B])
    model.set_active_adapters(BatchSplit(A, B, batch_sizes=[1, 1]))
    with pytest.raises(StateError, match="divides the batch"):
        batched(model)


def test_a_manager_that_was_kept_does_not_answer_for_other_adapters(model):
    model.set_active_adapters(A)
    first = batched(model, persistent_manager=True)
    assert batched(model, persistent_manager=True) == first
    model.set_active_adapters(B)
    with pytest.raises(StateError, match=r"made with Stack\('batching-a'\).*destroy_cached"):
        batched(model, persistent_manager=True)
    model.destroy_cached_continuous_batching_manager()
    assert batched(model) == alone(model)


def test_an_adapter_of_the_same_name_is_another_one(model, tmp_path):
    model.save_adapter(tmp_path, B)
    model.set_active_adapters(A)
    batched(model, persistent_manager=True)
    model.load_adapter(tmp_path, load_as=A, set_active=True, overwrite_ok=True)
    with pytest.raises(StateError, match="or it has changed"):
        batched(model)
    model.destroy_cached_continuous_batching_manager()


def test_nothing_is_switched_under_a_manager_that_runs(model):
    model.set_active_adapters(A)
    with model.continuous_batching_context_manager(GREEDY, True, 10, small(), warmup=False) as m:
        m.add_request(PROMPTS[0], max_new_tokens=2)
        assert m.get_result(timeout=30).error is None
        with m.pause():
            for change in (
                lambda: model.set_active_adapters(B),
                lambda: model.delete_adapter(A),
                lambda: model.add_adapter(A, "lora", overwrite_ok=True),
                lambda: model.merge_adapter(A),
                lambda: model.merge_adapter(B),
                lambda: setattr(model, "active_adapters", None),
            ):
                with pytest.raises(StateError, match=r"manager\.stop\(\)"):
                    change()
        with AdapterSetup(B), pytest.raises(StateError, match=r"add_request\(\): the thread"):
            m.add_request(PROMPTS[0])
        with pytest.raises(StateError, match=r"add_request\(\): adapter_names=…"):
            m.add_request(PROMPTS[0], adapter_names=[A])
    model.set_active_adapters(B)
    assert batched(model) == alone(model)


@pytest.mark.parametrize("config", ["loreft", "lora[use_gating=True]",
                                    "seq_bn[use_gating=True,convention='adapterhub']"])  # fmt: skip
def test_adapters_that_read_a_prompt_are_refused(model, config):
    model.add_adapter("batching-c", config, set_active=True)
    with pytest.raises(StateError, match=r"reads the prompt.*generate\(…\)"):
        batched(model)
