"""Prompt tuning: rows among the tokens of a call; files of adapters are in test_golden_zoo."""

import peft
import pytest
import torch
from cached import CACHE
from families import tiny_config
from snapshots import stir
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedTokenizerFast,
)

from adapterzoo import (
    AutoAdapterModel,
    Average,
    BatchSplit,
    LoReftConfig,
    Parallel,
    PrefixTuningConfig,
    PromptTuningConfig,
    SeqBnConfig,
    Split,
    Stack,
    init,
)
from adapterzoo.errors import CheckpointError, CompositionError, ConfigError, SiteError, StateError

P = 3
JOINS = ("inputs", "embeddings")
IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])
RIGHT = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
LEFT = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])


def prompt(length=P, **fields):
    return PromptTuningConfig(prompt_length=length, **fields)


SMALL = {
    "rwkv": {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 64},
    "bloom": {"vocab_size": 99, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "opt": {
        "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "ffn_dim": 64, "max_position_embeddings": 64, "word_embed_proj_dim": 32,
    },
}  # fmt: skip


def plain(family, auto=AutoModel):
    torch.manual_seed(0)
    own = SMALL.get(family)
    config = tiny_config(family) if own is None else AutoConfig.for_model(family, **own)
    return auto.from_config(config).double().eval()


def made(family, auto=AutoModel, active=None, **configs):
    model = init(plain(family, auto))
    for number, (name, config) in enumerate(configs.items()):
        torch.manual_seed(number + 1)
        model.add_adapter(name, config)
    model.set_active_adapters(active or next(iter(configs)))
    return model


def rows_of(model, name="a"):
    return model.base_model.prompt_tunings[name].prompt_embedding.detach().double()


def insert(t, rows, at):
    """[E; x] or [x0; E; x1 …] of one row, by hand."""
    return torch.cat([t[:, :at], rows.expand(len(t), *rows.shape[-(t.dim() - 1) :]), t[:, at:]], 1)


def hidden(model, **inputs):
    with torch.no_grad():
        return model(**inputs)[0]


ENCODERS = ("bert", "roberta", "distilbert", "deberta-v2", "electra", "albert", "modernbert")
DECODERS = ("gpt2", "llama", "gpt_neox", "gemma2", "opt", "bloom")


@pytest.mark.parametrize("combine", ["prefix", "prefix_after_bos"])
@pytest.mark.parametrize("family", [*ENCODERS, *DECODERS])
def test_rows_join_the_inputs(family, combine):
    """The plain model, given the embedded tokens with the rows among them."""
    base = plain(family)
    at = 0 if combine == "prefix" else 1
    model = made(family, a=prompt(combine=combine))
    words = base.get_input_embeddings()(IDS)
    ones = torch.ones(P, dtype=torch.long)
    truth = hidden(
        base,
        inputs_embeds=insert(words, rows_of(model), at),
        attention_mask=insert(RIGHT, ones, at),
    )
    found = hidden(model, input_ids=IDS, attention_mask=RIGHT)
    real = insert(RIGHT, ones, at).bool()
    torch.testing.assert_close(found[real], truth[real])
    without = hidden(model, input_ids=IDS)
    again = hidden(base, inputs_embeds=insert(words, rows_of(model), at))
    torch.testing.assert_close(without, again)
    given = hidden(model, inputs_embeds=words, attention_mask=RIGHT)
    torch.testing.assert_close(given[real], truth[real])


@pytest.mark.parametrize("combine", ["prefix", "prefix_after_bos"])
@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "electra", "llama"])
def test_rows_join_the_embeddings(family, combine):
    """The plain model, whose embedding module gives the rows beside what it gives alone."""
    base = plain(family)
    at = 0 if combine == "prefix" else 1
    model = made(family, a=prompt(combine=combine, joins="embeddings"))
    module = base.embed_tokens if family == "llama" else base.embeddings
    module.register_forward_hook(lambda _, __, out: insert(out, rows_of(model), at))
    mask = insert(RIGHT, torch.ones(P, dtype=torch.long), at)
    truth = hidden(base, input_ids=IDS, attention_mask=mask)
    found = hidden(model, input_ids=IDS, attention_mask=RIGHT)
    torch.testing.assert_close(found[mask.bool()], truth[mask.bool()])


