"""The first table of the page: what works on a model, found by its type or a well-known name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from adapterzoo import LoRAConfig
from adapterzoo.anatomy import Anatomy
from adapterzoo.errors import SiteError

# names under which people look for a type, if they are not that of its class
KNOWN_AS: Mapping[str, str] = {
    "camembert": "French BERT",
    "cohere": "Command R",
    "cohere2": "Command R7B, Command A",
    "deepseek_v3": "DeepSeek-V3, DeepSeek-R1",
    "falcon": "Falcon 7B, 40B, 180B",
    "gpt2": "GPT-2, DistilGPT-2",
    "gpt_bigcode": "StarCoder, SantaCoder",
    "gpt_neox": "Pythia, Dolly, GPT-NeoX",
    "gpt_oss": "gpt-oss-20b, gpt-oss-120b",
    "granitemoehybrid": "Granite 4",
    "lfm2": "LFM2, Liquid",
    "llama": "Llama 2, Llama 3, Code Llama, Vicuna, TinyLlama, Yi",
    "m2m_100": "M2M-100, NLLB-200",
    "marian": "OPUS-MT",
    "mbart": "mBART-50",
    "mistral": "Mistral 7B, Zephyr",
    "nemotron_h": "Nemotron Nano 2, Nemotron 3",
    "openai-gpt": "GPT",
    "phi3": "Phi-3, Phi-4",
    "qwen2": "Qwen2, Qwen2.5, QwQ",
    "qwen2_5_vl": "Qwen2.5-VL",
    "recurrent_gemma": "RecurrentGemma, Griffin, Hawk",
    "t5": "T5, Flan-T5, T0",
    "mt5": "mT5, mT0",
    "umt5": "UMT5",
    "xlm-roberta": "XLM-RoBERTa, XLM-R, multilingual E5, BGE-M3",
}
_TASKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("causal LM", ("CAUSAL_LM",)),
    ("seq2seq LM", ("SEQ_TO_SEQ_CAUSAL_LM",)),
    ("masked LM", ("MASKED_LM",)),
    ("image-text", ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")),
    ("speech", ("SPEECH_SEQ_2_SEQ", "CTC", "RNNT", "TDT")),
    ("classification", ("SEQUENCE_CLASSIFICATION",)),
    ("tagging", ("TOKEN_CLASSIFICATION",)),
    ("questions", ("QUESTION_ANSWERING",)),
    ("choice", ("MULTIPLE_CHOICE",)),
    ("image classification", ("IMAGE_CLASSIFICATION",)),
    ("audio classification", ("AUDIO_CLASSIFICATION",)),
    ("detection", ("OBJECT_DETECTION", "ZERO_SHOT_OBJECT_DETECTION")),
    ("segmentation", ("SEMANTIC_SEGMENTATION", "INSTANCE_SEGMENTATION", "UNIVERSAL_SEGMENTATION")),
)
# columns of the large table that say whether a kind of adapter works
_METHODS = {
    "lora": "LoRA", "bottleneck": "bottlenecks", "reft": "ReFT", "ln_tuning": "norms",
    "prefix_tuning": "prefixes", "prompt_tuning": "prompts",
}  # fmt: skip

HEAD = """# Find your model

Type a name, or the `model_type` in a model's `config.json`: {count} types of transformers
{version}.

- *methods* that passed [a test](architecture-table.md) on a tiny model of the type. `all` are LoRA
  and its relatives, bottlenecks, ReFT, norms, prefixes and prompts; `not tested`: no tiny model or
  no inputs could be made.
- *heads* for which transformers has a class of the type. `AutoAdapterModel` adds [named
  heads](heads.md) to every type.
- *default LoRA*: the layers that `LoRAConfig()` adapts. Where there are none, name layers with
  `target_modules`, or write `"all-linear"`.

| model | methods | heads | default LoRA |
| --- | --- | --- | --- |
"""


def targets(anatomy: Anatomy) -> tuple[str, ...]:
    """The last names of the layers that the default LoRA adapts, in the order of the model."""
    try:
        sites = [placement.site for placement in LoRAConfig().placements(anatomy)]
    except SiteError:
        return ()
    return tuple(dict.fromkeys((s.parameter or s.path).rpartition(".")[2] for s in sites))


def render(
    found: Iterable[tuple[str, tuple[str, ...]]], cells: Mapping[str, Any], version: str
) -> str:
    """The page, sorted by name.

    Args:
        found: model types, each with what `targets` returned.
        cells: model type → name of a column of the large table → its text.
        version: of transformers.
    """
    rows = sorted((_row(*each, cells.get(each[0], {})) for each in found), key=str.lower)
    return HEAD.format(count=len(rows), version=version) + "".join(rows)


def _row(model_type: str, layers: tuple[str, ...], cells: Mapping[str, str]) -> str:
    from transformers.models.auto import modeling_auto

    def has(*tasks: str) -> bool:
        tables = (f"MODEL_FOR_{task}_MAPPING_NAMES" for task in tasks)
        return any(model_type in getattr(modeling_auto, table) for table in tables)

    cls = modeling_auto.MODEL_MAPPING_NAMES[model_type]
    names = [(cls if isinstance(cls, str) else cls[0]).removesuffix("Model")]
    names += filter(None, [KNOWN_AS.get(model_type)])
    shown = (
        f"{', '.join(names)} `{model_type}`",
        _works(cells),
        ", ".join(name for name, tasks in _TASKS if has(*tasks)),
        " ".join(f"`{name}`" for name in layers) or "–",
    )
    return f"| {' | '.join(shown)} |\n"


def _works(cells: Mapping[str, str]) -> str:
    works, fails = list[str](), list[str]()
    for column, name in _METHODS.items():
        (works if cells.get(column, "").startswith("✓") else fails).append(name)
    if not any(cells.get(column) for column in _METHODS):
        return "not tested"
    if not fails:
        return "all"
    if not works:
        return "none"
    return f"all but {', '.join(fails)}" if len(fails) < len(works) else ", ".join(works)
