"""The table of `docs/calls.md`: a part of its cells, run again; `make calls` runs all of them."""

from __future__ import annotations

import inspect
import warnings

import calls_table as table
import pytest
import torch
from families import tiny_config
from snapshots import stir
from swept import all_but
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationMixin,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from adapterzoo import init
from adapterzoo.errors import StateError

PAGE = table.read(table.TABLE.read_text(encoding="utf-8"))


def test_the_page_has_all_methods_and_no_wrong_cell():
    assert {*PAGE} == {*table.rows()}
    cells = {text for row in PAGE.values() for text in row.values()}
    assert cells <= {table.RIGHT, table.REFUSED, table.NONE}
    # what works in the usual way is not refused; shifted positions in a window are, in every way
    only = [text for (_, text), row in PAGE.items() if row["greedy"] != table.RIGHT]
    assert all("positions='shifted'" in text for text in only)
    assert all(
        {*row.values()} == {table.REFUSED} for row in PAGE.values() if row["greedy"] != table.RIGHT
    )


@pytest.mark.parametrize("family", all_but(["llama", "t5"], table.FAMILIES))
def test_a_part_of_the_cells(family):
    """Of each method two ways, so that each way has several methods."""
    ways, at = [*table.WAYS], table.FAMILIES.index(family)
    for i, text in enumerate(t for f, t in PAGE if f == family):
        for way in (ways[(i + at) % len(ways)], ways[(i + at + 4) % len(ways)]):
            assert table.cell(family, text, way) == PAGE[family, text][way], (text, way)


@pytest.mark.parametrize("way", ["lookup", "left"])
def test_a_wrong_cell_would_be_seen(way):
    """A gate of `adapters` is the mean over all tokens of a call, by definition."""
    text = "lora[use_gating=True,convention='adapterhub']"
    assert table.cell("llama", text, way) == table.WRONG


# --- models and calls beside those of the table ---


def of_images(config):
    """A model whose tower of images has as many tokens as a text, with an adapter."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    vision = {**sizes, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    whole = LlavaConfig(
        vision_config={"model_type": "clip_vision_model", **vision}, image_token_id=98,
        text_config=tiny_config("llama"), vision_feature_layer=-1,
    )  # fmt: skip
    model = init(LlavaForConditionalGeneration(whole).double().eval())
    model.add_adapter("a", config, set_active=True)
    stir(model, "a", std=0.5)
    return model


IMAGE = {
    "input_ids": torch.tensor([[1, 98, 98, 98, 98, 11, 12, 13, 11, 12]]),
    "pixel_values": torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1)).double(),
}
SHORT = {
    "max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0,
    "suppress_tokens": [98], "output_logits": True, "return_dict_in_generate": True,
}  # fmt: skip


@pytest.mark.parametrize(
    "config", ["loreft[suffix_positions=2]", "double_seq_bn[use_gating=True]", "prompt_tuning"]
)
def test_the_tower_of_images_has_a_prompt_of_its_own(config):
    model = of_images(config)
    uncached = torch.stack(model.generate(**IMAGE, **SHORT, use_cache=False).logits)
    cached = torch.stack(model.generate(**IMAGE, **SHORT).logits)
    torch.testing.assert_close(cached, uncached, rtol=0, atol=table.BOUND)
    first = model(**IMAGE).logits[:, -1]
    torch.testing.assert_close(uncached[0].double(), first, rtol=0, atol=table.BOUND)
    model.set_active_adapters(None)
    assert (model(**IMAGE).logits[:, -1] - first).abs().max() > 1e-3
    if config != "prompt_tuning":
        model.set_active_adapters("a")
        found = torch.stack(model.generate(**IMAGE, **SHORT, prompt_lookup_num_tokens=3).logits)
        torch.testing.assert_close(found, uncached, rtol=0, atol=table.BOUND)


def test_a_state_that_does_not_count_its_tokens():
    """Mamba keeps one in place of a cache."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "intermediate_size": 64}
    config = AutoConfig.for_model("mamba", vocab_size=99, time_step_rank=4, **sizes)
    model = init(AutoModelForCausalLM.from_config(config).double().eval())
    gated = "lora[target_modules=['in_proj','x_proj'],use_gating=True]"
    model.add_adapter("a", gated, set_active=True)
    stir(model, "a", std=0.5)
    ids = torch.randint(10, 90, (2, 8))
    given = {**SHORT, "eos_token_id": None, "suppress_tokens": None}
    pair = [model.generate(ids, use_cache=cached, **given).logits for cached in (True, False)]
    torch.testing.assert_close(*map(torch.stack, pair), rtol=0, atol=table.BOUND)


@pytest.mark.parametrize("text", ["loreft", "lora[use_gating=True]"])
def test_calls_beside_the_sequence_are_refused(text):
    """Guidance calls the model on a sequence of its own."""
    case = table.Case("llama", text)
    with pytest.raises(StateError, match=r"outside of the sequence.*guidance_scale"):
        case.generate(torch.tensor(case.rows[:1]), guidance_scale=2.0)


def test_each_generation_has_a_prompt_of_its_own():
    case = table.Case("llama", "lora[use_gating=True]")
    rows = [torch.tensor([row]) for row in case.rows]
    assert case.off(case.generate(rows[0]), 0) < table.BOUND
    assert case.off(case.generate(rows[1]), 1) < table.BOUND
    # and one that runs inside of another
    inner = []

    def score(ids, scores):
        inner.append(case.generate(rows[1]))
        return scores

    got = case.generate(rows[0], logits_processor=[score])
    assert case.off(got, 0) < table.BOUND
    assert max(case.off(each, 1) for each in inner) < table.BOUND


@pytest.mark.parametrize("text", ["loreft[suffix_positions=2]", "double_seq_bn[use_gating=True]"])
def test_embeddings_are_a_prompt(text):
    case = table.Case("llama", text)
    ids = torch.tensor(case.rows[:1])
    embeds = case.model.get_input_embeddings()(ids)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = case.model.generate(
            inputs_embeds=embeds, **{**SHORT, "suppress_tokens": None}, eos_token_id=None
        )
    assert case.off(list(out.logits), 0) < table.BOUND


@torch.no_grad()
def test_positions_that_compiled_code_cannot_read_are_refused():
    case = table.Case("llama", "loreft")
    ids = torch.tensor(case.rows[:1])
    positions = torch.arange(ids.shape[1])[None]
    # what other tests have compiled counts towards a limit, above which nothing is compiled
    torch.compiler.reset()
    compiled = torch.compile(case.model, backend="eager")
    with pytest.raises(StateError, match=r"position_ids=\[1, 10\].*Pass an attention_mask"):
        compiled(ids, position_ids=positions, use_cache=False)


@pytest.mark.parametrize("text", ["loreft", "lora[use_gating=True]"])
def test_hooks_of_transformers_show_the_prompt(text):
    """`generate` passes its length, and the length of each call, by these names."""
    length = inspect.signature(GenerationMixin._prepare_generated_length).parameters
    assert "input_ids_length" in length
    names = [*inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters]
    assert names[:2] == ["self", "input_ids"]
    assert (
        "inputs_embeds"
        in inspect.signature(
            table.Case("llama", text).model.prepare_inputs_for_generation
        ).parameters
    )
