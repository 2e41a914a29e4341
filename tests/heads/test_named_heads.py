"""Named heads of a model: what is added, active, answered, deleted; failed calls change nothing."""

import copy
import dataclasses
import inspect
import pickle
from typing import ClassVar

import pytest
import torch
from families import tiny_config, tiny_inputs
from snapshots import changes, refused, snapshot
from torch import nn
from transformers import BartConfig, BertConfig, GPT2Config, ViTConfig

from adapterzoo import AdapterSetup, AutoAdapterModel
from adapterzoo.errors import (
    CompositionError,
    ConfigError,
    DuplicateNameError,
    FieldError,
    StateError,
    UnknownNameError,
)
from adapterzoo.heads import HeadConfig, PredictionHead, add_methods, pool

VOCABULARY = 99
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 40,
}  # fmt: skip
IDS = torch.randint(5, 60, (4, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[0, 4:] = 0


def made(config):
    torch.manual_seed(0)
    return AutoAdapterModel.from_config(config).eval()


def bert(**changes):
    return made(BertConfig(**SMALL | changes))


def gpt2():
    return made(GPT2Config(vocab_size=60, n_embd=16, n_layer=1, n_head=2, pad_token_id=0))


ADDERS = {
    "add_classification_head": ("SequenceClassifierOutput", "logits", (4, 2)),
    "add_image_classification_head": ("ImageClassifierOutput", "logits", (4, 2)),
    "add_multiple_choice_head": ("MultipleChoiceModelOutput", "logits", (2, 2)),
    "add_tagging_head": ("TokenClassifierOutput", "logits", (4, 7, 2)),
    "add_qa_head": ("QuestionAnsweringModelOutput", "start_logits", (4, 7)),
    "add_masked_lm_head": ("MaskedLMOutput", "logits", (4, 7, VOCABULARY)),
    "add_causal_lm_head": ("CausalLMOutput", "logits", (4, 7, VOCABULARY)),
    "add_dependency_parsing_head": ("DependencyParsingOutput", "arc_preds", (4, 7, 8)),
}


def test_models_have_the_methods_that_head_files_declare():
    assert {*add_methods} == {*ADDERS, "add_seq2seq_lm_head"}
    model = bert()
    for name, function in add_methods.items():
        mine = inspect.signature(getattr(model, name)).parameters
        _, *declared = inspect.signature(function).parameters
        assert [*mine] == declared
        defaults = {n: p.default for n, p in inspect.signature(function).parameters.items()}
        assert {n: p.default for n, p in mine.items()} == {n: defaults[n] for n in mine}


@pytest.mark.parametrize("add", ADDERS)
def test_each_head_answers_in_the_output_class_of_its_task(add):
    model = bert()
    getattr(model, add)("my task")
    assert model.active_head == "my task"
    choices = add == "add_multiple_choice_head"
    inputs = {"input_ids": IDS.view(2, 2, 7) if choices else IDS}
    if add == "add_dependency_parsing_head":
        inputs["word_starts"] = torch.tensor([[1, 3, 6, 0]] * 4)
    name, field, shape = ADDERS[add]
    output = model(**inputs)
    assert type(output).__name__ == name
    assert output[field].shape == shape
    assert output.loss is None
    with_more = model(**inputs, output_hidden_states=True)
    assert len(with_more.hidden_states) == 2
    as_tuple = model(**inputs, return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert any(torch.equal(t, output[field]) for t in as_tuple if isinstance(t, torch.Tensor))
    assert model.config.prediction_heads["my task"] == model.heads["my task"].config.to_dict()


def test_logits_are_the_head_on_the_backbones_hidden_states():
    model = bert()
    model.add_classification_head("mean", num_labels=3, pooling="mean")
    model.add_classification_head("first", num_labels=3)
    model.add_classification_head("pooled", num_labels=3, use_pooler=True)
    base = model.base_model(input_ids=IDS, attention_mask=MASK)
    hidden = base.last_hidden_state
    for name, x in {
        "mean": pool(hidden, MASK, "mean"), "first": hidden[:, 0], "pooled": base.pooler_output
    }.items():  # fmt: skip
        expected = model.heads[name].score(x)
        assert torch.equal(model(IDS, attention_mask=MASK, head=name).logits, expected)


@pytest.mark.parametrize("left", [False, True])
def test_decoders_answer_by_their_last_real_token(left):
    model = gpt2()
    model.add_classification_head("a")
    ids, mask = IDS.clone(), MASK.flip(1) if left else MASK
    ids[mask == 0] = 0
    positions = [6, 6, 6, 6] if left else [3, 6, 6, 6]
    for masks in ({"attention_mask": mask}, {}):
        hidden = model.base_model(ids, **masks).last_hidden_state
        output = model(ids, **masks)
        assert torch.equal(output.logits, model.heads["a"].score(hidden[range(4), positions]))
    assert type(output).__name__ == "SequenceClassifierOutputWithPast"


def test_encoder_decoders_answer_by_the_end_of_the_sequence():
    config = BartConfig(
        vocab_size=60, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=24,
        decoder_ffn_dim=24, encoder_attention_heads=2, decoder_attention_heads=2,
    )  # fmt: skip
    model = made(config)
    model.add_classification_head("a")
    ids = IDS.clone()
    ids[0, 3], ids[0, 4:], ids[1, 2], ids[1, 6] = 2, 1, 2, 2
    output = model(ids, attention_mask=(ids != 1).long())
    hidden = model.base_model(ids, attention_mask=(ids != 1).long()).last_hidden_state
    # rows 2 and 3 were cut before their end
    assert torch.equal(output.logits, model.heads["a"].score(hidden[range(4), [3, 6, 6, 6]]))
    assert type(output).__name__ == "Seq2SeqSequenceClassifierOutput"
    assert output.encoder_last_hidden_state.shape == (4, 7, 16)


def test_vision_models_answer_by_their_class_token():
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        image_size=8, patch_size=4,
    )  # fmt: skip
    model = made(config)
    model.add_image_classification_head("a", num_labels=5)
    pixels = torch.randn(2, 3, 8, 8)
    hidden = model.base_model(pixels).last_hidden_state
    assert torch.equal(model(pixels).logits, model.heads["a"].score(hidden[:, 0]))
    with pytest.raises(ConfigError, match="Write vocab_size="):
        model.add_masked_lm_head("b")


def test_several_active_heads_give_a_list_and_the_sum_of_their_losses():
    model = bert()
    model.add_classification_head("a", num_labels=3)
    model.add_tagging_head("b")
    model.active_head = ["a", "b"]
    assert model.active_head == ["a", "b"]
    labels = {"a": torch.tensor([0, 1, 2, -100]), "b": IDS % 2}
    output = model(IDS, labels=labels)
    assert [type(o).__name__ for o in output] == [
        "SequenceClassifierOutput",
        "TokenClassifierOutput",
    ]
    assert len(output) == 2
    for i, name in enumerate("ab"):
        alone = model(IDS, head=name, labels=labels[name])
        assert torch.equal(output[i].logits, alone.logits)
        assert torch.equal(output[i].loss, alone.loss)
    torch.testing.assert_close(output.loss, output[0].loss + output[1].loss)
    assert torch.equal(output["loss"], output.loss)
    assert model(IDS, head=["b", "a"])[1].logits.shape == (4, 3)


def test_labels_at_padding_do_not_count_for_tags():
    model = bert()
    model.add_tagging_head("a")
    labels = IDS % 2
    kept = labels.masked_fill(MASK == 0, -100)
    one = model(IDS, attention_mask=MASK, labels=labels).loss
    assert torch.equal(one, model(IDS, attention_mask=MASK, labels=kept).loss)
    assert not torch.equal(one, model.heads["a"].loss(model(IDS, MASK).logits, labels))


def test_accumulated_gradients_divide_by_all_labels():
    model = bert()
    model.add_classification_head("a")
    labels = torch.tensor([0, 1, 1, 0])
    mean = model(IDS, labels=labels).loss
    halves = [
        model(IDS[i : i + 2], labels=labels[i : i + 2], num_items_in_batch=torch.tensor(4)).loss
        for i in (0, 2)
    ]
    torch.testing.assert_close(sum(halves), mean)


def test_the_last_tokens_are_enough_for_generation():
    model = bert()
    model.add_causal_lm_head("a")
    whole = model(IDS).logits
    last = model(IDS, logits_to_keep=2).logits
    torch.testing.assert_close(last, whole[:, -2:])
    torch.testing.assert_close(
        model(IDS, logits_to_keep=torch.tensor([1, 3])).logits, whole[:, [1, 3]]
    )


def test_language_models_share_the_embedding_and_say_so():
    model = bert()
    model.add_masked_lm_head("a")
    embedding = model.get_input_embeddings()
    assert model.heads["a"].output_embeddings.weight is embedding.weight
    assert model.get_output_embeddings() is model.heads["a"].output_embeddings
    key = "bert.embeddings.word_embeddings.weight"
    assert model.all_tied_weights_keys == {"heads.a.3.weight": key}
    model.delete_head("a")
    assert model.all_tied_weights_keys == {}
    free = bert(tie_word_embeddings=False)
    free.add_masked_lm_head("a")
    assert free.heads["a"].output_embeddings.weight is not free.get_input_embeddings().weight


def test_the_output_layer_of_one_head_is_replaced():
    model = AutoAdapterModel.from_config(tiny_config("bert")).eval()
    for name in ("a", "b"):
        model.add_masked_lm_head(name)
    model.active_head = ["a", "b"]
    other = model.heads["b"].output_embeddings
    layer = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size)
    model.set_output_embeddings(layer)
    assert model.get_output_embeddings() is layer
    assert model.heads["b"].output_embeddings is other
    model.active_head = "a"
    inputs = tiny_inputs("bert")
    hidden = model.base_model(**inputs).last_hidden_state
    assert torch.equal(model(**inputs).logits, layer(model.heads["a"].features(hidden)))
    with refused(model, ConfigError, "ReLU()", "write set_output_embeddings(nn.Linear("):
        model.set_output_embeddings(torch.nn.ReLU())
    # an average would be of what a new head has, and leave the layer out
    with refused(model, CompositionError, "'a' has", "own output layer"):
        model.average_head("c", ["a", "b"])


def test_a_deleted_head_leaves_no_trace():
    model = bert()
    model.add_classification_head("a")
    before = snapshot(model)
    model.add_tagging_head("b")
    model.delete_head("b")
    assert model.active_head is None
    model.active_head = "a"
    assert not changes(before, snapshot(model))


def test_labels_have_names():
    model = bert()
    model.add_classification_head("a", num_labels=2, id2label={0: "no", 1: "yes"})
    model.add_masked_lm_head("b")
    assert model.get_labels_dict("a") == {0: "no", 1: "yes"}
    assert model.get_labels("a") == ["no", "yes"]
    assert model.get_labels("b") is None
    assert model.config.id2label == {0: "no", 1: "yes"}
    model.active_head = ["a", "b"]
    with pytest.raises(StateError, match=r"2 heads are active.*heads: 'a', 'b'"):
        model.get_labels()


def test_a_setup_of_the_thread_chooses_the_head():
    model = bert()
    model.add_classification_head("a", num_labels=3)
    model.add_tagging_head("b")
    with AdapterSetup(None, head_setup="a"):
        assert model.active_head == "a"
        assert model(IDS).logits.shape == (4, 3)
    assert model.active_head == "b"


def test_whole_models_come_back(tmp_path):
    model = bert()
    model.add_classification_head(
        "a-1 +", num_labels=3, pooling="mean", id2label=dict(enumerate("xyz"))
    )
    model.add_masked_lm_head("lm")
    model.save_pretrained(tmp_path)
    back = AutoAdapterModel.from_pretrained(str(tmp_path)).eval()
    for name in ("a-1 +", "lm"):
        assert back.heads[name].config == model.heads[name].config
        assert torch.equal(back(IDS, head=name).logits, model(IDS, head=name).logits)
    assert back.heads["lm"].output_embeddings.weight is back.get_input_embeddings().weight


def test_copies_share_nothing():
    model = bert()
    model.add_masked_lm_head("lm")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(IDS).logits, model(IDS).logits)
        assert other.heads["lm"].output_embeddings.weight is other.get_input_embeddings().weight
        other.delete_head("lm")
        assert model.active_head == "lm"
        assert "lm" in model.config.prediction_heads


