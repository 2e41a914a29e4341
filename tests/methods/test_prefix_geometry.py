"""Where a prefix stands: static caches and padding at the start change nothing, in float64."""

import pytest
import torch
from architectures.tiny_models import tiny_model
from families import has_sdpa, tiny_config
from snapshots import stir
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from adapterzoo import BatchSplit, Stack, init
from adapterzoo.errors import StateError
from adapterzoo.methods.prompt.prefix_tuning import PrefixTuningConfig

FLAT = PrefixTuningConfig(prefix_length=3, flat=True)
SHIFTED = FLAT.replace(positions="shifted")
CONFIGS = {
    "flat": FLAT,
    "gated": PrefixTuningConfig(prefix_length=3, bottleneck_size=4, use_gating=True),
    "adapterhub": FLAT.replace(convention="adapterhub"),
    "mam": "mam",
    "unipelt": "unipelt",
}
ENCODER_DECODERS = ("t5", "mt5", "umt5", "bart")
# in the Gemmas, a window of 16 moves during generation
GENERATORS = ("gpt2", "llama", "gemma2", "gemma3_text", "bloom", *ENCODER_DECODERS)
TOKENS, NEW, PADDING = 12, 6, 3


def made(family, auto=AutoModel, attention=None, **configs):
    if not has_sdpa(family):
        pytest.skip("the attention of this family takes no prefix")
    torch.manual_seed(0)
    model = auto.from_config(tiny_config(family), attn_implementation=attention)
    model = init(model.double().eval())
    for number, (name, config) in enumerate(configs.items()):
        model.add_adapter(name, config)
        stir(model, name, number, std=0.3)
    model.set_active_adapters(next(iter(configs)))
    return model


def generating(family, config, attention=None):
    auto = AutoModelForSeq2SeqLM if family in ENCODER_DECODERS else AutoModelForCausalLM
    return made(family, auto, attention, a=config)


def written(model, ids, mask=None, **options):
    """The logits of new tokens, `[new, rows, vocabulary]`."""
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"eos_token_id": None, "forced_eos_token_id": None, "pad_token_id": 0, **options}
    options |= {"output_logits": True, "return_dict_in_generate": True, "do_sample": False}
    found = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, **options)
    return torch.stack(found.logits)


def prompt():
    return torch.randint(5, 90, (1, TOKENS), generator=torch.Generator().manual_seed(0))


def padded():
    """A batch of two rows, with the prompt after padding in the second; and its mask."""
    row = torch.cat([torch.zeros(1, PADDING, dtype=torch.long), prompt()], 1)
    other = torch.randint(5, 90, row.shape, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, TOKENS + PADDING, dtype=torch.long)
    mask[1, :PADDING] = 0
    return torch.cat([other, row]), mask


def close(found, expected, model):
    """Equal up to the rounding of float64; eager attention computes its softmax in float32."""
    is_eager = model.config._attn_implementation == "eager"
    bound = 1e-6 if is_eager else 1e-9
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


STATIC = [(f, "flat") for f in GENERATORS]
STATIC += [(f, c) for f in ("gpt2", "gemma3_text", "t5") for c in CONFIGS if c != "flat"]


@pytest.mark.parametrize(("family", "config"), STATIC)
def test_a_static_cache_changes_nothing(family, config):
    model = generating(family, CONFIGS[config])
    expected = written(model, prompt(), use_cache=False)
    close(written(model, prompt(), cache_implementation="static"), expected, model)
    model.set_active_adapters(None)
    assert (written(model, prompt(), use_cache=False) - expected).abs().max() > 1e-5


@pytest.mark.parametrize("attention", ["eager", None])
@pytest.mark.parametrize("family", ["gpt2", "llama", "bloom", "t5"])
def test_a_static_cache_changes_nothing_behind_the_prefix(family, attention):
    model = generating(family, SHIFTED, attention)
    expected = written(model, prompt(), use_cache=False)
    close(written(model, prompt(), cache_implementation="static"), expected, model)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_a_static_cache_with_a_window_that_hides_the_prefix_is_refused(family):
    model = generating(family, SHIFTED)
    with pytest.raises(StateError, match=r"positions='shifted' exceed the sliding window of 16"):
        written(model, prompt(), cache_implementation="static")


