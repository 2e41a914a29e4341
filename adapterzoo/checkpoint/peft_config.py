"""`adapter_config.json` of PEFT, read with care: what it says, or why it cannot be honoured.

A file is refused when it says something that changes what the adapter computes and that cannot be
reproduced here; wrong outputs are worse than none. Fields that only matter to training by PEFT,
and fields that are off, do not matter.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from adapterzoo.errors import CheckpointError, listing
from adapterzoo.fields import MAX_WIDTH

CONFIG = "adapter_config.json"
# what helps with every adapter that PEFT can merge
MERGE = (
    "Merge the adapter by PEFT, and load the merged model: "
    "peft_model.merge_and_unload().save_pretrained(…)."
)

# what LoRA's initial values leave as it was: then A and B are the whole adapter
_PURE_INITS = ("gaussian", "eva", "orthogonal", "mica")
_REASONS: Mapping[str, str] = {
    "use_qalora": "it pools the input of each group before A",
    "alora_invocation_tokens": "it acts only behind certain tokens",
    "layer_replication": "it has more layers than the model",
    "target_parameters": "it adapts parameters of fused experts one by one",
    "trainable_token_indices": "it replaces rows of the embedding",
    "use_bdlora": "its factors are block-diagonal and packed",
    "arrow_config": "it routes each token among several adapters",
    "kasa_config": "it cuts singular values out of the base weights",
    "monteclora_config": "it draws its factors at random in each forward",
    "megatron_config": "it belongs to layers that Megatron has split",
    "enable_lora": "it is of PEFT before 0.3, where parts of a fused layer had adapters",
}
_INERT = """
    alpha_pattern auto_mapping base_model_name_or_path bias boft_block_num boft_block_size
    boft_dropout boft_n_butterfly_factor corda_config ensure_weight_tying eva_config
    exclude_modules fan_in_fan_out inference_mode init_lora_weights init_weights layers_pattern
    layers_to_transform loftq_config lora_alpha lora_bias lora_dropout lora_ga_config megatron_core
    merge_weights modules_to_save peft_type peft_version qalora_group_size r rank_pattern revision
    runtime_config target_modules task_type use_dora use_rslora velora_config
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftConfig:
    """What a PEFT config says, checked.

    Attributes:
        peft_type: "LORA", which includes DoRA, or "BOFT".
        r: the rank where `rank_pattern` says nothing else.
        lora_alpha: numerator of the scaling where `alpha_pattern` says nothing else.
        dropout: LoRA's, or BOFT's of blocks.
        use_rslora: whether the scaling is alpha / √r.
        use_dora: whether there are magnitudes.
        lora_bias: whether B has a bias.
        rank_pattern: regular expressions to ranks.
        alpha_pattern: the same to alphas.
        boft_n_butterfly_factor: how many factors the file claims to have.
        boft_block_num: how many blocks; 0: their size is given.
        modules_to_save: names of modules that are saved whole.
        task_type: PEFT's word for the task; None when unknown.
        base_class: the class of the model, where PEFT did not know the task.
        base_model: the name of the base model.
    """

    peft_type: Literal["LORA", "BOFT"]
    r: int = 8
    lora_alpha: float = 8
    dropout: float = 0.0
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    boft_n_butterfly_factor: int = 1
    boft_block_num: int = 0
    modules_to_save: tuple[str, ...] = ()
    task_type: str | None = None
    base_class: str | None = None
    base_model: str | None = None


def checked(call: str, document: Mapping[str, Any]) -> PeftConfig:
    """What the fields of a PEFT config say.

    Args:
        call: what the user wrote, for messages.
        document: the fields.

    Raises:
        CheckpointError: a value is not legal, or says what cannot be reproduced here.
    """
    reader = _Reader(call, document)
    kind = document.get("peft_type")
    if kind not in ("LORA", "BOFT"):
        raise CheckpointError(
            f"{call}: {CONFIG} says peft_type={kind!r}; of PEFT's methods LORA (with DoRA) and "
            f"BOFT can be loaded. {MERGE}"
        )
    _refuse(call, document)
    task = reader.text("task_type")
    mapping = document.get("auto_mapping")
    base_class = mapping.get("base_model_class") if isinstance(mapping, Mapping) else None
    shared: dict[str, Any] = {
        "modules_to_save": reader.names("modules_to_save"),
        "task_type": task,
        "base_class": base_class if isinstance(base_class, str) else None,
        "base_model": reader.text("base_model_name_or_path"),
    }
    if kind == "BOFT":
        return PeftConfig(
            peft_type="BOFT",
            dropout=reader.number("boft_dropout", 0.0, 0.0, 1.0 - 1e-9),
            boft_n_butterfly_factor=reader.whole("boft_n_butterfly_factor", 1, 1, 30),
            boft_block_num=reader.whole("boft_block_num", 0, 0, MAX_WIDTH),
            **shared,
        )
    return PeftConfig(
        peft_type="LORA",
        r=reader.whole("r", 8, 1, MAX_WIDTH),
        lora_alpha=reader.number("lora_alpha", 8, -1e9, 1e9),
        dropout=reader.number("lora_dropout", 0.0, 0.0, 1.0 - 1e-9),
        use_rslora=reader.flag("use_rslora"),
        use_dora=reader.flag("use_dora"),
        lora_bias=reader.flag("lora_bias"),
        rank_pattern=reader.pattern("rank_pattern", whole=True),
        alpha_pattern=reader.pattern("alpha_pattern", whole=False),
        **shared,
    )