@pytest.mark.parametrize("joins", JOINS)
@pytest.mark.parametrize("family", ["bert", "roberta", "gpt_neox", "llama", "bloom", "t5"])
@pytest.mark.parametrize("combine", ["prefix", "prefix_after_bos"])
def test_a_padded_row_is_the_row_alone(family, joins, combine):
    if family == "bloom" and joins == "embeddings":
        pytest.skip("the model norms the embeddings by itself")
    model = made(family, a=prompt(joins=joins, combine=combine))
    model = model.encoder if family == "t5" else model
    left = IDS.clone()
    if family == "roberta":
        # its positions are counted from the tokens
        left[1, :2] = 1
    for mask, own, kept in ((RIGHT, slice(0, 4), slice(0, 7)), (LEFT, slice(2, 6), slice(2, 9))):
        # BERT counts padding; transformers' eager attention makes NaN of it in float64
        if family in ("bert", "bloom") and mask is LEFT:
            continue
        ids = left if mask is LEFT else IDS
        batch = hidden(model, input_ids=ids, attention_mask=mask)
        alone = hidden(model, input_ids=ids[1:, own])
        torch.testing.assert_close(batch[1:, kept], alone)
        full = hidden(model, input_ids=IDS[:1])
        torch.testing.assert_close(batch[:1], full)


def test_encoder_decoders_have_the_prompt_at_the_encoder():
    for family in ("t5", "bart"):
        base, model = plain(family), made(family, a=prompt())
        decoder = IDS[:, :4]
        words = base.encoder.get_input_embeddings()(IDS)
        truth = hidden(
            base, inputs_embeds=insert(words, rows_of(model), 0), decoder_input_ids=decoder,
            attention_mask=insert(RIGHT, torch.ones(P, dtype=torch.long), 0),
        )  # fmt: skip
        found = hidden(model, input_ids=IDS, attention_mask=RIGHT, decoder_input_ids=decoder)
        torch.testing.assert_close(found, truth)


# --- labels and heads ---


def test_labels_of_tokens_ignore_the_rows():
    for family, auto in (("gpt2", AutoModelForCausalLM), ("bert", AutoModelForTokenClassification)):
        base = plain(family, auto)
        model = made(family, auto, a=prompt())
        labels = IDS % 2 if auto is AutoModelForTokenClassification else IDS.clone()
        words = base.get_input_embeddings()(IDS)
        wide = insert(labels, torch.full((P,), -100), 0)
        mask = insert(RIGHT, torch.ones(P, dtype=torch.long), 0)
        with torch.no_grad():
            truth = base(
                inputs_embeds=insert(words, rows_of(model), 0), attention_mask=mask, labels=wide
            )
            found = model(input_ids=IDS, attention_mask=RIGHT, labels=labels)
        torch.testing.assert_close(found.loss, truth.loss)
        real = mask.bool()
        torch.testing.assert_close(found.logits[real], truth.logits[real])
        assert found.logits.shape[1] == IDS.shape[1] + P


def test_spans_are_counted_with_the_rows():
    base = plain("bert", AutoModelForQuestionAnswering)
    model = made("bert", AutoModelForQuestionAnswering, a=prompt(combine="prefix_after_bos"))
    words = base.get_input_embeddings()(IDS)
    with torch.no_grad():
        truth = base(
            inputs_embeds=insert(words, rows_of(model), 1),
            start_positions=torch.tensor([0, 2 + P]), end_positions=torch.tensor([3 + P, 40]),
        )  # fmt: skip
        found = model(
            input_ids=IDS, start_positions=torch.tensor([0, 2]), end_positions=torch.tensor([3, 40])
        )
    torch.testing.assert_close(found.loss, truth.loss)


