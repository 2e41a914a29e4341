"""What type checkers read; `make fixed ARGS="names --write"` writes it."""

# methods of transformers' models have other signatures, and `__getattr__` is hidden
# mypy: disable-error-code="assignment, misc, override"

import os
from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Any, Literal, NoReturn, TypeAlias

from torch import nn

from adapterzoo import AdapterConfig, AdapterModelMixin, _PeftConfig
from adapterzoo.compat.peft.classes import LoraRuntimeConfig as LoraRuntimeConfig
from adapterzoo.compat.peft.classes import PeftConfig as PeftConfig
from adapterzoo.compat.peft.classes import PromptLearningConfig as PromptLearningConfig
from adapterzoo.compat.peft.install import install as install
from adapterzoo.compat.peft.model import AutoPeftModel as _AutoPeftModel
from adapterzoo.compat.peft.model import PeftModel as _PeftModel
from adapterzoo.compat.peft.model import (
    cast_mixed_precision_params as cast_mixed_precision_params,
)
from adapterzoo.compat.peft.model import convert_to_lora as convert_to_lora
from adapterzoo.compat.peft.model import (
    get_base_model_state_dict as get_base_model_state_dict,
)
from adapterzoo.compat.peft.model import get_peft_config as get_peft_config
from adapterzoo.compat.peft.model import (
    get_peft_model_state_dict as get_peft_model_state_dict,
)
from adapterzoo.compat.peft.model import (
    inject_adapter_in_model as inject_adapter_in_model,
)
from adapterzoo.compat.peft.model import load_peft_weights as load_peft_weights
from adapterzoo.compat.peft.model import (
    prepare_model_for_kbit_training as prepare_model_for_kbit_training,
)
from adapterzoo.compat.peft.model import (
    replace_lora_weights_loftq as replace_lora_weights_loftq,
)
from adapterzoo.compat.peft.model import save_as_lora as save_as_lora
from adapterzoo.compat.peft.model import (
    set_base_model_state_dict as set_base_model_state_dict,
)
from adapterzoo.compat.peft.model import (
    set_peft_model_state_dict as set_peft_model_state_dict,
)
from adapterzoo.compat.peft.status import get_layer_status as get_layer_status
from adapterzoo.compat.peft.status import get_model_status as get_model_status
from adapterzoo.model.hf.init_data import InitData

__version__: str
__all__ = [
    "AutoPeftModel",
    "AutoPeftModelForCausalLM",
    "AutoPeftModelForFeatureExtraction",
    "AutoPeftModelForQuestionAnswering",
    "AutoPeftModelForSeq2SeqLM",
    "AutoPeftModelForSequenceClassification",
    "AutoPeftModelForTokenClassification",
    "LoraRuntimeConfig",
    "PeftConfig",
    "PeftMixedModel",
    "PeftModel",
    "PeftType",
    "PromptLearningConfig",
    "TaskType",
    "__version__",
    "cast_mixed_precision_params",
    "convert_to_lora",
    "get_base_model_state_dict",
    "get_layer_status",
    "get_model_status",
    "get_peft_config",
    "get_peft_model",
    "get_peft_model_state_dict",
    "inject_adapter_in_model",
    "install",
    "load_peft_weights",
    "prepare_model_for_kbit_training",
    "replace_lora_weights_loftq",
    "save_as_lora",
    "set_base_model_state_dict",
    "set_peft_model_state_dict",
]

class TaskType(StrEnum):
    SEQ_CLS = "SEQ_CLS"
    SEQ_2_SEQ_LM = "SEQ_2_SEQ_LM"
    CAUSAL_LM = "CAUSAL_LM"
    TOKEN_CLS = "TOKEN_CLS"
    QUESTION_ANS = "QUESTION_ANS"
    FEATURE_EXTRACTION = "FEATURE_EXTRACTION"

class PeftType(StrEnum):
    ADALORA = "ADALORA"
    BOFT = "BOFT"
    CARTRIDGE = "CARTRIDGE"
    CPT = "CPT"
    IA3 = "IA3"
    LN_TUNING = "LN_TUNING"
    LOHA = "LOHA"
    LOKR = "LOKR"
    LORA = "LORA"
    MISS = "MISS"
    OFT = "OFT"
    PREFIX_TUNING = "PREFIX_TUNING"
    PROMPT_TUNING = "PROMPT_TUNING"
    P_TUNING = "P_TUNING"
    TRAINABLE_TOKENS = "TRAINABLE_TOKENS"
    VERA = "VERA"