def _refuse(call: str, document: Mapping[str, Any]) -> None:
    for name, reason in _REASONS.items():
        if document.get(name):
            raise CheckpointError(
                f"{call}: {CONFIG} says {name}={_short(document[name])}: {reason}, which is not "
                f"reproduced here. {MERGE}"
            )
    init = document.get("init_lora_weights", True)
    if not isinstance(init, bool) and init is not None and init not in _PURE_INITS:
        raise CheckpointError(
            f"{call}: {CONFIG} says init_lora_weights={_short(init)}: that initialisation changed "
            f"the base weights, so A and B belong to weights that this model does not have. Save "
            f"it by PEFT as a plain LoRA: peft_model.save_pretrained(…, "
            f"path_initial_model_for_weight_conversion=…)."
        )
    if unknown := sorted(k for k, v in document.items() if v and k not in _INERT.split()):
        warnings.warn(
            f"{call}: {CONFIG} has fields that are not known here: {listing(unknown)}. They are "
            f"ignored; compare the outputs with those of PEFT.",
            stacklevel=2,
        )


class _Reader:
    """Fields of a config, each checked as it is read."""

    def __init__(self, call: str, document: Mapping[str, Any]) -> None:
        self.call = call
        self.document = document

    def whole(self, name: str, default: int, low: int, high: int) -> int:
        value: int = self._given(name, default)
        if type(value) is not int or not low <= value <= high:
            self._wrong(name, value, f"a whole number from {low} to {high}", default)
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value: float = self._given(name, default)
        if not _within(value, low, high):
            self._wrong(name, value, f"a number from {low:g} to {high:g}", default)
        return value

    def flag(self, name: str) -> bool:
        value = self._given(name, False)
        if not isinstance(value, bool):
            self._wrong(name, value, "true or false", "false")
        return bool(value)

    def text(self, name: str) -> str | None:
        value = self._given(name, None)
        if value is not None and not isinstance(value, str):
            self._wrong(name, value, "a text or null", "null")
        return None if value is None else str(value)

    def names(self, name: str) -> tuple[str, ...]:
        value = self._given(name, ())
        if not isinstance(value, (list, tuple)) or not all(isinstance(n, str) for n in value):
            self._wrong(name, value, "a list of names or null", "null")
        # PEFT repeats the names in each file that it writes
        return tuple(dict.fromkeys(value))

    def pattern(self, name: str, whole: bool) -> dict[str, Any]:
        value = self._given(name, {})
        if not isinstance(value, Mapping):
            self._wrong(name, value, "an object of layer names and numbers", "{}")
        for number in value.values():
            if whole:
                right = type(number) is int and 1 <= number <= MAX_WIDTH
            else:
                right = _within(number, -1e9, 1e9)
            if not right:
                legal = f"whole numbers from 1 to {MAX_WIDTH}" if whole else "numbers to 1e9"
                self._wrong(name, value, f"an object of layer names and {legal}", "{}")
        return dict(value)

    def _given(self, name: str, default: Any) -> Any:
        value = self.document.get(name)
        return default if value is None else value

    def _wrong(self, name: str, value: object, legal: str, hint: object) -> None:
        raise CheckpointError(
            f"{self.call}: {CONFIG} says {name}={_short(value)}, which is {legal} in files of "
            f"PEFT. If the tensors are right, write {name!r}: {hint} there; else copy the "
            f"checkpoint again."
        )


def _within(value: Any, low: float, high: float) -> bool:
    # not isinstance: True is an int; NaN is within nothing
    return type(value) in (int, float) and low <= value <= high


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