def test_the_last_token_of_a_row_answers_for_it():
    base = plain("llama", AutoModelForSequenceClassification)
    model = made("llama", AutoModelForSequenceClassification, a=prompt())
    ids = IDS.clone()
    ids[1, 4:] = base.config.pad_token_id
    with torch.no_grad():
        found = model(input_ids=ids, attention_mask=RIGHT).logits
        words = base.get_input_embeddings()(ids)
        states = base.model(inputs_embeds=insert(words, rows_of(model), 0))[0]
        truth = base.score(torch.stack([states[0, 5 + P], states[1, 3 + P]]))
    torch.testing.assert_close(found, truth)


def test_named_heads_get_the_longer_sequence():
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config("bert")).double().eval()
    model.add_adapter("a", prompt(), set_active=True)
    ones = torch.ones(P, dtype=torch.long)
    wide = insert(RIGHT, ones, 0)
    with torch.no_grad():
        states = model.base_model(input_ids=IDS, attention_mask=RIGHT)[0]
        model.add_tagging_head("tags", num_labels=3, layers=1)
        labels = IDS % 3
        out = model(input_ids=IDS, attention_mask=RIGHT, labels=labels)
        torch.testing.assert_close(out.logits, model.heads["tags"](states))
        own = out.logits[:, P:][RIGHT.bool()]
        loss = torch.nn.functional.cross_entropy(own, labels[RIGHT.bool()])
        torch.testing.assert_close(out.loss, loss)
        for pooling in ("cls", "mean", "last"):
            model.add_classification_head(pooling, num_labels=2, layers=1, pooling=pooling)
            found = model(input_ids=IDS, attention_mask=RIGHT).logits
            pooled = {
                "cls": states[:, 0],
                "mean": (states * wide[..., None]).sum(1) / wide.sum(1, keepdim=True),
                "last": torch.stack([states[0, 5 + P], states[1, 3 + P]]),
            }[pooling]
            torch.testing.assert_close(found, model.heads[pooling].score(pooled))


# --- composition ---


def test_a_stack_concatenates():
    base = plain("llama")
    model = made("llama", active=Stack("a", "b"), a=prompt(), b=prompt(2))
    both = torch.cat([rows_of(model, "a"), rows_of(model, "b")])
    words = base.get_input_embeddings()(IDS)
    truth = hidden(base, inputs_embeds=insert(words, both, 0))
    torch.testing.assert_close(hidden(model, input_ids=IDS), truth)


@pytest.mark.parametrize("joins", JOINS)
@pytest.mark.parametrize("family", ["bert", "llama", "t5"])
def test_each_row_has_its_own_rows(family, joins):
    """Rows with a longer, a shorter, both and no prompt, each as it is alone."""
    configs = {"a": prompt(joins=joins), "b": prompt(2, joins=joins, combine="prefix_after_bos")}
    model = made(family, **configs, c=SeqBnConfig())
    ids, names = IDS[:1].expand(4, -1), ["a", "b", Stack("a", "b"), None]
    mask = torch.ones_like(ids)
    mask[:, 4:] = 0
    kwargs = {"decoder_input_ids": IDS[:1, :3].expand(4, -1)} if family == "t5" else {}
    for given in (None, mask):
        found = hidden(model, input_ids=ids, attention_mask=given, adapter_names=names, **kwargs)
        for i, name in enumerate(names):
            model.set_active_adapters(name)
            own = {k: v[:1] for k, v in kwargs.items()}
            alone = hidden(
                model, input_ids=ids[:1], attention_mask=None if given is None else given[:1], **own
            )
            count = alone.shape[1] - (2 if given is not None and family != "t5" else 0)
            torch.testing.assert_close(found[i : i + 1, :count], alone[:, :count])
    model.set_active_adapters(BatchSplit("a", "b", batch_sizes=[2, 2]))
    split = hidden(model, input_ids=ids, **kwargs)
    model.set_active_adapters(Parallel("a", "b"))
    side = hidden(model, input_ids=ids[:2], **{k: v[:2] for k, v in kwargs.items()})
    torch.testing.assert_close(split, side)