_Config: TypeAlias = PeftConfig | AdapterConfig | _PeftConfig

class PeftModel(_PeftModel, AdapterModelMixin):
    __getattr__: None
    base_model: Any
    model: Any
    def __new__(
        cls,
        model: nn.Module,
        peft_config: _Config,
        adapter_name: str = ...,
        mixed: bool = ...,
        autocast_adapter_dtype: bool = ...,
        revision: str | None = ...,
        low_cpu_mem_usage: bool = ...,
        init_data: InitData = ...,
    ) -> PeftModel: ...
    @classmethod
    def from_pretrained(
        cls,
        model: nn.Module,
        model_id: str | os.PathLike[str],
        adapter_name: str = ...,
        is_trainable: bool = ...,
        config: Any = ...,
        **kwargs: Any,
    ) -> PeftModel: ...
    def add_adapter(
        self,
        adapter_name: str,
        peft_config: _Config,
        low_cpu_mem_usage: bool = ...,
        autocast_adapter_dtype: bool = ...,
    ) -> None: ...

def get_peft_model(
    model: nn.Module,
    peft_config: _Config,
    adapter_name: str = ...,
    mixed: bool = ...,
    autocast_adapter_dtype: bool = ...,
    revision: str | None = ...,
    low_cpu_mem_usage: bool = ...,
    init_data: InitData = ...,
) -> PeftModel: ...

class PeftMixedModel(PeftModel): ...
class PeftModelForCausalLM(PeftModel): ...
class PeftModelForFeatureExtraction(PeftModel): ...
class PeftModelForQuestionAnswering(PeftModel): ...
class PeftModelForSeq2SeqLM(PeftModel): ...
class PeftModelForSequenceClassification(PeftModel): ...
class PeftModelForTokenClassification(PeftModel): ...

class AutoPeftModel(_AutoPeftModel):
    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        adapter_name: str = ...,
        is_trainable: bool = ...,
        revision: str | None = ...,
        **kwargs: Any,
    ) -> PeftModel: ...

class AutoPeftModelForCausalLM(AutoPeftModel): ...
class AutoPeftModelForSeq2SeqLM(AutoPeftModel): ...
class AutoPeftModelForSequenceClassification(AutoPeftModel): ...
class AutoPeftModelForTokenClassification(AutoPeftModel): ...
class AutoPeftModelForQuestionAnswering(AutoPeftModel): ...
class AutoPeftModelForFeatureExtraction(AutoPeftModel): ...
class AuxiliaryTrainingWrapper(nn.Module): ...
class BOFTLayer(nn.Module): ...
class BaseTunerLayer(nn.Module): ...
class IA3Layer(nn.Module): ...
class LoHaLayer(nn.Module): ...
class LoKrLayer(nn.Module): ...
class LoraLayer(nn.Module): ...
class MissLayer(nn.Module): ...
class ModulesToSaveWrapper(nn.Module): ...
class OFTLayer(nn.Module): ...
class TrainableTokensWrapper(nn.Module): ...
class VeraLayer(nn.Module): ...

class AdaLoraConfig:
    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn: ...

class CPTConfig:
    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn: ...

class CartridgeConfig:
    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn: ...

class LoraModel:
    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn: ...

class PromptEncoderConfig:
    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn: ...

class CordaConfig:
    corda_method: str
    cache_file: object
    covariance_file: object
    verbose: bool
    use_float16_for_covariance: bool
    prune_temporary_fields: bool
    def __init__(
        self,
        corda_method: str = ...,
        cache_file: object = ...,
        covariance_file: object = ...,
        verbose: bool = ...,
        use_float16_for_covariance: bool = ...,
        prune_temporary_fields: bool = ...,
    ) -> None: ...

class EvaConfig:
    rho: float
    tau: float
    use_label_mask: bool
    whiten: bool
    adjust_scaling_factors: bool
    label_mask_value: int
    def __init__(
        self,
        rho: float = ...,
        tau: float = ...,
        use_label_mask: bool = ...,
        whiten: bool = ...,
        adjust_scaling_factors: bool = ...,
        label_mask_value: int = ...,
    ) -> None: ...

class LoftQConfig:
    loftq_bits: int
    loftq_iter: int
    def __init__(self, loftq_bits: int = ..., loftq_iter: int = ...) -> None: ...

class PromptTuningInit(StrEnum):
    RANDOM = "RANDOM"
    SAMPLE_VOCAB = "SAMPLE_VOCAB"
    TEXT = "TEXT"

