"""Every method of PEFT, and what its config can ask for: the rows of `docs/peft-files.md`."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import peft
import torch
from families import HIDDEN, tiny_inputs
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.lora.config import (
    BdLoraConfig,
    KasaConfig,
    LoraGAConfig,
    MontecloraConfig,
    VeloraConfig,
)
from peft.tuners.lora.corda import preprocess_corda
from peft.tuners.lora.loraga import preprocess_loraga
from peft.utils import PeftType
from peft_world import for_peft, inputs_of

FAMILIES = ("bert", "gpt2", "llama", "t5", "vit", "qwen3", "qwen3_moe")
CAUSAL = {"gpt2", "llama", "qwen3", "qwen3_moe"}
TASKS = {"bert": "SEQ_CLS", "t5": "SEQ_2_SEQ_LM", **dict.fromkeys(CAUSAL, "CAUSAL_LM")}

Targets = Mapping[str, Any]
# of widths 32 and 64, or 32 and 16
LINEAR: Targets = {
    "bert": ["query", "value", "output.dense"],
    "gpt2": ["c_attn", "mlp.c_proj"],
    "llama": ["q_proj", "v_proj", "down_proj"],
    "t5": ["q", "v", "wo"],
    "vit": ["q_proj", "v_proj", "fc2"],
    "qwen3": ["q_proj", "k_proj", "down_proj"],
    "qwen3_moe": ["q_proj", "v_proj", "o_proj"],
}
# of one width, for methods that share factors or blocks among layers
SQUARE: Targets = {
    "bert": ["query", "value"],
    "gpt2": ["c_attn"],
    "llama": ["q_proj", "o_proj"],
    "t5": ["q", "v"],
    "vit": ["q_proj", "v_proj"],
    "qwen3": ["q_proj", "o_proj"],
    "qwen3_moe": ["q_proj", "o_proj"],
}
TABLES: Targets = {
    "bert": ["word_embeddings", "query"],
    "gpt2": ["wte", "c_attn"],
    "llama": ["embed_tokens", "q_proj"],
    "t5": ["embed_tokens", "q"],
    "vit": ["q_proj"],
    "qwen3": ["embed_tokens", "q_proj"],
    "qwen3_moe": ["embed_tokens", "q_proj"],
}
NORMS: Targets = {
    "bert": ["LayerNorm"],
    "gpt2": ["ln_1", "ln_f"],
    "llama": ["input_layernorm", "norm"],
    "t5": ["layer_norm", "final_layer_norm"],
    "vit": ["layernorm_before", "layernorm"],
    "qwen3": ["input_layernorm", "q_norm"],
    "qwen3_moe": ["input_layernorm", "norm"],
}
SCALED: Targets = {
    "bert": (["key", "value", "output.dense"], ["output.dense"]),
    "gpt2": (["c_attn", "mlp.c_proj"], ["mlp.c_proj"]),
    "llama": (["k_proj", "v_proj", "down_proj"], ["down_proj"]),
    "t5": (["k", "v", "wo"], ["wo"]),
    "vit": (["k_proj", "v_proj", "fc2"], ["fc2"]),
    "qwen3": (["k_proj", "v_proj", "down_proj"], ["down_proj"]),
    "qwen3_moe": (["k_proj", "v_proj", "o_proj"], ["o_proj"]),
}
KEYS: Targets = {
    **{family: ["k_proj"] for family in ("llama", "vit", "qwen3", "qwen3_moe")},
    "bert": ["key"],
    "gpt2": ["mlp.c_proj"],
    "t5": ["k"],
}
SAVED: Targets = {
    "bert": ["pooler", "LayerNorm"],
    "gpt2": ["ln_f"],
    "llama": ["norm", "embed_tokens"],
    "t5": ["final_layer_norm"],
    "vit": ["classifier", "layernorm"],
    "qwen3": ["norm", "lm_head"],
    "qwen3_moe": ["norm"],
}
WEIGHTS: Targets = {
    "bert": ["query.weight"],
    "gpt2": ["c_attn.weight"],
    "llama": ["q_proj.weight"],
    "t5": ["q.weight"],
    "vit": ["q_proj.weight"],
    "qwen3": ["q_proj.weight"],
    "qwen3_moe": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}

Fields = Mapping[str, Any]

_TOKENS = tiny_inputs("bert")["input_ids"][0].tolist()
# tokens that the inputs have, and some in the order in which they have them
SEEN = [*_TOKENS[4:1:-1], 98]
INVOKED = _TOKENS[2:4]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row.

    Attributes:
        kind: PEFT's name of the method.
        variant: what the config asks for; empty where that is a plain one.
        fields: of the config, in a family.
        inputs: what a call needs besides that of the family.
        std: of the random values.
        make: the model of PEFT, from the plain one and the config.
        double: whether files are in float64: PEFT multiplies some tensors in each call, and here
            the product is one tensor.
        near: how much the logits may differ.
    """

    kind: str
    variant: str
    fields: Callable[[str], Fields]
    inputs: Mapping[str, Any] = field(default_factory=dict)
    std: float = 0.1
    make: Callable[[Any, Any, str], Any] = lambda model, config, _family: peft.get_peft_model(
        for_peft(model), config
    )
    double: bool = False
    near: float = 1e-10

    @property
    def rounded(self) -> dict[str, Any]:
        """What it takes to load the file into a model in float32."""
        return {"dtype": torch.float32} if self.double else {}

    @property
    def name(self) -> str:
        return f"{self.kind} {self.variant}".strip()

    def config(self, family: str) -> Any:
        """The config for a family."""
        cls = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(self.kind)]
        values = dict(self.fields(family))
        if family == "gpt2" and "fan_in_fan_out" in cls.__dataclass_fields__:
            values.setdefault("fan_in_fan_out", True)
        return cls(**{"task_type": TASKS.get(family), **values})