def test_what_cannot_be_composed_is_refused():
    model = made("bert", a=prompt(), b=prompt(), e=prompt(joins="embeddings"))
    for setup in (Average("a", "b"), Split("a", "b", splits=[3, 3])):
        with pytest.raises(CompositionError, match="tokens of a prompt"):
            model.set_active_adapters(setup)
    with pytest.raises(CompositionError, match="add tokens at"):
        model.set_active_adapters(Stack("a", "e"))


def test_parameters_of_equal_length_are_averaged():
    model = made("bert", a=prompt(), b=prompt(), c=prompt(2))
    model.average_adapter("d", ["a", "b"], weights=[0.25, 0.75])
    a, b = rows_of(model, "a"), rows_of(model, "b")
    torch.testing.assert_close(rows_of(model, "d"), a / 4 + b * 0.75)
    with pytest.raises(CompositionError, match="prompt_length"):
        model.average_adapter("x", ["a", "c"])


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_other_adapters_see_the_longer_sequence(family):
    """ReFT's first positions are those of the prompt; a bottleneck acts on it like on tokens."""
    configs = {
        "a": prompt(), "r": LoReftConfig(prefix_positions=2, suffix_positions=1, dropout=0.0),
        "b": SeqBnConfig(), "p": PrefixTuningConfig(prefix_length=2, bottleneck_size=4),
    }  # fmt: skip
    model = made(family, active=Stack("a", "r", "b", "p"), **configs)
    base = made(family, active=Stack("r", "b", "p"), **configs)
    words = base.get_input_embeddings()(IDS)
    mask = insert(RIGHT, torch.ones(P, dtype=torch.long), 0)
    truth = hidden(base, inputs_embeds=insert(words, rows_of(model), 0), attention_mask=mask)
    found = hidden(model, input_ids=IDS, attention_mask=RIGHT)
    torch.testing.assert_close(found[mask.bool()], truth[mask.bool()])


# --- generation ---


def by_hand(base, embeds, mask, steps):
    """Greedy tokens of one row, each step from the start."""
    found = []
    for _ in range(steps):
        with torch.no_grad():
            token = base(inputs_embeds=embeds, attention_mask=mask).logits[:, -1].argmax(-1)
        found.append(token)
        embeds = torch.cat([embeds, base.get_input_embeddings()(token[:, None])], 1)
        mask = torch.cat([mask, torch.ones(len(mask), 1, dtype=torch.long)], 1)
    return torch.stack(found, 1)