class BOFTConfig(PeftConfig):
    boft_block_size: int
    boft_block_num: int
    boft_n_butterfly_factor: int
    target_modules: Collection[str] | str | None
    exclude_modules: Collection[str] | str | None
    boft_dropout: float
    fan_in_fan_out: bool
    bias: str
    modules_to_save: Collection[str] | str | None
    init_weights: bool
    layers_to_transform: Collection[int] | None
    layers_pattern: object
    def __init__(
        self,
        task_type: TaskType
        | Literal[
            "SEQ_CLS",
            "SEQ_2_SEQ_LM",
            "CAUSAL_LM",
            "TOKEN_CLS",
            "QUESTION_ANS",
            "FEATURE_EXTRACTION",
        ]
        | None = ...,
        peft_type: str | None = ...,
        auto_mapping: object = ...,
        peft_version: str | None = ...,
        base_model_name_or_path: str | None = ...,
        revision: str | None = ...,
        inference_mode: bool = ...,
        boft_block_size: int = ...,
        boft_block_num: int = ...,
        boft_n_butterfly_factor: int = ...,
        target_modules: Collection[str] | str | None = ...,
        exclude_modules: Collection[str] | str | None = ...,
        boft_dropout: float = ...,
        fan_in_fan_out: bool = ...,
        bias: str = ...,
        modules_to_save: Collection[str] | str | None = ...,
        init_weights: bool = ...,
        layers_to_transform: Collection[int] | None = ...,
        layers_pattern: object = ...,
    ) -> None: ...

class IA3Config(PeftConfig):
    target_modules: Collection[str] | str | None
    exclude_modules: Collection[str] | str | None
    feedforward_modules: Collection[str] | str | None
    fan_in_fan_out: bool
    modules_to_save: Collection[str] | str | None
    init_ia3_weights: bool | str
    def __init__(
        self,
        task_type: TaskType
        | Literal[
            "SEQ_CLS",
            "SEQ_2_SEQ_LM",
            "CAUSAL_LM",
            "TOKEN_CLS",
            "QUESTION_ANS",
            "FEATURE_EXTRACTION",
        ]
        | None = ...,
        peft_type: str | None = ...,
        auto_mapping: object = ...,
        peft_version: str | None = ...,
        base_model_name_or_path: str | None = ...,
        revision: str | None = ...,
        inference_mode: bool = ...,
        target_modules: Collection[str] | str | None = ...,
        exclude_modules: Collection[str] | str | None = ...,
        feedforward_modules: Collection[str] | str | None = ...,
        fan_in_fan_out: bool = ...,
        modules_to_save: Collection[str] | str | None = ...,
        init_ia3_weights: bool | str = ...,
    ) -> None: ...

class LNTuningConfig(PeftConfig):
    target_modules: Collection[str] | str | None
    exclude_modules: Collection[str] | str | None
    modules_to_save: Collection[str] | str | None
    def __init__(
        self,
        task_type: TaskType
        | Literal[
            "SEQ_CLS",
            "SEQ_2_SEQ_LM",
            "CAUSAL_LM",
            "TOKEN_CLS",
            "QUESTION_ANS",
            "FEATURE_EXTRACTION",
        ]
        | None = ...,
        peft_type: str | None = ...,
        auto_mapping: object = ...,
        peft_version: str | None = ...,
        base_model_name_or_path: str | None = ...,
        revision: str | None = ...,
        inference_mode: bool = ...,
        target_modules: Collection[str] | str | None = ...,
        exclude_modules: Collection[str] | str | None = ...,
        modules_to_save: Collection[str] | str | None = ...,
    ) -> None: ...

class LoHaConfig(PeftConfig):
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    r: int
    alpha: float
    rank_dropout: float
    module_dropout: float
    use_effective_conv2d: bool
    target_modules: Collection[str] | str | None
    exclude_modules: Collection[str] | str | None
    init_weights: bool
    layers_to_transform: Collection[int] | None
    layers_pattern: object
    modules_to_save: Collection[str] | str | None
    def __init__(
        self,
        task_type: TaskType
        | Literal[
            "SEQ_CLS",
            "SEQ_2_SEQ_LM",
            "CAUSAL_LM",
            "TOKEN_CLS",
            "QUESTION_ANS",
            "FEATURE_EXTRACTION",
        ]
        | None = ...,
        peft_type: str | None = ...,
        auto_mapping: object = ...,
        peft_version: str | None = ...,
        base_model_name_or_path: str | None = ...,
        revision: str | None = ...,
        inference_mode: bool = ...,
        rank_pattern: Mapping[str, int] = ...,
        alpha_pattern: Mapping[str, float] = ...,
        r: int = ...,
        alpha: float = ...,
        rank_dropout: float = ...,
        module_dropout: float = ...,
        use_effective_conv2d: bool = ...,
        target_modules: Collection[str] | str | None = ...,
        exclude_modules: Collection[str] | str | None = ...,
        init_weights: bool = ...,
        layers_to_transform: Collection[int] | None = ...,
        layers_pattern: object = ...,
        modules_to_save: Collection[str] | str | None = ...,
    ) -> None: ...