CASES: list[Case] = []


def rows(
    kind: str, variants: Mapping[str, Fields], targets: Targets | None = LINEAR, **more: Any
) -> None:
    """Add rows of a method, whose fields are the same in all families but for the layers."""
    for variant, fields in variants.items():

        def of(family: str, fields: Fields = fields) -> Fields:
            chosen = {} if targets is None else {"target_modules": targets[family]}
            # PEFT changes what it is given
            return copy.deepcopy({**chosen, **fields})

        CASES.append(Case(kind=kind, variant=variant, fields=of, **more))


def row(kind: str, variant: str, fields: Callable[[str], Fields], **more: Any) -> None:
    """Add a row whose fields differ between families."""
    CASES.append(Case(kind=kind, variant=variant, fields=fields, **more))


def _named(targets: Targets, **fields: Any) -> Callable[[str], Fields]:
    return lambda family: {"target_modules": [*targets[family]], **fields}


def _first_layer(family: str) -> Fields:
    first = LINEAR[family][0]
    return {
        "target_modules": LINEAR[family],
        "r": 4,
        "rank_pattern": {first: 2},
        "alpha_pattern": {first: 3},
    }


# --- LoRA ---

rows(
    "LORA",
    {
        "": {"r": 4, "lora_alpha": 6, "lora_dropout": 0.25},
        "use_dora": {"r": 4, "lora_alpha": 6, "use_dora": True},
        "use_rslora": {"r": 3, "lora_alpha": 5, "use_rslora": True},
        "lora_bias": {"r": 4, "lora_bias": True},
        'bias="lora_only"': {"r": 4, "bias": "lora_only"},
        'bias="all"': {"r": 4, "bias": "all"},
        "layers_to_transform": {"r": 4, "layers_to_transform": [1]},
        "exclude_modules": {"r": 4, "exclude_modules": r".*\b1\..*"},
        'target_modules="all-linear"': {"r": 4, "target_modules": "all-linear"},
        "trainable_token_indices": {"r": 4, "trainable_token_indices": SEEN},
        'init_lora_weights="gaussian"': {"r": 4, "init_lora_weights": "gaussian"},
        'init_lora_weights="orthogonal"': {"r": 4, "init_lora_weights": "orthogonal"},
        'init_lora_weights="pissa_niter_4"': {"r": 4, "init_lora_weights": "pissa_niter_4"},
        "kasa_config": {"r": 4, "kasa_config": KasaConfig()},
        "velora_config": {"r": 4, "velora_config": VeloraConfig()},
        "monteclora_config": {"r": 4, "monteclora_config": MontecloraConfig()},
    },
)
rows(
    "LORA",
    {
        'init_lora_weights="olora"': {"r": 4, "init_lora_weights": "olora"},
        'init_lora_weights="pissa"': {"r": 4, "init_lora_weights": "pissa"},
    },
    # PEFT rounds the base weights that it changes to float32
    near=1e-5,
)
row("LORA", "rank_pattern, alpha_pattern", _first_layer)
row("LORA", "embeddings", _named(TABLES, r=4, lora_alpha=6))
row("LORA", "embeddings, use_dora", _named(TABLES, r=4, use_dora=True))
row(
    "LORA",
    "modules_to_save",
    lambda f: {"target_modules": LINEAR[f], "r": 4, "modules_to_save": [*SAVED[f]]},
)
row(
    "LORA",
    "target_parameters",
    lambda f: {"target_modules": [], "r": 4, "target_parameters": WEIGHTS[f]},
)
row(
    "LORA",
    "target_parameters, target_modules",
    lambda f: {"r": 4, "target_modules": KEYS[f], "target_parameters": WEIGHTS[f]},
)
row("LORA", "alora_invocation_tokens", _named(LINEAR, r=4, alora_invocation_tokens=INVOKED))
row(
    "LORA",
    "layer_replication",
    lambda f: {"target_modules": LINEAR[f], "r": 4, "layer_replication": [[0, 2], [1, 2]]},
)
row(
    "LORA",
    "use_bdlora",
    lambda f: {
        "target_modules": SQUARE[f],
        "r": 4,
        "use_bdlora": BdLoraConfig(
            target_modules_bd_a=[SQUARE[f][0]], target_modules_bd_b=SQUARE[f][1:], nblocks=2
        ),
    },
)