OPTIONS = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize("combine", ["prefix", "prefix_after_bos"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3_text"])
def test_generation_has_the_prompt_once(family, combine):
    base = plain(family, AutoModelForCausalLM)
    model = made(family, AutoModelForCausalLM, a=prompt(combine=combine))
    at = 0 if combine == "prefix" else 1
    for cache in (True, False):
        out = model.generate(IDS, attention_mask=LEFT, use_cache=cache, **OPTIONS)[:, 6:]
        for row, start in ((0, 0), (1, 2)):
            words = base.get_input_embeddings()(IDS[row : row + 1, start:])
            embeds = insert(words, rows_of(model), at)
            ones = torch.ones(embeds.shape[:2], dtype=torch.long)
            assert torch.equal(out[row : row + 1], by_hand(base, embeds, ones, 6))
    beams = [
        model.generate(IDS, attention_mask=LEFT, use_cache=c, num_beams=3, **OPTIONS)
        for c in (True, False)
    ]
    assert torch.equal(*beams)
    alone = model.generate(IDS[1:, 2:], num_beams=3, **OPTIONS)
    assert torch.equal(beams[0][1:, 2:], alone)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("beams", [1, 2])
def test_rows_of_other_prompts_generate_as_alone(family, beams):
    model = made(family, AutoModelForCausalLM, a=prompt(), b=prompt(5, combine="prefix_after_bos"))
    ids, names = IDS[[0, 1, 1, 0]], ["a", "b", None, Stack("b", "a")]
    masks = torch.ones_like(ids), LEFT[[0, 1, 1, 0]]
    for mask in masks:
        for cache in (True, False):
            options = {**OPTIONS, "num_beams": beams, "use_cache": cache}
            out = model.generate(ids, attention_mask=mask, adapter_names=names, **options)
            for i, name in enumerate(names):
                model.set_active_adapters(name)
                alone = model.generate(ids[i : i + 1], attention_mask=mask[i : i + 1], **options)
                assert torch.equal(out[i : i + 1], alone)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_encoder_decoders_generate(family):
    base = plain(family, AutoModelForSeq2SeqLM)
    model = made(family, AutoModelForSeq2SeqLM, a=prompt(), b=prompt(1))
    words = base.get_encoder().get_input_embeddings()(IDS)
    wide = insert(RIGHT, torch.ones(P, dtype=torch.long), 0)
    for options in (OPTIONS, {**OPTIONS, "num_beams": 2}, {**OPTIONS, "use_cache": False}):
        truth = base.generate(
            inputs_embeds=insert(words, rows_of(model), 0), attention_mask=wide, **options
        )
        assert torch.equal(model.generate(IDS, attention_mask=RIGHT, **options), truth)
        mixed = model.generate(
            IDS[[0, 1, 1]],
            attention_mask=RIGHT[[0, 1, 1]],
            adapter_names=["a", "b", None],
            **options,
        )
        assert torch.equal(mixed[:1], truth[:1])
        assert torch.equal(mixed[2:], base.generate(IDS[1:], attention_mask=RIGHT[1:], **options))


def test_generation_from_embeddings_of_the_caller():
    model = made("llama", AutoModelForCausalLM, a=prompt())
    words = model.get_input_embeddings()(IDS)
    found = model.generate(inputs_embeds=words, attention_mask=LEFT, **OPTIONS)
    assert torch.equal(found, model.generate(IDS, attention_mask=LEFT, **OPTIONS)[:, 6:])


def test_a_past_that_is_not_counted_is_refused():
    model = made("rwkv", AutoModelForCausalLM, a=prompt())
    assert model.generate(IDS, use_cache=False, **OPTIONS).shape[1] == 12
    with pytest.raises(StateError, match="use_cache=False"):
        model.generate(IDS, use_cache=True, **OPTIONS)


def test_a_cache_goes_on():
    """A conversation: the cache of the first call holds the rows, and the second adds none."""
    model = made("llama", AutoModelForCausalLM, a=prompt())
    whole = hidden(model, input_ids=IDS)
    with torch.no_grad():
        first = model(input_ids=IDS[:, :4], use_cache=True)
        assert first[CACHE].get_seq_length() == 4 + P
        second = model(
            input_ids=IDS[:, 4:], **{CACHE: first[CACHE]},
            attention_mask=torch.ones(2, 6, dtype=torch.long),
        )  # fmt: skip
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), whole)


# --- initial values and formats ---


def test_initial_values():
    model = made("bert", a=prompt(50, init_weights_seed=3), b=prompt(50, init_weights_seed=3))
    rows = rows_of(model)
    assert torch.equal(rows, rows_of(model, "b"))
    assert rows.abs().max() <= 0.5
    assert rows.abs().max() > 0.45


def test_rows_start_from_a_text(tmp_path):
    words = {"[UNK]": 0, "good": 5, "or": 6, "bad": 7}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    config = prompt(5, prompt_init="from_string", prompt_init_text="good or bad")
    model = init(plain("bert"))
    with pytest.raises(ConfigError, match="tokenizer"):
        model.add_adapter("a", config)
    assert not model.adapters_config
    model.config._name_or_path = str(tmp_path)
    model.add_adapter("a", config)
    table = model.get_input_embeddings().weight
    assert torch.equal(rows_of(model), table[[5, 6, 7, 5, 6]])


