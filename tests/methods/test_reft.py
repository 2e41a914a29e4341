"""ReFT: the formula, which tokens are edited, generation, rows; files are in test_golden_zoo."""

import pytest
import torch
from architectures.tiny_models import tiny_model
from families import tiny_inputs
from made import hidden, made
from snapshots import stir
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from adapterzoo import BatchSplit, DiReftConfig, LoReftConfig, NoReftConfig, Stack, init
from adapterzoo.errors import CheckpointError, ConfigError, SiteError, StateError

TINY = "their tiny models took other inputs"
LOREFT = LoReftConfig(r=2, prefix_positions=2, suffix_positions=1)
CONFIGS = {
    "loreft": LOREFT,
    "noreft": NoReftConfig(r=2, prefix_positions=2, suffix_positions=1, non_linearity="tanh"),
    "direft": DiReftConfig(r=3, prefix_positions=1, suffix_positions=2),
    "tied": LoReftConfig(r=2, prefix_positions=1, suffix_positions=2, tied_weights=True),
}


def edited(unit, config, h):
    """Equations 2 and 3 for the states `h` `[tokens, d]`, by plain torch."""
    R = unit.projection.detach()
    if config.orthogonality:
        # Gram-Schmidt, row by row
        rows = []
        for row in R:
            row = row - sum(((row @ r) * r for r in rows), torch.zeros_like(row))
            rows.append(row / row.norm())
        R = torch.stack(rows)
    change = h @ unit.source.weight.detach().T + unit.source.bias.detach()
    change = torch.tanh(change) if config.non_linearity == "tanh" else change
    if config.subtract_projection:
        change = change - h @ R.T
    return h + change @ R


def expected(model, config, name, h, mask):
    """The output of the first block: each row's own first and last real tokens edited."""
    units = dict(model.adapter_modules(name))[FIRST].units
    out = h.clone()
    for row in range(len(h)):
        real = mask[row].nonzero().flatten()
        suffix = real[max(len(real) - config.suffix_positions, 0) :]
        prefix = [t for t in real[: config.prefix_positions] if t not in suffix]
        for unit, tokens in (("0", prefix), ("1", suffix)):
            module = units[unit if unit in units else "0"] if len(tokens) else None
            for t in tokens:
                out[row, t] = edited(module, config, h[row, t])
    return out


FIRST = "layers.0"
MASKS = {
    "no padding": [[1] * 6] * 3,
    "right": [[1] * 6, [1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]],
    "left": [[1] * 6, [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]],
    "both, with holes": [[0, 1, 1, 1, 1, 0], [1, 0, 1, 1, 0, 1], [0, 1, 0, 0, 0, 1]],
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_ends_of_each_row_are_edited(name, mask):
    """Each row has its own ends; they overlap in short rows, where the suffix wins."""
    config, mask = CONFIGS[name], torch.tensor(MASKS[mask])
    model = made("llama", a=config)
    seen = []
    model.layers[1].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    ids = torch.arange(3, 21).view(3, 6)
    for setup in (None, "a"):
        model.set_active_adapters(setup)
        hidden(model, input_ids=ids, attention_mask=mask)
    # the first block reads no edited state, so its output without the edit is that of the base
    want = expected(model, config, "a", seen[0], mask)
    torch.testing.assert_close(seen[1], want, rtol=1e-12, atol=1e-12)
    assert not torch.equal(seen[0], seen[1])


def test_positions_beyond_the_row_are_none():
    config = NoReftConfig(r=1, prefix_positions=65_536, suffix_positions=0)
    model = made("llama", a=config)
    seen = []
    model.layers[1].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    ids, mask = torch.arange(3, 11).view(2, 4), torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0]])
    for setup in (None, "a"):
        model.set_active_adapters(setup)
        hidden(model, input_ids=ids, attention_mask=mask)
    changed = (seen[0] != seen[1]).any(-1)
    assert torch.equal(changed, mask.bool())


def test_a_batch_is_its_rows():
    """Prompts of other lengths, padded on either side, one row without an adapter."""
    model = made("llama", a=LOREFT, b=CONFIGS["direft"])
    ids, mask = torch.arange(3, 21).view(3, 6), torch.tensor(MASKS["left"])
    mask[2] = torch.tensor([0, 0, 0, 1, 1, 1])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    batch = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    model.set_active_adapters(BatchSplit("b", None, "a", batch_sizes=[1, 1, 1]))
    both = hidden(model, **batch)
    for row, name in enumerate(["b", None, "a"]):
        model.set_active_adapters(name)
        real = mask[row].bool()
        alone = hidden(model, input_ids=ids[row : row + 1, real])
        torch.testing.assert_close(both[row, real], alone[0], rtol=1e-9, atol=1e-9)


