"""A tokenizer of 99 words, and models of transformers' own task classes, that need no network."""

from __future__ import annotations

from typing import Any

import torch
from families import VOCABULARY, tiny_config
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

_SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
_TEXT = (
    *("a", "the", "this", "film", "plot", "example"),
    *("was", "is", "not", "good", "bad", "about", "."),
)
SENTENCES = ["the film was good .", "a bad plot", "this film is not about the plot ."]


def tokenizer(pairs: bool = True) -> PreTrainedTokenizerFast:
    """Words between spaces; with `pairs` as BERT frames them, else bare as GPT takes them."""
    words = [*_SPECIAL, *_TEXT]
    words += [f"w{i}" for i in range(VOCABULARY - len(words))]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if pairs:
        made.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]",
        bos_token="[CLS]", eos_token="[SEP]", unk_token="[UNK]", mask_token="[MASK]",
        model_max_length=32, padding_side="right",
    )  # fmt: skip


def plain(cls: Any, family: str, **changes: Any) -> Any:
    """A tiny model of a transformers class with weights that are far from symmetric, in eval."""
    config = tiny_config(family)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = cls.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