@pytest.mark.long
@pytest.mark.parametrize("joins", JOINS)
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_training_step_compiles_once_whatever_the_weights(family, joins):
    model = made(family, a=prompt(joins=joins), b=prompt(2, joins=joins))
    model.train_adapter("a")
    model.eval()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    rows = model.prompt_tunings["a"].prompt_embedding
    for _ in range(2):
        found = compiled(input_ids=IDS, attention_mask=RIGHT, use_cache=False)[0]
        expected = model(input_ids=IDS, attention_mask=RIGHT, use_cache=False)[0]
        torch.testing.assert_close(found, expected)
        grads = [torch.autograd.grad(y.square().sum(), rows)[0] for y in (found, expected)]
        torch.testing.assert_close(*grads)
        with torch.no_grad():
            rows.mul_(1.5)
    assert len(graphs) == 1


def test_the_rows_alone_are_trained():
    model = made("gpt2", AutoModelForCausalLM, a=prompt(), b=prompt())
    model.train_adapter("a")
    before = {name: p.clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(input_ids=IDS, attention_mask=RIGHT, labels=IDS).loss.backward()
    rows = model.base_model.prompt_tunings["a"].prompt_embedding
    assert (rows.grad != 0).any(1).all()
    optimizer.step()
    changed = [n for n, p in model.named_parameters() if not torch.equal(p, before[n])]
    assert [name for name in changed if "lm_head" not in name] == [
        "transformer.prompt_tunings.a.prompt_embedding"
    ]


@pytest.mark.parametrize("joins", JOINS)
def test_formats_of_ours(tmp_path, joins):
    model = made("bert", a=prompt(joins=joins, combine="prefix_after_bos"))
    truth = hidden(model, input_ids=IDS, attention_mask=RIGHT)
    for name in ("native", "adapterhub")[: 1 + (joins == "embeddings")]:
        model.save_adapter(tmp_path / name, "a", format=name)
        again = init(plain("bert"))
        again.load_adapter(tmp_path / name, load_as="other", set_active=True)
        assert torch.equal(hidden(again, input_ids=IDS, attention_mask=RIGHT), truth)
    if joins == "inputs":
        with pytest.raises(CheckpointError, match="joins"):
            model.save_adapter(tmp_path / "x", "a", format="adapterhub")
    with pytest.raises(CheckpointError, match="combine="):
        model.save_adapter(tmp_path / "p", "a", format="peft")


TASKS = {
    "bert": (AutoModelForSequenceClassification, "SEQ_CLS"),
    "gpt2": (AutoModelForCausalLM, "CAUSAL_LM"),
    "llama": (AutoModelForCausalLM, "CAUSAL_LM"),
    "t5": (AutoModelForSeq2SeqLM, "SEQ_2_SEQ_LM"),
}


def peft_inputs(family):
    kwargs = {"decoder_input_ids": IDS[:, :3]} if family == "t5" else {}
    return {"input_ids": IDS, "attention_mask": RIGHT, **kwargs}


def real_logits(family, logits):
    wide = insert(RIGHT, torch.ones(P, dtype=torch.long), 0).bool()
    return logits[wide] if family in ("gpt2", "llama") else logits


@pytest.mark.filterwarnings("ignore:Could not find a config file in")
@pytest.mark.parametrize("family", TASKS)
def test_files_of_peft_compute_what_peft_computes(family, tmp_path):
    auto, task = TASKS[family]
    theirs = peft.get_peft_model(
        plain(family, auto), peft.PromptTuningConfig(task_type=task, num_virtual_tokens=P)
    ).double()
    theirs.eval()
    inputs = peft_inputs(family)
    with torch.no_grad():
        truth = theirs(**inputs).logits
    theirs.save_pretrained(tmp_path / "peft")
    model = init(plain(family, auto))
    model.load_adapter(tmp_path / "peft", load_as="a", set_active=True)
    with torch.no_grad():
        found = model(**inputs).logits
    # the rows are in float32 in the file
    torch.testing.assert_close(real_logits(family, found), real_logits(family, truth))


@pytest.mark.parametrize("family", TASKS)
def test_peft_reads_our_files(family, tmp_path):
    auto, _ = TASKS[family]
    model = made(family, auto, a=prompt())
    inputs = peft_inputs(family)
    with torch.no_grad():
        truth = model(**inputs).logits
    model.save_adapter(tmp_path, "a", format="peft")
    theirs = peft.PeftModel.from_pretrained(plain(family, auto), tmp_path).double().eval()
    with torch.no_grad():
        found = theirs(**inputs).logits
    torch.testing.assert_close(real_logits(family, found), real_logits(family, truth))


# --- what is refused ---


def test_a_prompt_longer_than_the_positions_is_refused():
    model = init(plain("bert"))
    with pytest.raises(ConfigError, match=r"prompt_length=64\).*has 64 positions.*63 or less"):
        model.add_adapter("a", prompt(64))
    assert not model.adapters_config
    model.add_adapter("a", prompt(64, joins="embeddings"), set_active=True)
    assert hidden(model, input_ids=IDS).shape[1] == 70
    model.add_adapter("b", prompt(60), set_active=True)
    assert hidden(model, input_ids=IDS[:, :4]).shape[1] == 64


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens"),
    ],
)
def test_generation_that_counts_the_cache_is_refused(options, word):
    model = made("llama", AutoModelForCausalLM, a=prompt())
    with pytest.raises(StateError, match=word):
        model.generate(IDS, **OPTIONS, **options)
    model.set_active_adapters(None)
    model.generate(IDS[:1], **OPTIONS, **options)