def test_a_stack_edits_one_after_the_other():
    config = NoReftConfig(r=1, prefix_positions=2)
    model = made("llama", a=config, b=config)
    seen = []
    model.layers[1].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    for setup in (None, Stack("a", "b")):
        model.set_active_adapters(setup)
        hidden(model, input_ids=torch.arange(3, 9)[None])
    mask = torch.ones(1, 6)
    want = expected(model, config, "a", seen[0], mask)
    want = expected(model, config, "b", want, mask)
    torch.testing.assert_close(seen[1], want, rtol=1e-12, atol=1e-12)


def test_a_decoder_counts_in_its_own_mask():
    """The encoder's padding moves no edit in the decoder, nor the other way round."""
    config = NoReftConfig(r=1, prefix_positions=1, layers=(2,))
    model = made("t5", a=config)
    seen = []
    model.decoder.block[1].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    given = {
        "input_ids": torch.arange(3, 13).view(2, 5),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]]),
        "decoder_input_ids": torch.arange(3, 11).view(2, 4),
        "decoder_attention_mask": torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]]),
    }
    for setup in (None, "a"):
        model.set_active_adapters(setup)
        hidden(model, **given)
    # what a hidden token reads is of no use
    changed = (seen[0] != seen[1]).any(-1) & given["decoder_attention_mask"].bool()
    assert changed.tolist() == [[True, False, False, False], [False, True, False, False]]


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
def test_generation_edits_the_prompt_alone(family, beams):
    """With a cache and without, the same scores: no new token is ever edited."""
    auto = AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM
    model = made(family, auto=auto, a=LOREFT)
    model.set_active_adapters("a")
    inputs = {k: v for k, v in tiny_inputs(family).items() if not k.startswith("decoder")}
    options = {"max_new_tokens": 5, "num_beams": beams, "do_sample": False, "pad_token_id": 0}
    options |= {"eos_token_id": None, "output_scores": True, "return_dict_in_generate": True}
    cached = model.generate(**inputs, **options, use_cache=True)
    uncached = model.generate(**inputs, **options, use_cache=False)
    assert torch.equal(cached.sequences, uncached.sequences)
    torch.testing.assert_close(cached.scores, uncached.scores, rtol=1e-9, atol=1e-9)
    model.set_active_adapters(None)
    base = model.generate(**inputs, **options, use_cache=True)
    assert not torch.allclose(base.scores[0], cached.scores[0])


def test_tied_ends_have_one_unit():
    model = made("llama", a=CONFIGS["tied"], b=LOREFT)
    units = {n: list(dict(model.adapter_modules(n))[FIRST].units) for n in "ab"}
    assert units == {"a": ["0"], "b": ["0", "1"]}
    only = made("llama", a=NoReftConfig(prefix_positions=0, suffix_positions=2))
    assert list(dict(only.adapter_modules("a"))[FIRST].units) == ["1"]


def test_rows_stay_orthonormal_through_adamw():
    """Weight decay shrinks R, of which only the rows' span is used: adapters lost it here."""
    model = made("llama", dtype=torch.float32, a=LoReftConfig(r=4))
    model.train_adapter("a")
    unit = dict(model.adapter_modules("a"))[FIRST].units["0"]
    start = unit.rows().detach().clone()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05, weight_decay=1.0)
    for _ in range(20):
        optimizer.zero_grad()
        model(**tiny_inputs("llama"))[0].square().sum().backward()
        optimizer.step()
    rows = unit.rows().detach()
    torch.testing.assert_close(rows @ rows.T, torch.eye(4), rtol=0, atol=1e-6)
    assert (rows - start).abs().max() > 0.1


def test_checkpointed_gradients_are_the_gradients():
    found = []
    for use in (None, True, False):
        model = made("llama", a=LOREFT)
        model.train_adapter("a")
        if use is not None:
            model.gradient_checkpointing_enable({"use_reentrant": use})
        model(**tiny_inputs("llama"))[0].square().sum().backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
        assert all(grad is not None and grad.abs().max() > 0 for grad in found[-1].values())
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_a_row_without_real_tokens_is_named():
    """Before the first block is computed, and once for each call."""
    model = made("llama", a=LOREFT)
    ids, mask = torch.arange(3, 15).view(3, 4), torch.tensor([[1] * 4, [0] * 4, [0] * 4])
    computed = []
    model.layers[0].self_attn.register_forward_hook(lambda *_: computed.append(1))
    model.set_active_adapters("a")
    with pytest.raises(StateError, match=r"\[3, 4\].*0 at every token of rows 1, 2.*Leave these"):
        hidden(model, input_ids=ids, attention_mask=mask)
    assert not computed
    # the next call is a call of its own, and others read no mask
    hidden(model, input_ids=ids, attention_mask=torch.ones_like(mask))
    model.set_active_adapters(None)
    hidden(model, input_ids=ids, attention_mask=mask)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": 0}, r"r=0.*from 1"),
        ({"prefix_positions": -1}, r"prefix_positions=-1.*from 0"),
        ({"suffix_positions": 65_537}, r"suffix_positions=65537.*65,?536"),
        ({"prefix_positions": 0}, r"nothing is left to edit. Write prefix_positions=3"),
        ({"dropout": 1.0}, r"dropout=1.0.*below 1"),
        ({"non_linearity": "gulp"}, r"'gulp'.*'gelu'"),
        ({"layers": "some"}, r"layers='some'.*'all'"),
        ({"layers": (-1,)}, r"layers=\(-1,\)"),
        ({"output_reft": False}, r"output_reft=False.*True"),
        ({"dtype": "int8"}, r"dtype='int8'.*float32"),
        ({"init_weights_seed": "x"}, r"init_weights_seed='x'"),
        ({"orthogonality": "yes"}, r"orthogonality='yes'"),
    ],
)
def test_fields_out_of_range_are_named(fields, message):
    with pytest.raises(ConfigError, match=message):
        LoReftConfig(**fields)