def test_new_heads_follow_the_models_dtype_and_mode():
    model = bert().to(torch.bfloat16).train()
    model.add_classification_head("a")
    assert {p.dtype for p in model.heads["a"].parameters()} == {torch.bfloat16}
    assert model.heads["a"].training
    assert model(IDS).logits.dtype is torch.bfloat16


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormConfig(HeadConfig):
    head_type: ClassVar[str] = "norm"
    output_class: ClassVar[str] = "SequenceClassifierOutput"
    inputs: ClassVar[tuple[str, ...]] = ("power",)
    power: float = 2.0

    def build(self, backbone):
        return NormHead(self)


class NormHead(PredictionHead):
    def __init__(self, config):
        super().__init__(config)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, hidden, mask=None, power=None):
        return self.scale * hidden[:, 0].norm(p=power or self.config.power, dim=-1)

    def loss(self, logits, labels, count=None):
        return (logits - labels).square().mean()


def test_heads_of_ones_own():
    model = bert()
    with pytest.raises(UnknownNameError, match="no head type 'norm'"):
        model.add_custom_head("norm", "mine")
    model.register_custom_head("norm", NormConfig)
    model.add_custom_head("norm", "mine", power=1.0)
    hidden = model.base_model(IDS).last_hidden_state
    assert torch.equal(model(IDS).logits, hidden[:, 0].norm(p=1, dim=-1))
    output = model(IDS, power=3.0, labels=torch.zeros(4))
    torch.testing.assert_close(output.logits, hidden[:, 0].norm(p=3, dim=-1))
    torch.testing.assert_close(output.loss, output.logits.square().mean())
    assert model.config.prediction_heads["mine"]["power"] == 1.0
    for cls in (NormHead, NormConfig):
        with pytest.raises(ConfigError, match=r"adapterzoo\.heads\.HeadConfig.* = 'other'"):
            model.register_custom_head("other", cls)