def _eva(model: Any, config: Any, family: str) -> Any:
    wrapped = peft.get_peft_model(model, config)
    kept: dict[str, Any] = {}
    if family not in CAUSAL | {"bert"}:
        # PEFT's own take inputs for text of one length
        kept = {"prepare_layer_inputs_fn": None, "prepare_model_inputs_fn": None}
    peft.initialize_lora_eva_weights(
        wrapped,
        [inputs_of(family)] * 3,
        forward_fn=lambda net, given: net(**given),
        show_progress_bar=False,
        **kept,
    )
    return wrapped


def _corda(model: Any, config: Any, family: str) -> Any:
    # PEFT takes one row at a time
    inputs = inputs_of(family, 1)
    preprocess_corda(model, config, run_model=lambda: model(**inputs))
    return peft.get_peft_model(model, config)


def _lora_ga(model: Any, config: Any, family: str) -> Any:
    inputs = inputs_of(family)

    def step() -> None:
        model(**inputs).logits.square().mean().backward()

    preprocess_loraga(model, config, step)
    return peft.get_peft_model(model, config)


row(
    "LORA",
    'init_lora_weights="eva"',
    lambda f: {
        "target_modules": SQUARE[f],
        "r": 4,
        "init_lora_weights": "eva",
        "eva_config": peft.EvaConfig(rho=1.0),
    },
    make=_eva,
)
row(
    "LORA", 'init_lora_weights="corda"', _named(LINEAR, r=4, init_lora_weights="corda"), make=_corda
)
row(
    "LORA",
    'init_lora_weights="lora_ga"',
    lambda f: {
        "target_modules": LINEAR[f],
        "r": 4,
        "init_lora_weights": "lora_ga",
        "lora_ga_config": LoraGAConfig(),
    },
    make=_lora_ga,
)
rows(
    "ADALORA",
    {"": {"init_r": 4, "target_r": 2, "total_step": 10, "lora_alpha": 6}},
    std=0.3,
    double=True,
)

# --- other methods of weights that are here ---

rows(
    "BOFT",
    {
        "": {"boft_block_size": 4},
        "boft_block_num": {"boft_block_size": 0, "boft_block_num": 4},
        "boft_n_butterfly_factor": {"boft_block_size": 4, "boft_n_butterfly_factor": 2},
        'bias="boft_only"': {"boft_block_size": 4, "bias": "boft_only"},
    },
)
rows(
    "OFT",
    {
        "": {"oft_block_size": 8},
        "r": {"oft_block_size": 0, "r": 4},
        "use_cayley_neumann=False": {"oft_block_size": 8, "use_cayley_neumann": False},
        # √4 is exact, so that PEFT's float32 of it is
        "coft": {"oft_block_size": 0, "r": 4, "coft": True, "eps": 0.25},
        "block_share": {"oft_block_size": 8, "block_share": True},
        'bias="oft_only"': {"oft_block_size": 8, "bias": "oft_only"},
    },
)
rows("OFT", {"embeddings": {"oft_block_size": 8}}, TABLES)
rows(
    "MISS",
    {
        "": {"r": 4},
        'init_weights="mini"': {"r": 7, "init_weights": "mini", "mini_r": 4},
        'init_weights="bat"': {"r": 8, "init_weights": "bat"},
        'bias="MiSS_only"': {"r": 4, "bias": "MiSS_only"},
    },
)
rows("LOHA", {"": {"r": 4, "alpha": 6}}, std=0.3)
rows(
    "LOKR",
    {
        "": {"r": 2, "alpha": 3},
        "decompose_both": {"r": 1, "decompose_both": True},
        "decompose_factor": {"r": 3, "decompose_factor": 2},
        "a large r": {"r": 32, "init_weights": "lycoris"},
    },
    std=0.3,
)
rows(
    "VERA",
    {
        "": {"r": 6, "projection_prng_key": 7},
        "save_projection=False": {"r": 6, "projection_prng_key": 7, "save_projection": False},
        'bias="vera_only"': {"r": 6, "bias": "vera_only"},
    },
    std=0.3,
)
row(
    "IA3",
    "",
    lambda f: {"target_modules": SCALED[f][0], "feedforward_modules": SCALED[f][1]},
)
row("IA3", "feedforward_modules=[]", lambda f: _named(LINEAR, feedforward_modules=[])(f))
row("LN_TUNING", "", _named(NORMS))
row(
    "TRAINABLE_TOKENS",
    "",
    lambda f: {
        # the rows of all tables of T5 are those of the one that the others share
        "target_modules": {"vit": None, "t5": ["shared"]}.get(f, TABLES[f][:1]),
        "token_indices": SEEN,
    },
    std=0.5,
)