class LoKrConfig(PeftConfig):
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    r: int
    alpha: float
    rank_dropout: float
    module_dropout: float
    use_effective_conv2d: bool
    decompose_both: bool
    decompose_factor: int
    rank_dropout_scale: bool
    target_modules: Collection[str] | str | None
    exclude_modules: Collection[str] | str | None
    init_weights: bool | str
    layers_to_transform: Collection[int] | None
    layers_pattern: object
    modules_to_save: Collection[str] | str | None
    def __init__(
        self,
        task_type: TaskType
        | Literal[
            "SEQ_CLS",
            "SEQ_2_SEQ_LM",
            "CAUSAL_LM",
            "TOKEN_CLS",
            "QUESTION_ANS",
            "FEATURE_EXTRACTION",
        ]
        | None = ...,
        peft_type: str | None = ...,
        auto_mapping: object = ...,
        peft_version: str | None = ...,
        base_model_name_or_path: str | None = ...,
        revision: str | None = ...,
        inference_mode: bool = ...,
        rank_pattern: Mapping[str, int] = ...,
        alpha_pattern: Mapping[str, float] = ...,
        r: int = ...,
        alpha: float = ...,
        rank_dropout: float = ...,
        module_dropout: float = ...,
        use_effective_conv2d: bool = ...,
        decompose_both: bool = ...,
        decompose_factor: int = ...,
        rank_dropout_scale: bool = ...,
        target_modules: Collection[str] | str | None = ...,
        exclude_modules: Collection[str] | str | None = ...,
        init_weights: bool | str = ...,
        layers_to_transform: Collection[int] | None = ...,
        layers_pattern: object = ...,
        modules_to_save: Collection[str] | str | None = ...,
    ) -> None: ...

class LoraConfig(PeftConfig):
    r: int
    target_modules: Collection[str] | str | None
    exclude_modules: Collection[str] | str | None
    lora_alpha: float
    lora_dropout: float
    fan_in_fan_out: bool
    bias: str
    use_rslora: bool
    modules_to_save: Collection[str] | str | None
    init_lora_weights: bool | str
    layers_to_transform: Collection[int] | None
    layers_pattern: object
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    use_dora: bool
    trainable_token_indices: Collection[int] | Mapping[str, Collection[int]] | None
    target_parameters: Collection[str] | None
    megatron_core: str
    qalora_group_size: int
    corda_config: object
    eva_config: object
    loftq_config: object
    lora_ga_config: object
    velora_config: object
    ensure_weight_tying: bool
    use_qalora: object
    alora_invocation_tokens: Collection[int] | None
    layer_replication: object
    use_bdlora: object
    arrow_config: object
    kasa_config: object
    monteclora_config: object
    megatron_config: object
    lora_bias: bool
    runtime_config: LoraRuntimeConfig
    def __init__(
        self,
        task_type: TaskType
        | Literal[
            "SEQ_CLS",
            "SEQ_2_SEQ_LM",
            "CAUSAL_LM",
            "TOKEN_CLS",
            "QUESTION_ANS",
            "FEATURE_EXTRACTION",
        ]
        | None = ...,
        peft_type: str | None = ...,
        auto_mapping: object = ...,
        peft_version: str | None = ...,
        base_model_name_or_path: str | None = ...,
        revision: str | None = ...,
        inference_mode: bool = ...,
        r: int = ...,
        target_modules: Collection[str] | str | None = ...,
        exclude_modules: Collection[str] | str | None = ...,
        lora_alpha: float = ...,
        lora_dropout: float = ...,
        fan_in_fan_out: bool = ...,
        bias: str = ...,
        use_rslora: bool = ...,
        modules_to_save: Collection[str] | str | None = ...,
        init_lora_weights: bool | str = ...,
        layers_to_transform: Collection[int] | None = ...,
        layers_pattern: object = ...,
        rank_pattern: Mapping[str, int] = ...,
        alpha_pattern: Mapping[str, float] = ...,
        use_dora: bool = ...,
        trainable_token_indices: Collection[int]
        | Mapping[str, Collection[int]]
        | None = ...,
        target_parameters: Collection[str] | None = ...,
        megatron_core: str = ...,
        qalora_group_size: int = ...,
        corda_config: object = ...,
        eva_config: object = ...,
        loftq_config: object = ...,
        lora_ga_config: object = ...,
        velora_config: object = ...,
        ensure_weight_tying: bool = ...,
        use_qalora: object = ...,
        alora_invocation_tokens: Collection[int] | None = ...,
        layer_replication: object = ...,
        use_bdlora: object = ...,
        arrow_config: object = ...,
        kasa_config: object = ...,
        monteclora_config: object = ...,
        megatron_config: object = ...,
        lora_bias: bool = ...,
        runtime_config: LoraRuntimeConfig = ...,
    ) -> None: ...

