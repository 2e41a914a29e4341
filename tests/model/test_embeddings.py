"""`add_embeddings` and its like: tables of tokens that take the place of the model's own."""

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path

import pytest
import torch
from families import tiny_config
from safetensors.torch import load_file
from snapshots import changes, of_adapter, output, refused, snapshot
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    BartForConditionalGeneration,
    BertForMaskedLM,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import adapterzoo
from adapterzoo import AutoAdapterModel
from adapterzoo.errors import (
    CheckpointError,
    ConfigError,
    DuplicateNameError,
    StateError,
    UnknownNameError,
)

GOLDEN = Path(__file__).resolve().parents[3] / "shared" / "golden" / "adapterhub"
HEADS = {
    "bert": "add_masked_lm_head", "roberta": "add_masked_lm_head", "albert": "add_masked_lm_head",
    "gpt2": "add_causal_lm_head", "gemma2": "add_causal_lm_head",
    "t5": "add_seq2seq_lm_head", "bart": "add_seq2seq_lm_head",
}  # fmt: skip
# every third word is in both; more rows than numbers in the inputs of families.tiny_inputs
WORDS = {f"word{n}": n for n in range(99)}
OTHER = {"[PAD]": 0, "[UNK]": 1} | {f"word{n}": 2 + n // 3 for n in range(0, 90, 3)}
OTHER |= {f"new{n}": n for n in range(32, 120)}
MORE = {f"word{n}": n for n in range(200)}
INPUTS = {"input_ids": torch.tensor([[3, 4, 5, 31], [6, 2, 7, 0]])}


def tokenizer(words, padding="[PAD]"):
    made = Tokenizer(WordLevel(dict(words), unk_token=next(iter(words))))
    more = {"pad_token": padding} if padding in words else {}
    return PreTrainedTokenizerFast(tokenizer_object=made, **more)


def model_of(family, seed=0):
    config = tiny_config(family)
    for name in list(vars(config)):
        if "drop" in name and isinstance(getattr(config, name), float):
            setattr(config, name, 0.0)
    torch.manual_seed(seed)
    return AutoAdapterModel.from_config(config).eval()


def with_both(family, head=True):
    model = model_of(family)
    if head:
        getattr(model, HEADS[family])("lm")
        with torch.no_grad():
            for name, parameter in model.heads["lm"].named_parameters():
                if name.endswith("bias"):
                    parameter.normal_()
    model.add_embeddings("new", tokenizer(OTHER), "default", tokenizer(WORDS))
    return model


def inputs_of(family):
    more = {"decoder_input_ids": INPUTS["input_ids"]} if family in ("t5", "bart") else {}
    return {**INPUTS, **more}


# of older tokenizers
@pytest.mark.filterwarnings("ignore:Deprecated in 0.9.0")
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_files_of_adapters_give_its_outputs(family):
    folder = GOLDEN / family / "embeddings"
    if not folder.is_dir():
        pytest.skip("the files of adapters are not here")
    model = AutoAdapterModel.from_pretrained(folder.parent / "base").eval()
    expected = load_file(folder / "expected.safetensors")
    given = {key: expected[key] for key in ("input_ids", "attention_mask")}
    counts = expected["compare"].bool()
    for name in ("fresh", "moved"):
        found = model.load_embeddings(folder / name, name)
        assert model.active_embeddings == name
        hidden = output(model, **given)
        torch.testing.assert_close(
            hidden[counts], expected[f"hidden.{name}"][counts], rtol=0, atol=1e-5
        )
        words = (folder / "fresh" / "tokenizer" / "vocab.txt").read_text().split()
        assert (found is None) == (name == "moved")
        if found is not None:
            assert found.get_vocab() == {word: n for n, word in enumerate(words)}
            known = found
    # adapters copied the rows of the tokens that both vocabularies have, as this does
    old = (folder / "reference_vocab.txt").read_text().split()
    reference = tokenizer({word: n for n, word in enumerate(old)})
    model.add_embeddings("mine", known, "default", reference)
    tables = model.loaded_embeddings
    shared = [n for n, word in enumerate(words) if word in old]
    assert len(shared) == 15
    assert torch.equal(tables["mine"].weight[shared], tables["moved"].weight[shared])


@pytest.mark.parametrize("family", HEADS)
def test_rows_of_shared_tokens_are_copied_and_the_others_are_drawn(family):
    model = with_both(family, head=False)
    tables = model.loaded_embeddings
    assert list(tables) == ["default", "new"]
    assert model.active_embeddings == "new"
    new, old = tables["new"].weight, tables["default"].weight
    assert new.shape == (len(OTHER), old.shape[1])
    for word, number in OTHER.items():
        if word in WORDS:
            assert torch.equal(new[number], old[WORDS[word]])
    # [UNK] is drawn; [PAD] is 0 where the model's own table has a row for padding
    assert 0.015 < new[32:].std() < 0.025
    has_padding = tables["default"].padding_idx is not None
    assert tables["new"].padding_idx == (0 if has_padding else None)
    assert bool(new[0].any()) != has_padding
    assert not new.requires_grad
    assert model.get_input_embeddings().num_embeddings == len(OTHER)


@pytest.mark.parametrize("family", HEADS)
def test_a_tied_head_answers_in_the_active_vocabulary(family):
    model = with_both(family)
    given = inputs_of(family)
    logits = output(model, **given)
    assert logits.shape[-1] == len(OTHER)
    # the same by hand: the old columns of the shared tokens, where the inputs are the same rows
    shared = [n for word, n in OTHER.items() if word in WORDS]
    old_numbers = torch.zeros(len(OTHER), dtype=torch.long)
    old_numbers[shared] = torch.tensor([WORDS[w] for w, n in OTHER.items() if w in WORDS])
    rows = torch.tensor([[3, 4, 5, 31], [6, 2, 7, 8]])
    new = output(model, **dict.fromkeys(given, rows))
    model.set_active_embeddings("default")
    old = output(model, **dict.fromkeys(given, old_numbers[rows]))
    assert old.shape[-1] == 99
    torch.testing.assert_close(
        new[..., shared], old[..., old_numbers[shared]], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("family", HEADS)
def test_the_own_embeddings_come_back_with_every_bit(family):
    model = model_of(family)
    getattr(model, HEADS[family])("lm")
    with torch.no_grad():
        for parameter in model.heads.parameters():
            parameter.add_(0.01)
    before = snapshot(model)
    model.add_embeddings("new", tokenizer(OTHER))
    changed = output(model, **inputs_of(family))
    model.set_active_embeddings("default")
    model.set_active_embeddings("new")
    assert torch.equal(output(model, **inputs_of(family)), changed)
    model.set_active_embeddings("default")
    model.delete_embeddings("new")
    assert not changes(before, snapshot(model))


def test_biases_belong_to_the_embeddings():
    model = with_both("bert")
    bias = model.heads["lm"].output_embeddings.bias
    with torch.no_grad():
        bias.copy_(torch.arange(len(OTHER)) * 1.0)
    model.set_active_embeddings("default")
    assert model.heads["lm"].output_embeddings.bias.shape == (99,)
    # another head, tied too, that the embeddings have not seen
    model.add_masked_lm_head("later")
    model.set_active_embeddings("new")
    found = model.heads["lm"].output_embeddings.bias
    assert torch.equal(found, torch.arange(len(OTHER)) * 1.0)
    assert not model.heads["later"].output_embeddings.bias.any()
    # a head of the same name starts anew
    model.delete_head("lm")
    model.add_masked_lm_head("lm")
    model.set_active_embeddings("default")
    assert model.heads["lm"].output_embeddings.bias.shape == (99,)
    assert not model.heads["lm"].output_embeddings.bias.any()


@pytest.mark.parametrize(
    ("cls", "family"),
    [(GPT2LMHeadModel, "gpt2"), (BertForMaskedLM, "bert"), (BartForConditionalGeneration, "bart")],
)
def test_a_task_class_follows_and_computes_its_loss(cls, family):
    config = tiny_config(family)
    torch.manual_seed(0)
    plain = cls(config).eval()
    model = adapterzoo.init(copy.deepcopy(plain))
    with torch.no_grad():
        if family == "bart":
            model.final_logits_bias += torch.arange(99) / 50
    before = output(model)
    model.add_embeddings("new", tokenizer(OTHER), "default", tokenizer(WORDS))
    given = inputs_of(family)
    labels = given.get("decoder_input_ids", given["input_ids"])
    with torch.no_grad():
        found = model(**given, labels=labels)
    assert found.logits.shape[-1] == len(OTHER)
    logits, told = found.logits, labels
    if family == "gpt2":
        logits, told = logits[:, :-1], labels[:, 1:]
    by_hand = F.cross_entropy(logits.reshape(-1, len(OTHER)).double(), told.reshape(-1))
    torch.testing.assert_close(found.loss.double(), by_hand, rtol=1e-5, atol=1e-5)
    if family == "bart":
        shared = torch.tensor([n for w, n in WORDS.items() if w in OTHER])
        assert torch.equal(model.final_logits_bias[0, 2:32], shared / 50)
        assert not model.final_logits_bias[0, 32:].any()
    model.set_active_embeddings("default")
    assert torch.equal(output(model), before)


def test_an_output_layer_that_is_not_tied_stays():
    torch.manual_seed(0)
    config = tiny_config("llama")
    config.tie_word_embeddings = False
    model = adapterzoo.init(LlamaForCausalLM(config)).eval()
    model.add_embeddings("new", tokenizer(OTHER))
    assert model.config.vocab_size == 99
    with torch.no_grad():
        found = model(**INPUTS, labels=INPUTS["input_ids"])
    assert found.logits.shape[-1] == 99
    told = INPUTS["input_ids"][:, 1:].reshape(-1)
    by_hand = F.cross_entropy(found.logits[:, :-1].reshape(-1, 99), told)
    torch.testing.assert_close(found.loss, by_hand)
    with refused(model, StateError, "'new'", "set_active_embeddings('default')"):
        model.unload()


def test_a_head_of_its_own_keeps_its_vocabulary(tmp_path):
    config = tiny_config("llama")
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(config).eval()
    model.add_embeddings("new", tokenizer(OTHER))
    model.add_causal_lm_head("lm")
    assert output(model, **INPUTS).shape[-1] == len(OTHER)
    model.save_pretrained(tmp_path)
    again = AutoAdapterModel.from_pretrained(tmp_path)
    assert torch.equal(output(again, **INPUTS), output(model, **INPUTS))
    again.set_active_embeddings("default")
    assert output(again, **INPUTS).shape[-1] == len(OTHER)


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5"])
def test_training_trains_the_active_embeddings_alone(family, tmp_path):
    model = with_both(family)
    model.add_adapter("a", "lora")
    before = {k: t.detach().clone() for k, t in model.state_dict().items()}
    model.train_adapter("a", train_embeddings=True)
    table = model.get_input_embeddings().weight
    assert table.requires_grad
    given = inputs_of(family)
    labels = given.get("decoder_input_ids", given["input_ids"]).clone()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert any(p is table for p in trained)
    for _ in range(2):
        model(**given, labels=labels).loss.backward()
        torch.optim.SGD(trained, lr=0.5).step()
        model.zero_grad()
    model.eval()
    changed = {k for k, t in model.state_dict().items() if not torch.equal(t, before[k])}
    tied = {k for k, p in model.named_parameters(remove_duplicate=False) if p is table}
    assert tied <= changed
    others = {k for k in changed - tied if not of_adapter(k, "a") and not k.startswith("heads.lm.")}
    assert not others
    # and what was trained comes back from a file
    expected = output(model, **given)
    with pytest.warns(UserWarning, match=r"'new' are trained with 'a'.*save_embeddings"):
        model.save_adapter(tmp_path / "a", "a")
    model.save_embeddings(tmp_path / "new", "new", tokenizer(OTHER))
    known = model.load_embeddings(tmp_path / "new", "again")
    assert known.get_vocab() == OTHER
    table = model.get_input_embeddings().weight
    assert torch.equal(table, model.loaded_embeddings["new"].weight)
    # freezing reaches those that are not active
    model.train_adapter("a")
    assert not any(each.weight.requires_grad for each in model.loaded_embeddings.values())
    model.set_active_embeddings("new")
    model.eval()
    assert torch.equal(output(model, **given), expected)


def test_training_the_own_embeddings_gives_the_adapter_a_table():
    model = with_both("bert", head=False)
    model.set_active_embeddings("default")
    model.add_adapter("a", "lora")
    model.train_adapter("a", train_embeddings=True)
    with refused(model, StateError, "'a' adapts the table", "set_active_adapters(None)"):
        model.set_active_embeddings("new")
    model.set_active_adapters(None)
    model.set_active_embeddings("new")
    for setup in ("a", ["a"]):
        with refused(model, StateError, "'a' adapts", "set_active_embeddings('default')"):
            model.set_active_adapters(setup)


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5", "bart"])
def test_a_saved_model_has_all_embeddings(family, tmp_path):
    model = with_both(family)
    given = inputs_of(family)
    model.add_embeddings("third", tokenizer(WORDS))
    model.set_active_embeddings("new")
    before = snapshot_of(model, given)
    model.save_pretrained(tmp_path)
    assert snapshot_of(model, given) == before
    again = AutoAdapterModel.from_pretrained(tmp_path)
    assert again.active_embeddings == "new"
    for name in ("new", "default", "third"):
        for each in (again, model):
            each.set_active_embeddings(name)
        assert torch.equal(output(again, **given), output(model, **given)), name
        assert again.config.vocab_size == model.config.vocab_size
        padding = [each.get_input_embeddings().padding_idx for each in (again, model)]
        assert padding[0] == padding[1]
    # others read the model's own table
    stored = load_file(tmp_path / "model.safetensors")
    own = model.loaded_embeddings["default"].weight
    assert any(torch.equal(t, own) for key, t in stored.items() if "other_embeddings" not in key)


def snapshot_of(model, given):
    return [output(model, **given).tolist(), model.active_embeddings, model.config.vocab_size]


def test_a_saved_task_class(tmp_path):
    torch.manual_seed(0)
    model = adapterzoo.init(BertForMaskedLM(tiny_config("bert"))).eval()
    model.add_embeddings("new", tokenizer(OTHER), "default", tokenizer(WORDS))
    model.save_pretrained(tmp_path, state_dict=model.state_dict())
    again = adapterzoo.load_model(tmp_path, BertForMaskedLM)
    assert again.active_embeddings == "new"
    assert torch.equal(output(again, **INPUTS), output(model, **INPUTS))
    again.set_active_embeddings("default")
    assert output(again, **INPUTS).shape[-1] == 99


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_apart(copied):
    model = with_both("gpt2")
    expected = output(model, **INPUTS)
    again = copied(model)
    with torch.no_grad():
        again.get_input_embeddings().weight.zero_()
    assert torch.equal(output(model, **INPUTS), expected)
    again.set_active_embeddings("default")
    assert output(again, **INPUTS).shape[-1] == 99
    assert model.active_embeddings == "new"


def test_a_plain_model_keeps_the_active_embeddings(tmp_path):
    model = model_of("gpt2")
    model.add_prediction_head_from_config("lm", {"head_type": "causal_lm"})
    model.add_embeddings("new", tokenizer(OTHER))
    expected = output(model, **INPUTS)
    model.unload().save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert plain.config.vocab_size == len(OTHER)
    torch.testing.assert_close(output(plain, **INPUTS), expected)
    torch.manual_seed(0)
    static = adapterzoo.init(GPT2LMHeadModel(tiny_config("gpt2"))).eval()
    static.add_embeddings("new", tokenizer(OTHER))
    expected = output(static, **INPUTS)
    plain = static.unload()
    assert type(plain) is GPT2LMHeadModel
    assert torch.equal(output(plain, **INPUTS), expected)
    assert not any("other_embeddings" in key for key in plain.state_dict())


def test_the_row_of_padding_gets_no_gradient():
    model = with_both("bert", head=False)
    model.get_input_embeddings().weight.requires_grad_(True)
    model(**INPUTS)[0].square().sum().backward()
    rows = model.get_input_embeddings().weight.grad.abs().sum(1)
    assert not rows[0]
    assert rows[[2, 3, 4, 5, 6, 7, 31]].all()


def test_scaled_embeddings_stay_scaled():
    model = with_both("gemma2")
    model.get_input_embeddings()
    embedded = model.get_input_embeddings()(INPUTS["input_ids"])
    plain = model.loaded_embeddings["new"](INPUTS["input_ids"])
    # Gemma multiplies by √d, adapters would lose the factor
    with torch.no_grad():
        hidden = model.base_model(**INPUTS, output_hidden_states=True).hidden_states[0]
    torch.testing.assert_close(hidden, plain * 32**0.5)
    assert embedded.shape == plain.shape


def test_deleting_the_active_embeddings_activates_the_own_ones(caplog):
    model = with_both("bert", head=False)
    with caplog.at_level(logging.WARNING):
        model.delete_embeddings("new")
    assert "'new'" in caplog.text
    assert model.active_embeddings == "default"
    assert list(model.loaded_embeddings) == ["default"]


def test_a_padding_number_that_moves_positions_is_told(caplog):
    model = model_of("roberta")
    with caplog.at_level(logging.WARNING):
        model.add_embeddings("same", tokenizer({"a": 0, "[PAD]": 1}))
    assert not caplog.text
    with caplog.at_level(logging.WARNING):
        model.add_embeddings("other", tokenizer(OTHER))
    assert "position_ids" in caplog.text


def test_what_is_refused():
    model = with_both("bert", head=False)
    known = tokenizer(OTHER)
    for call in (model.set_active_embeddings, model.delete_embeddings):
        with refused(model, UnknownNameError, "'nwe'", "'new'"):
            call("nwe")
    with refused(model, StateError, "'default'", "cannot be deleted"):
        model.delete_embeddings("default")
    for name in ("new", "default"):
        with refused(model, DuplicateNameError, repr(name), "another name"):
            model.add_embeddings(name, known)
    with refused(model, ConfigError, "reference_embedding", "both"):
        model.add_embeddings("b", known, "default")
    with refused(model, ConfigError, "embedding_dim=16", "32"):
        model.add_embeddings("b", known, embedding_dim=16)
    with refused(model, UnknownNameError, "'other'", "'new'"):
        model.add_embeddings("b", known, "other", known)
    with refused(model, ConfigError, "a/b", "name"):
        model.add_embeddings("a/b", known)


def test_files_that_do_not_fit(tmp_path):
    model = with_both("bert", head=False)
    with refused(model, CheckpointError, "embedding.pt", "no such file"):
        model.load_embeddings(tmp_path, "b")
    assert not list(tmp_path.iterdir())
    model.save_embeddings(tmp_path, "new", tokenizer(OTHER))
    model.set_active_embeddings("default")
    model.save_embeddings(tmp_path, "default")
    with refused(model, DuplicateNameError, "'new'", "another name"):
        model.load_embeddings(tmp_path, "new")
    for wrong in (torch.zeros(5, 16), torch.zeros(32), torch.zeros(0, 32)):
        torch.save(wrong, tmp_path / "embedding.pt")
        with refused(model, CheckpointError, str(list(wrong.shape)), "[tokens, 32]"):
            model.load_embeddings(tmp_path, "b")
    for wrong in (torch.zeros(5, 32, dtype=torch.long), {"weight": torch.zeros(5, 32)}, Path("x")):
        with (tmp_path / "embedding.pt").open("wb") as stream:
            torch.save(wrong, stream)
        with refused(model, CheckpointError, "embedding.pt", "Copy the checkpoint again"):
            model.load_embeddings(tmp_path, "b")
    torch.save(torch.zeros(1, 32).expand(99, 32), tmp_path / "embedding.pt")
    with refused(model, CheckpointError, "fewer numbers", "[99, 32]"):
        model.load_embeddings(tmp_path, "b")


def test_an_adapter_of_the_table_needs_the_own_embeddings():
    model = with_both("gpt2", head=False)
    where = "lora[r=2,target_modules=['wte']]"
    with refused(model, StateError, "wte", "set_active_embeddings('default')"):
        model.add_adapter("a", where)
    model.set_active_embeddings("default")
    model.add_adapter("a", where, set_active=True)
    with refused(model, StateError, "'a' adapts", "reset_adapter()"):
        model.set_active_embeddings("new")
    model.set_active_adapters(None)
    model.merge_adapter("a")
    with refused(model, StateError, "'a' adapts", "reset_adapter()"):
        model.set_active_embeddings("new")


def test_a_model_without_tokens():
    model = model_of("vit")
    assert model.active_embeddings == "default"
    with refused(model, StateError, "ViT", "table of tokens"):
        model.add_embeddings("a", tokenizer(OTHER))
    assert not model.loaded_embeddings


def test_other_calls_see_the_active_table():
    model = with_both("bert")
    model.add_adapter("a", "prompt_tuning[prompt_length=2]")
    model.set_active_adapters("a")
    assert output(model).shape[1:] == (9, len(OTHER))
    model.delete_adapter("a")
    model.resize_token_embeddings(130)
    assert model.loaded_embeddings["new"].weight.shape[0] == 130
    assert output(model).shape[-1] == 130
    model.set_active_embeddings("default")
    assert output(model, **INPUTS).shape[-1] == 99
