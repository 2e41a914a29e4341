"""Files that PEFT saved for a task class, loaded around the base model or in another dtype."""

from __future__ import annotations

import itertools
from typing import Any

import peft
import pytest
import torch
import transformers
from families import tiny_config, tiny_inputs
from peft_world import QUIET

import adapterzoo
import adapterzoo.peft
from adapterzoo import AutoAdapterModel
from adapterzoo.errors import CheckpointError

pytestmark = [
    *(pytest.mark.filterwarnings(line) for line in QUIET),
    pytest.mark.filterwarnings("ignore:.past_key_values:FutureWarning"),
]
TARGETS = r".*\.(query|q_proj|q_lin|Wqkv|query_proj)$"
# classes with layers that PEFT does not save, or without the pooler of their base model
CLASSES = {
    "modernbert SEQ_CLS": "ModernBertForSequenceClassification",
    "modernbert TOKEN_CLS": "ModernBertForTokenClassification",
    "deberta-v2 SEQ_CLS": "DebertaV2ForSequenceClassification",
    "distilbert SEQ_CLS": "DistilBertForSequenceClassification",
    "bert SEQ_CLS": "BertForSequenceClassification",
    "bert TOKEN_CLS": "BertForTokenClassification",
    "bert QUESTION_ANS": "BertForQuestionAnswering",
    "roberta SEQ_CLS": "RobertaForSequenceClassification",
    "electra SEQ_CLS": "ElectraForSequenceClassification",
    "albert TOKEN_CLS": "AlbertForTokenClassification",
    "vit None": "ViTForImageClassification",
}


def result(model: Any, family: str) -> torch.Tensor:
    """The logits, or those of the start of the answer."""
    with torch.no_grad():
        found = model.eval()(**tiny_inputs(family))
    return found.logits if "logits" in found else found.start_logits


def saved(case: str, folder: Any, bias: str) -> torch.Tensor:
    """Save a model and an adapter with PEFT; return its result."""
    family, task = case.split()
    config = tiny_config(family)
    config.num_labels = 2 if task == "QUESTION_ANS" else 3
    torch.manual_seed(0)
    base = getattr(transformers, CLASSES[case])(config)
    base.save_pretrained(folder / "base")
    own = {"modules_to_save": ["classifier"]} if task == "None" else {"task_type": task}
    wrapped = peft.get_peft_model(
        base, peft.LoraConfig(r=2, target_modules=TARGETS, bias=bias, **own)
    )
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    wrapped.save_pretrained(folder / "adapter")
    return result(wrapped, family)


@pytest.mark.parametrize("bias", ["none", "all"])
@pytest.mark.parametrize("case", CLASSES)
def test_around_the_base_model_the_result_is_that_of_peft(case, bias, tmp_path):
    right, family = saved(case, tmp_path, bias), case.split()[0]
    model = AutoAdapterModel.from_pretrained(tmp_path / "base")
    model.load_adapter(tmp_path / "adapter", set_active=True)
    torch.testing.assert_close(result(model, family), right, rtol=1e-4, atol=1e-4)
    task = adapterzoo.init(getattr(transformers, CLASSES[case]).from_pretrained(tmp_path / "base"))
    task.load_adapter(tmp_path / "adapter", set_active=True)
    torch.testing.assert_close(result(task, family), right, rtol=1e-4, atol=1e-4)


def test_a_part_of_a_head_is_refused_without_the_rest(tmp_path):
    saved("modernbert TOKEN_CLS", tmp_path, "none")
    plain = transformers.ModernBertForTokenClassification.from_pretrained(tmp_path / "base").model
    plain.save_pretrained(tmp_path / "plain")
    model = AutoAdapterModel.from_pretrained(tmp_path / "plain")
    with pytest.raises(CheckpointError, match=r"lacks .head\.dense\.weight.*heads of this model"):
        model.load_adapter(tmp_path / "adapter")
    assert not model.adapters_config
    assert model.load_adapter(tmp_path / "adapter", with_head=False)


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PAIRS = [*itertools.permutations(DTYPES, 2)]


def bert(dtype: torch.dtype) -> Any:
    """A classifier, of the same weights each time."""
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(tiny_config("bert")).to(dtype).eval()


@pytest.mark.parametrize(("trained", "served"), PAIRS, ids=str)
def test_a_head_and_copies_are_cast_to_the_base_models_dtype(trained, served, tmp_path):
    config = peft.LoraConfig(
        task_type="SEQ_CLS", r=2, init_lora_weights=False, bias="all", modules_to_save=["pooler"]
    )
    theirs = peft.get_peft_model(bert(trained), config)
    theirs.save_pretrained(tmp_path)
    model = adapterzoo.peft.PeftModel.from_pretrained(bert(served), tmp_path)
    wanted = {k.rpartition("modules_to_save.default.")[2]: t for k, t in theirs.state_dict().items()
              if "classifier.modules_to_save.default." in k}  # fmt: skip
    found = {k: t for k, t in model.state_dict().items() if "classifier" in k and "default" in k}
    assert len(found) == len(wanted) == 2
    for key, tensor in found.items():
        assert tensor.dtype is served
        assert torch.equal(tensor, wanted[key.rpartition(".")[2]].to(served))
    right = result(theirs.to(torch.float32), "bert")
    near = 0.05 if torch.bfloat16 in (trained, served) else 0.01
    assert (result(model, "bert").float() - right).abs().max() < near


@pytest.mark.parametrize(("trained", "served"), PAIRS, ids=str)
def test_so_are_heads_by_name_in_files_of_their_own(trained, served, tmp_path):
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config("bert")).to(trained)
    model.add_classification_head("c", num_labels=3)
    model.save_head(tmp_path, "c")
    other = AutoAdapterModel.from_config(tiny_config("bert")).to(served)
    other.load_head(tmp_path)
    mine, theirs = dict(model.heads["c"].named_parameters()), other.heads["c"].named_parameters()
    for key, tensor in theirs:
        assert tensor.dtype is served
        assert torch.equal(tensor, mine[key].to(served))