class MissConfig(PeftConfig):
    r: int
    miss_dropout: float
    mini_r: int
    target_modules: Collection[str] | str | None
    exclude_modules: Collection[str] | str | None
    init_weights: bool | str
    layers_to_transform: Collection[int] | None
    layers_pattern: object
    modules_to_save: Collection[str] | str | None
    bias: str
    def __init__(
        self,
        task_type: TaskType
        | Literal[
            "SEQ_CLS",
            "SEQ_2_SEQ_LM",
            "CAUSAL_LM",
            "TOKEN_CLS",
            "QUESTION_ANS",
            "FEATURE_EXTRACTION",
        ]
        | None = ...,
        peft_type: str | None = ...,
        auto_mapping: object = ...,
        peft_version: str | None = ...,
        base_model_name_or_path: str | None = ...,
        revision: str | None = ...,
        inference_mode: bool = ...,
        r: int = ...,
        miss_dropout: float = ...,
        mini_r: int = ...,
        target_modules: Collection[str] | str | None = ...,
        exclude_modules: Collection[str] | str | None = ...,
        init_weights: bool | str = ...,
        layers_to_transform: Collection[int] | None = ...,
        layers_pattern: object = ...,
        modules_to_save: Collection[str] | str | None = ...,
        bias: str = ...,
    ) -> None: ...

class OFTConfig(PeftConfig):
    r: int
    oft_block_size: int
    module_dropout: float
    target_modules: Collection[str] | str | None
    fan_in_fan_out: bool
    bias: str
    exclude_modules: Collection[str] | str | None
    init_weights: bool
    layers_to_transform: Collection[int] | None
    layers_pattern: object
    modules_to_save: Collection[str] | str | None
    block_share: bool
    use_cayley_neumann: bool
    num_cayley_neumann_terms: int
    coft: bool
    eps: float
    def __init__(
        self,
        task_type: TaskType
        | Literal[
            "SEQ_CLS",
            "SEQ_2_SEQ_LM",
            "CAUSAL_LM",
            "TOKEN_CLS",
            "QUESTION_ANS",
            "FEATURE_EXTRACTION",
        ]
        | None = ...,
        peft_type: str | None = ...,
        auto_mapping: object = ...,
        peft_version: str | None = ...,
        base_model_name_or_path: str | None = ...,
        revision: str | None = ...,
        inference_mode: bool = ...,
        r: int = ...,
        oft_block_size: int = ...,
        module_dropout: float = ...,
        target_modules: Collection[str] | str | None = ...,
        fan_in_fan_out: bool = ...,
        bias: str = ...,
        exclude_modules: Collection[str] | str | None = ...,
        init_weights: bool = ...,
        layers_to_transform: Collection[int] | None = ...,
        layers_pattern: object = ...,
        modules_to_save: Collection[str] | str | None = ...,
        block_share: bool = ...,
        use_cayley_neumann: bool = ...,
        num_cayley_neumann_terms: int = ...,
        coft: bool = ...,
        eps: float = ...,
    ) -> None: ...