def test_what_the_model_lacks_is_refused_when_it_is_added():
    model = made("llama")
    with pytest.raises(ConfigError, match=r"no block 7; the model has 2.*Write layers="):
        model.add_adapter("a", LoReftConfig(layers=(7,)))
    with pytest.raises(ConfigError, match=r"r=33.*32 features. Write r=32 or less"):
        model.add_adapter("a", LoReftConfig(r=33))
    assert not list(model.adapters_config)


@pytest.mark.needs("transformers>=5.24", "it had no DeepSeek 4")
def test_blocks_whose_output_is_no_state_of_each_token_are_refused():
    """Hyper-connections carry several streams; XLM's blocks end in a norm."""
    model = init(tiny_model("deepseek_v4").model)
    with pytest.raises(SiteError, match=r"'layers.0' is several residual streams. Write layers="):
        model.add_adapter("a", LOREFT)
    model = init(tiny_model("xlm").model)
    model.add_adapter("a", LOREFT)
    assert next(path for path, _ in model.adapter_modules("a")) == "layer_norm2.0"


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param("qwen2_5_vl_vision", marks=pytest.mark.needs("transformers>=5.24", TINY)),
        pytest.param("gemma3", marks=pytest.mark.needs("transformers>=5.24", TINY)),
        "wav2vec2",
        "sam_vision_model",
    ],
)
def test_a_second_row_does_not_matter(model_type):
    """Packed patches, masks by layer, frames of audio, grids: each row alone is the row."""
    tiny = tiny_model(model_type)
    model = init(tiny.model.double())
    model.add_adapter("a", LOREFT)
    stir(model, "a", 0)
    model.set_active_adapters("a")
    one = {k: v.double() if v.is_floating_point() else v for k, v in tiny.inputs.items()}
    two = {k: torch.cat([v, v.flip(1) if k == "input_ids" else v]) for k, v in one.items()}
    alone, both = hidden(model, **one), hidden(model, **two)
    torch.testing.assert_close(both[: len(alone)], alone, rtol=1e-6, atol=1e-6)


def test_a_layer_by_itself_has_no_positions():
    model = made("llama", a=LOREFT)
    model.set_active_adapters("a")
    with pytest.raises(StateError, match="Call the whole model"):
        model.layers[0](torch.zeros(1, 3, 32, dtype=torch.float64))


def test_half_precision_keeps_its_dtype():
    model = made("llama", dtype=torch.bfloat16, a=LoReftConfig(r=2, dtype="float32"))
    model.set_active_adapters("a")
    assert hidden(model, **tiny_inputs("llama")).dtype is torch.bfloat16
    kinds = {p.dtype for _, m in model.adapter_modules("a") for p in m.parameters()}
    assert kinds == {torch.float32}


@pytest.mark.parametrize("config", [CONFIGS["direft"], LOREFT.replace(subtract_projection=False)])
def test_direft_is_not_written_where_a_file_cannot_say_it(config, tmp_path):
    """The fields of the peer's files lack subtract_projection, and it would load NoReFT."""
    model = made("bert", a=config)
    with pytest.raises(CheckpointError, match=r"subtract_projection=False.*format='native'"):
        model.save_adapter(tmp_path / "a", "a", format="adapterhub")
    assert not (tmp_path / "a").exists()
    stir(model, "a", 0)
    model.set_active_adapters("a")
    right = hidden(model, **tiny_inputs("bert"))
    model.save_adapter(tmp_path / "a", "a")
    model.load_adapter(tmp_path / "a", load_as="b", set_active=True)
    assert torch.equal(hidden(model, **tiny_inputs("bert")), right)