def test_masks_and_caches_that_do_not_fit_are_refused():
    model = made("llama", AutoModelForCausalLM, a=prompt())
    with pytest.raises(StateError, match=r"pass attention_mask \[batch, tokens\] of 0 and 1"):
        model(input_ids=IDS, attention_mask=torch.zeros(2, 1, 6, 6))
    with pytest.raises(StateError, match=r"\[2, 9\].*own tokens, without the 3 that 'a' adds"):
        model(input_ids=IDS, attention_mask=torch.ones(2, 9))
    model.set_active_adapters(None)
    with torch.no_grad():
        cache = model(input_ids=IDS[:, :2], use_cache=True)[CACHE]
    model.set_active_adapters("a")
    with pytest.raises(StateError, match="made without the 3 tokens that 'a' adds"):
        model(input_ids=IDS[:, 2:], **{CACHE: cache})


def test_models_without_a_place_are_refused_by_name():
    vit = init(plain("vit"))
    with pytest.raises(SiteError, match=r"reads no tokens.*joins='embeddings'"):
        vit.add_adapter("a", prompt(joins="inputs"))
    gpt2 = init(plain("gpt2"))
    with pytest.raises(SiteError, match=r"no module that embeds.*joins='inputs'"):
        gpt2.add_adapter("a", prompt(joins="embeddings"))
    with pytest.raises(ConfigError, match="no text is given"):
        prompt(prompt_init="from_string")
    with pytest.raises(ConfigError, match="prompt_length"):
        prompt(0)


def test_heads_that_read_places_are_refused():
    model = AutoAdapterModel.from_config(tiny_config("bert"))
    model.add_adapter("a", prompt(), set_active=True)
    model.add_dependency_parsing_head("d", num_labels=2)
    with pytest.raises(StateError, match="word_starts"):
        model(input_ids=IDS, word_starts=torch.zeros(2, 6, dtype=torch.long))


def test_continuous_batching_is_refused():
    model = made("llama", AutoModelForCausalLM, a=prompt())
    with pytest.raises(StateError, match="packs requests"):
        model.generate_batch([[5, 6, 7]])


def test_a_union_and_embeddings_of_the_caller():
    """Beside LoRA at the table, with heads, whether the caller embeds the tokens or the model."""
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config("llama")).double().eval()
    model.add_adapter("u", "prompt_tuning[prompt_length=3]|seq_bn")
    model.add_adapter("l", "lora[target_modules=['embed_tokens','q_proj']]")
    stir(model, "l")
    model.add_causal_lm_head("h")
    with torch.no_grad():
        model.set_active_adapters(Stack("u", "l"))
        out = model(input_ids=IDS, attention_mask=RIGHT, labels=IDS)
        # the table alone looks words up, with its adapters
        words = model.get_input_embeddings()(IDS)
        assert words.shape[1] == IDS.shape[1]
        again = model(inputs_embeds=words, attention_mask=RIGHT, labels=IDS)
    torch.testing.assert_close(again.loss, out.loss)
    torch.testing.assert_close(again.logits, out.logits)