class PrefixTuningConfig(PromptLearningConfig):
    num_virtual_tokens: int | None
    token_dim: object
    num_transformer_submodules: object
    num_attention_heads: object
    num_layers: object
    modules_to_save: Collection[str] | str | None
    encoder_hidden_size: int | None
    prefix_projection: bool
    init_weights: str | None
    def __init__(
        self,
        task_type: TaskType
        | Literal[
            "SEQ_CLS",
            "SEQ_2_SEQ_LM",
            "CAUSAL_LM",
            "TOKEN_CLS",
            "QUESTION_ANS",
            "FEATURE_EXTRACTION",
        ]
        | None = ...,
        peft_type: str | None = ...,
        auto_mapping: object = ...,
        peft_version: str | None = ...,
        base_model_name_or_path: str | None = ...,
        revision: str | None = ...,
        inference_mode: bool = ...,
        num_virtual_tokens: int | None = ...,
        token_dim: object = ...,
        num_transformer_submodules: object = ...,
        num_attention_heads: object = ...,
        num_layers: object = ...,
        modules_to_save: Collection[str] | str | None = ...,
        encoder_hidden_size: int | None = ...,
        prefix_projection: bool = ...,
        init_weights: str | None = ...,
    ) -> None: ...

class PromptTuningConfig(PromptLearningConfig):
    num_virtual_tokens: int | None
    token_dim: object
    num_transformer_submodules: object
    num_attention_heads: object
    num_layers: object
    modules_to_save: Collection[str] | str | None
    prompt_tuning_init: str
    prompt_tuning_init_text: str | None
    tokenizer_name_or_path: object
    tokenizer_kwargs: object
    def __init__(
        self,
        task_type: TaskType
        | Literal[
            "SEQ_CLS",
            "SEQ_2_SEQ_LM",
            "CAUSAL_LM",
            "TOKEN_CLS",
            "QUESTION_ANS",
            "FEATURE_EXTRACTION",
        ]
        | None = ...,
        peft_type: str | None = ...,
        auto_mapping: object = ...,
        peft_version: str | None = ...,
        base_model_name_or_path: str | None = ...,
        revision: str | None = ...,
        inference_mode: bool = ...,
        num_virtual_tokens: int | None = ...,
        token_dim: object = ...,
        num_transformer_submodules: object = ...,
        num_attention_heads: object = ...,
        num_layers: object = ...,
        modules_to_save: Collection[str] | str | None = ...,
        prompt_tuning_init: str = ...,
        prompt_tuning_init_text: str | None = ...,
        tokenizer_name_or_path: object = ...,
        tokenizer_kwargs: object = ...,
    ) -> None: ...

class TrainableTokensConfig(PeftConfig):
    token_indices: Collection[int] | None
    target_modules: Collection[str] | str | None
    init_weights: bool
    def __init__(
        self,
        task_type: TaskType
        | Literal[
            "SEQ_CLS",
            "SEQ_2_SEQ_LM",
            "CAUSAL_LM",
            "TOKEN_CLS",
            "QUESTION_ANS",
            "FEATURE_EXTRACTION",
        ]
        | None = ...,
        peft_type: str | None = ...,
        auto_mapping: object = ...,
        peft_version: str | None = ...,
        base_model_name_or_path: str | None = ...,
        revision: str | None = ...,
        inference_mode: bool = ...,
        token_indices: Collection[int] | None = ...,
        target_modules: Collection[str] | str | None = ...,
        init_weights: bool = ...,
    ) -> None: ...

class VeraConfig(PeftConfig):
    r: int
    target_modules: Collection[str] | str | None
    projection_prng_key: int
    save_projection: bool
    vera_dropout: float
    d_initial: float
    fan_in_fan_out: bool
    bias: str
    modules_to_save: Collection[str] | str | None
    layers_to_transform: Collection[int] | None
    layers_pattern: object
    init_weights: bool | str
    def __init__(
        self,
        task_type: TaskType
        | Literal[
            "SEQ_CLS",
            "SEQ_2_SEQ_LM",
            "CAUSAL_LM",
            "TOKEN_CLS",
            "QUESTION_ANS",
            "FEATURE_EXTRACTION",
        ]
        | None = ...,
        peft_type: str | None = ...,
        auto_mapping: object = ...,
        peft_version: str | None = ...,
        base_model_name_or_path: str | None = ...,
        revision: str | None = ...,
        inference_mode: bool = ...,
        r: int = ...,
        target_modules: Collection[str] | str | None = ...,
        projection_prng_key: int = ...,
        save_projection: bool = ...,
        vera_dropout: float = ...,
        d_initial: float = ...,
        fan_in_fan_out: bool = ...,
        bias: str = ...,
        modules_to_save: Collection[str] | str | None = ...,
        layers_to_transform: Collection[int] | None = ...,
        layers_pattern: object = ...,
        init_weights: bool | str = ...,
    ) -> None: ...