LABELS = torch.tensor([0, 1, 0, 1])
FAILURES = {
    "taken": (lambda m: m.add_tagging_head("a"), DuplicateNameError, "'a'", "overwrite_ok=True"),
    "illegal": (lambda m: m.add_tagging_head("../x"), ConfigError, "'../x'", "cannot be used"),
    "value": (lambda m: m.add_tagging_head("b", num_labels=0), ConfigError,
              "num_labels=0", "Write num_labels=1"),
    "overwritten by a wrong one": (lambda m: m.add_tagging_head("a", layers=0, overwrite_ok=True),
                                   ConfigError, "layers=0", "Write layers=1"),
    "unknown argument": (lambda m: m.add_tagging_head("b", labels=3), FieldError,
                         "add_tagging_head() got an unexpected", "head_name, num_labels"),
    "no decoder": (lambda m: m.add_seq2seq_lm_head("b"), ConfigError,
                   "add_seq2seq_lm_head", "add_causal_lm_head"),
    "unknown type": (lambda m: m.add_prediction_head_from_config("b", {"head_type": "taging"}),
                     UnknownNameError, "'taging'", "Did you mean 'tagging'"),
    "unknown active": (lambda m: setattr(m, "active_head", "aa"),
                       UnknownNameError, "aa", "mean 'a'"),
    "one of a list": (lambda m: setattr(m, "active_head", ["a", "x"]),
                      UnknownNameError, "'x'", "Known heads: 'a'"),
    "unknown deleted": (lambda m: m.delete_head("x"), UnknownNameError, "'x'", "Known heads: 'a'"),
    "unknown head": (lambda m: m(IDS, head="x"), UnknownNameError, "'x'", "Known heads: 'a'"),
    "labels": (lambda m: m(IDS, labels=LABELS + 1), ConfigError, "2", "legal are 0 to 1"),
    "labels of another kind": (lambda m: m(IDS, labels=LABELS.float()), ConfigError,
                               "float32", "labels.long"),
}  # fmt: skip


@pytest.mark.parametrize("what", FAILURES)
def test_a_failed_call_changes_nothing(what):
    call, error, *says = FAILURES[what]
    model = bert()
    model.add_classification_head("a")
    with refused(model, error, *says):
        call(model)


def test_labels_without_a_head_and_positions_without_their_pair_are_named():
    model = bert()
    with pytest.raises(StateError, match=r"labels=….*no active head takes these.*add_classif"):
        model(IDS, labels=LABELS)
    model.add_qa_head("q")
    with pytest.raises(StateError, match=r"labels=….*no active head takes these.*active_head"):
        model(IDS, labels=LABELS)
    with pytest.raises(ConfigError, match="also needs 'end_positions'"):
        model(IDS, start_positions=LABELS)
