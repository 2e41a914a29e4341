"""Tiny random models under the names that PEFT's tests load, in a cache of the Hub.

Their sizes are small, their values random, and their tokenizer is one for all: what the tests
compare is always computed on both sides from the same model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

REVISION = "a" * 40
OTHER_REVISION = "b" * 40
VOCABULARY = 1024
_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, **_IDS,
}  # fmt: skip
_ENCODER = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 512, "type_vocab_size": 2,
    "pad_token_id": 0,
}  # fmt: skip
_OPT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 512, "word_embed_proj_dim": 32, **_IDS,
}  # fmt: skip
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512,
         **_IDS}  # fmt: skip
_T5 = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
_BART = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "max_position_embeddings": 512, "decoder_start_token_id": 2, **_IDS,
}  # fmt: skip
_WHISPER = {
    "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "num_mel_bins": 80, "decoder_start_token_id": 1, **_IDS,
}  # fmt: skip
_DISENTANGLED = {**_ENCODER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"],
                 "type_vocab_size": 0}  # fmt: skip
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

# name on the Hub → class of transformers, fields of its config
_OWN = "peft-internal-testing/"
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    f"{_OWN}tiny-random-OPTForCausalLM": ("OPTForCausalLM", _OPT),
    f"{_OWN}tiny-random-OPTForCausalLM-extended-base": ("OPTForCausalLM", _OPT),
    f"{_OWN}opt-125m": ("OPTForCausalLM", {
        **_OPT, "hidden_size": 64, "word_embed_proj_dim": 64, "num_hidden_layers": 12}),
    f"{_OWN}tiny-random-LlamaForCausalLM": ("LlamaForCausalLM", _DECODER),
    "trl-internal-testing/tiny-random-LlamaForCausalLM": ("LlamaForCausalLM", _DECODER),
    "hf-internal-testing/tiny-random-LlamaForCausalLM": ("LlamaForCausalLM", _DECODER),
    "hf-internal-testing/tiny-random-MistralForCausalLM": (
        "MistralForCausalLM", {**_DECODER, "sliding_window": None}),
    "hf-internal-testing/tiny-random-Gemma3ForCausalLM": ("Gemma3ForCausalLM", {
        **_DECODER, "head_dim": 8, "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"]}),
    f"{_OWN}tiny-dummy-qwen2": ("Qwen2ForCausalLM", _DECODER),
    "Qwen/Qwen2-0.5B": ("Qwen2ForCausalLM", {**_DECODER, "tie_word_embeddings": True}),
    "trl-internal-testing/tiny-Qwen3ForCausalLM": (
        "Qwen3ForCausalLM", {**_DECODER, "head_dim": 8}),
    "hf-internal-testing/tiny-random-gpt2": ("GPT2LMHeadModel", _GPT2),
    f"{_OWN}tiny-random-gpt2": ("GPT2LMHeadModel", _GPT2),
    f"{_OWN}tiny-random-GPT2LMHeadModel": ("GPT2LMHeadModel", _GPT2),
    f"{_OWN}tiny-random-GPTJForCausalLM": ("GPTJForCausalLM", {**_GPT2, "rotary_dim": 4}),
    f"{_OWN}tiny-random-GPTNeoXForCausalLM": ("GPTNeoXForCausalLM", {
        **_ENCODER, "bos_token_id": 1, "eos_token_id": 2}),
    f"{_OWN}tiny-random-BloomForCausalLM": ("BloomForCausalLM", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, **_IDS}),
    f"{_OWN}tiny-random-BartForConditionalGeneration": ("BartForConditionalGeneration", _BART),
    f"{_OWN}tiny-random-T5ForConditionalGeneration": ("T5ForConditionalGeneration", _T5),
    f"{_OWN}tiny-random-T5ForConditionalGeneration-calibrated": (
        "T5ForConditionalGeneration", _T5),
    f"{_OWN}tiny-random-t5": ("T5ForConditionalGeneration", _T5),
    "google/flan-t5-small": ("T5ForConditionalGeneration", {
        **_T5, "tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}),
    f"{_OWN}tiny-random-WhisperForConditionalGeneration": (
        "WhisperForConditionalGeneration", _WHISPER),
    f"{_OWN}tiny-random-BertModel": ("BertModel", _ENCODER),
    f"{_OWN}tiny-random-RobertaModel": (
        "RobertaModel", {**_ENCODER, "pad_token_id": 1, "type_vocab_size": 1}),
    f"{_OWN}tiny-random-DebertaModel": ("DebertaModel", _DISENTANGLED),
    f"{_OWN}tiny-random-DebertaV2Model": ("DebertaV2Model", _DISENTANGLED),
    f"{_OWN}tiny-random-BertForSequenceClassification": (
        "BertForSequenceClassification", _ENCODER),
    f"{_OWN}tiny-random-RobertaForSequenceClassification": (
        "RobertaForSequenceClassification",
        {**_ENCODER, "pad_token_id": 1, "type_vocab_size": 1}),
    "trl-internal-testing/tiny-LlamaForSequenceClassification-3.2": (
        "LlamaForSequenceClassification", _DECODER),
    f"{_OWN}tiny-random-ResNetForImageClassification": ("ResNetForImageClassification", {
        "embedding_size": 10, "hidden_sizes": [10, 20, 30, 40], "depths": [1, 1, 2, 1],
        "num_labels": 3}),
    "trl-internal-testing/tiny-Llama4ForCausalLM": ("Llama4ForCausalLM", {
        **_DECODER, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 64,
        "head_dim": 8, "interleave_moe_layer_step": 1}),
    "trl-internal-testing/tiny-GptOssForCausalLM": (
        "GptOssForCausalLM", {**_DECODER, **_EXPERTS, "head_dim": 8}),
    "hf-internal-testing/tiny-random-MixtralForCausalLM": (
        "MixtralForCausalLM", {**_DECODER, **_EXPERTS}),
    f"{_OWN}tiny-clip-text-2": ("CLIPTextModel", {
        **_ENCODER, "bos_token_id": 1, "eos_token_id": 2, "projection_dim": 32}),
}  # fmt: skip

# name → model, class that loads it, task of PEFT's config
_OPT_NAME = f"{_OWN}tiny-random-OPTForCausalLM"
ADAPTERS: Mapping[str, tuple[str, str, str | None]] = {
    f"{_OWN}tiny-OPTForCausalLM-lora": (_OPT_NAME, "AutoModelForCausalLM", "CAUSAL_LM"),
    f"{_OWN}tiny_OPTForSequenceClassification-lora": (
        _OPT_NAME, "AutoModelForSequenceClassification", "SEQ_CLS"),
    f"{_OWN}tiny_OPTForQuestionAnswering-lora": (
        _OPT_NAME, "AutoModelForQuestionAnswering", "QUESTION_ANS"),
    f"{_OWN}tiny_OPTForFeatureExtraction-lora": (_OPT_NAME, "AutoModel", "FEATURE_EXTRACTION"),
    f"{_OWN}tiny_T5ForSeq2SeqLM-lora": (
        f"{_OWN}tiny-random-T5ForConditionalGeneration", "AutoModelForSeq2SeqLM", "SEQ_2_SEQ_LM"),
    f"{_OWN}tiny_GPT2ForTokenClassification-lora": (
        f"{_OWN}tiny-random-GPT2LMHeadModel", "AutoModelForTokenClassification", "TOKEN_CLS"),
    f"{_OWN}gpt2-lora-random": (
        f"{_OWN}tiny-random-gpt2", "AutoModelForCausalLM", "CAUSAL_LM"),
    f"{_OWN}tiny_WhisperForConditionalGeneration-lora": (
        f"{_OWN}tiny-random-WhisperForConditionalGeneration",
        "WhisperForConditionalGeneration", None),
}  # fmt: skip


def fill(home: Path) -> list[str]:
    """Write all models and adapters; `HF_HOME` must be the same folder.

    Returns:
        What could not be made, with the reason.
    """
    import peft
    import torch
    import transformers

    torch.manual_seed(0)
    tokens, failed = tokenizer(), []
    for name, (cls, fields) in MODELS.items():
        try:
            loaded: Any = getattr(transformers, cls)
            config = loaded.config_class
            if cls == "Gemma3ForCausalLM":
                config = transformers.Gemma3TextConfig
            folder = slot(home, name)
            loaded(config(**fields)).save_pretrained(folder)
            tokens.save_pretrained(folder)
        except Exception as error:  # noqa: BLE001 - shown to the user
            failed.append(f"{name}: {type(error).__name__}: {error}")
    for name, (base, cls, task) in ADAPTERS.items():
        model = getattr(transformers, cls).from_pretrained(slot(home, base))
        targets = ["q_proj", "v_proj"] if task is None else None
        config = peft.LoraConfig(task_type=task, r=4, target_modules=targets)
        config.base_model_name_or_path = base
        made = peft.get_peft_model(model, config)
        made.peft_config["default"].base_model_name_or_path = base
        made.save_pretrained(slot(home, name))
    _with_revisions(home)
    _with_more_tokens(home)
    return failed


def slot(home: Path, name: str, revision: str = REVISION, ref: str = "main") -> Path:
    """The folder of a repository's snapshot in the cache, as huggingface_hub lays it out."""
    repository = home / "hub" / ("models--" + name.replace("/", "--"))
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / ref).write_text(revision)
    folder = repository / "snapshots" / revision
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def tokenizer(extra: int = 0) -> Any:
    """A small BPE of bytes with the special tokens that the tests use."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    learn = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator(["Hello world, this is a test of the tokenizer."] * 3, learn)
    fast: Any = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        unk_token="<unk>", mask_token="<mask>", model_max_length=512,
    )  # fmt: skip
    fast.add_tokens([f"<extra {number}>" for number in range(extra)])
    return fast


def _with_revisions(home: Path) -> None:
    import peft

    config = peft.LoraConfig(base_model_name_or_path=_OPT_NAME)
    name = f"{_OWN}tiny-opt-lora-revision"
    config.save_pretrained(slot(home, name))
    config.save_pretrained(slot(home, name, OTHER_REVISION, "test"))
    config.save_pretrained(slot(home, "ybelkada/test-st-lora"))


def _with_more_tokens(home: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    folder = slot(home, f"{_OWN}tiny-random-OPTForCausalLM-extended-vocab")
    known = len(tokenizer())
    more = tokenizer(VOCABULARY + 5 - known)
    model: Any = AutoModelForCausalLM.from_pretrained(slot(home, _OPT_NAME))
    model.resize_token_embeddings(len(more))
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4)
    made = peft.get_peft_model(model, config)
    made.peft_config["default"].base_model_name_or_path = _OPT_NAME
    made.save_pretrained(folder)
    more.save_pretrained(folder)