def test_rows_join_what_the_model_reads(tmp_path):
    seed = {"init_weights_seed": 1}
    images = {"pixel_values": torch.randn(2, 3, 8, 8, dtype=torch.float64)}
    for family, joins, inputs in (
        ("vit", "embeddings", images),
        ("bert", "inputs", {"input_ids": IDS, "attention_mask": RIGHT}),
    ):
        model = made(family, a=prompt(**seed), b=prompt(joins=joins, **seed))
        assert model.adapters_config["a"].joins is None
        expected = hidden(model, **inputs)
        model.set_active_adapters("b")
        assert torch.equal(hidden(model, **inputs), expected)
        foreign = "adapterhub" if joins == "embeddings" else "peft"
        for name in ("native", foreign):
            model.save_adapter(tmp_path / family / name, "a", format=name)
            again = init(plain(family))
            again.load_adapter(tmp_path / family / name, load_as="a", set_active=True)
            assert again.adapters_config["a"].joins == (None if name == "native" else joins)
            assert torch.equal(hidden(again, **inputs), expected)
        refuses = "peft" if joins == "embeddings" else "adapterhub"
        with pytest.raises(CheckpointError, match=f"joins='{joins}'"):
            model.save_adapter(tmp_path / "x", "a", format=refuses)


def test_images_have_rows_of_one_length():
    model = made("vit", a=prompt(joins="embeddings"), b=prompt(2, joins="embeddings"))
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    alone = hidden(model, pixel_values=images)
    with pytest.raises(CompositionError, match="different lengths"):
        model(pixel_values=images, adapter_names=["a", "b"])
    torch.testing.assert_close(hidden(model, pixel_values=images, adapter_names=["a", "a"]), alone)


def test_what_embeds_in_another_way_is_refused():
    model = made("bert", a=prompt())
    model.embeddings.forward = lambda **kwargs: torch.zeros(2, 9, 32, dtype=torch.float64)
    with pytest.raises(StateError, match="without calling"):
        model(input_ids=IDS)


def test_the_mask_of_an_image_may_be_as_long_as_the_text():
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 4}  # fmt: skip
    text = {**small, "vocab_size": 99, "max_position_embeddings": 16, "projection_size": 32}
    vision = {**small, "patch_size": 2, "num_patches": 4}
    config = AutoConfig.for_model("siglip2", text_config=text, vision_config=vision)
    model = init(AutoModel.from_config(config).double().eval())
    model.add_adapter("a", prompt())
    model.set_active_adapters("a")
    tokens = IDS.shape[1]
    both = model(
        input_ids=IDS, pixel_values=torch.randn(2, tokens, 12, dtype=torch.float64),
        pixel_attention_mask=torch.ones(2, tokens, dtype=torch.long),
        spatial_shapes=torch.tensor([[2, 3], [2, 3]]),
    )  # fmt: skip
    alone = model.text_model(input_ids=IDS).pooler_output
    torch.testing.assert_close(both.text_embeds, alone / alone.norm(dim=-1, keepdim=True))


def test_a_call_without_room_for_the_tokens_is_refused():
    model = init(plain("t5"))
    model.add_adapter("a", prompt())
    given = {"attention_mask": RIGHT, "decoder_input_ids": IDS}
    short = model.get_encoder()(IDS, attention_mask=RIGHT)
    model.set_active_adapters("a")
    with pytest.raises(StateError, match="Pass input_ids"):
        model(encoder_outputs=short, **given)
    encoded = model.get_encoder()(IDS, attention_mask=RIGHT)
    assert torch.equal(model(encoder_outputs=encoded, **given)[0], model(IDS, **given)[0])