@pytest.mark.parametrize("cache", [None, "dynamic", "static"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "t5", "umt5"])
def test_a_padded_prompt_is_the_prompt_alone(family, cache):
    model = generating(family, FLAT)
    how = {"use_cache": False} if cache is None else {"cache_implementation": cache}
    expected = written(model, prompt(), use_cache=False)
    close(written(model, *padded(), **how)[:, 1:], expected, model)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["t5", "mt5", "umt5"])
def test_relative_positions_start_at_the_first_real_token(family, attention):
    """Padding before the tokens of an encoder and of a decoder."""
    model = made(family, AutoModel, attention, a=FLAT)
    ids, mask = padded()
    with torch.no_grad():
        alone = model(input_ids=ids[1:, PADDING:], decoder_input_ids=ids[1:, PADDING:])[0]
        both = model(
            input_ids=ids, attention_mask=mask, decoder_input_ids=ids, decoder_attention_mask=mask
        )[0]
    close(both[1:, PADDING:], alone, model)


SETUPS = {"one": "a", "a stack": Stack("a", "b"), "rows": BatchSplit("b", "a", batch_sizes=[1, 1])}


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("positions", ["kept", "shifted"])
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_rotary_positions_start_at_the_first_real_token(family, positions, setup):
    """A call with a mask and without position_ids, as in classification."""
    config = FLAT.replace(positions=positions)
    model = made(family, a=config, b=config.replace(prefix_length=2))
    ids, mask = padded()
    alone = "a" if setup == "rows" else SETUPS[setup]
    with torch.no_grad():
        model.set_active_adapters(alone)
        expected = model(input_ids=ids[1:, PADDING:])[0]
        model.set_active_adapters(SETUPS[setup])
        close(model(input_ids=ids, attention_mask=mask)[0][1:, PADDING:], expected, model)
        embedded = model.get_input_embeddings()(ids)
        close(model(inputs_embeds=embedded, attention_mask=mask)[0][1:, PADDING:], expected, model)
        # the numbers of the caller are kept
        numbers = torch.arange(TOKENS + PADDING)[None]
        found = model(input_ids=ids, attention_mask=mask, position_ids=numbers)[0]
    assert (found[1:, PADDING:] - expected).abs().max() > 1e-6


def test_rotary_positions_go_on_after_a_cache():
    """The second call has a mask of all tokens, and no position_ids."""
    model = made("llama", a=FLAT)
    ids, mask = padded()
    with torch.no_grad():
        whole = model(input_ids=ids, attention_mask=mask)[0]
        first = model(input_ids=ids[:, :9], attention_mask=mask[:, :9], use_cache=True)
        rest = model(ids[:, 9:], mask, None, first[1])[0]
    close(rest[1], whole[1, 9:], model)


@pytest.mark.parametrize("family", ["modernbert", "gemma3_text"])
def test_a_padded_row_under_a_window_is_the_row_alone(family):
    model = made(family, a=FLAT)
    ids, mask = padded()
    with torch.no_grad():
        expected = model(input_ids=ids[1:, PADDING:])[0]
        close(model(input_ids=ids, attention_mask=mask)[0][1:, PADDING:], expected, model)


@pytest.mark.needs("transformers>=5.24", "the tiny Gemma 3 took other inputs")
def test_the_outer_model_may_number_the_tokens():
    """LLaVA's language model gets a mask and no numbers; Gemma 3's gets numbers from outside."""
    for model_type in ("llava", "gemma3"):
        tiny = tiny_model(model_type)
        model = init(tiny.model.double())
        model.add_adapter("a", FLAT, set_active=True)
        stir(model, "a", std=0.5)
        ids, mask = padded()
        ids = ids.clamp(10, 60)
        with torch.no_grad():
            alone = model(input_ids=ids[1:, PADDING:])[0]
            close(model(input_ids=ids, attention_mask=mask)[0][1:, PADDING:], alone, model)