# --- prompts and prefixes ---

_PROMPT = {"num_virtual_tokens": 3}
rows("PROMPT_TUNING", {"": _PROMPT}, None, std=0.5)
rows(
    "P_TUNING",
    {
        "": {**_PROMPT, "encoder_hidden_size": 8},
        'encoder_reparameterization_type="LSTM"': {
            **_PROMPT,
            "encoder_hidden_size": 8,
            "encoder_reparameterization_type": "LSTM",
        },
    },
    None,
    double=True,
)
rows("PREFIX_TUNING", {"": _PROMPT}, None)
rows(
    "PREFIX_TUNING",
    {"prefix_projection": {**_PROMPT, "prefix_projection": True, "encoder_hidden_size": 20}},
    None,
    # the product of an MLP is rounded to float32
    near=1e-5,
)
rows("CARTRIDGE", {"": {**_PROMPT, "num_frozen_tokens": 1}}, None)
rows(
    "CPT",
    {
        "": {
            "cpt_token_ids": [4, 9, 2, 7],
            "cpt_mask": [1, 1, 1, 1],
            "cpt_tokens_type_mask": [1, 2, 3, 4],
        }
    },
    None,
    double=True,
)
_TASK = {"task_ids": torch.tensor([0, 1])}
rows(
    "MULTITASK_PROMPT_TUNING",
    {"": {**_PROMPT, "num_tasks": 2, "num_ranks": 1}},
    None,
    inputs=_TASK,
    std=0.5,
)
rows("ADAPTION_PROMPT", {"": {"adapter_len": 3, "adapter_layers": 2}}, None, std=0.5)

# --- methods that only PEFT has ---

rows("ADAMSS", {"": {"r": 8, "num_subspaces": 2, "subspace_rank": 2}})
rows("BEFT", {"": {}})
rows("C3A", {"": {"block_size": 8}}, SQUARE)
rows("DEFT", {"": {"r": 4}})
rows("DELORA", {"": {"r": 4}})
rows("FOURIERFT", {"": {"n_frequency": 20, "scaling": 5.0}})
rows("FROD", {"": {"progressbar": False}}, SQUARE)
rows("GLORA", {"": {"r": 4}})
rows("GRALORA", {"": {"r": 4, "gralora_k": 2}}, SQUARE)
rows("HIRA", {"": {"r": 4}})
rows("HRA", {"": {"r": 4}})
rows("LILY", {"": {"r": 4}}, SQUARE)
rows("OSF", {"": {"effective_rank": 4}})
rows("PEANUT", {"": {"r": 4}})
rows("POLY", {"": {"r": 4, "n_tasks": 2, "n_skills": 2}}, inputs=_TASK)
rows("PSOFT", {"": {"r": 8}})
rows("PVERA", {"": {"r": 6}}, SQUARE, std=0.3)
rows("RANDLORA", {"": {"r": 4, "randlora_alpha": 8}})
rows("ROAD", {"": {"group_size": 8}})
rows("SHADOW", {"": {"r": 4}}, None)
rows("SHIRA", {"": {"r": 4, "random_seed": 3}})
rows("SUPERTUNING", {"": {"sparsity": 0.9}})
rows("TINYLORA", {"": {"u": 8}}, std=0.5)
rows("UNILORA", {"": {"r": 4, "theta_d_length": 32}}, std=0.3)
rows("VBLORA", {"": {"r": 4, "num_vectors": 16, "vector_length": 8}})
rows("WAVEFT", {"": {"n_frequency": 20}})


def _mixture(model: Any, config: Any, family: str) -> Any:
    """X-LoRA mixes adapters of folders."""
    plain = peft.LoraConfig(
        target_modules=SQUARE[family], r=4, init_lora_weights=False, task_type=config.task_type
    )
    with tempfile.TemporaryDirectory() as folder:
        peft.get_peft_model(copy.deepcopy(model), plain).save_pretrained(folder)
        config.adapters = {"0": folder}
        # what PEFT asks for
        model.config.use_cache = False
        return peft.get_peft_model(model, config)


rows("XLORA", {"": {"hidden_size": HIDDEN, "adapters": {}}}, None, make=_mixture)
