"""Makes bottleneck_options.safetensors: what AdapterHub's `adapters` computes for each option.

Run it with `adapters==1.3.0`, `transformers==4.57.6` and torch on the CPU:
`python tests/data/make_bottleneck_options.py`. For a post-LN model (BERT) and a pre-LN model
(LLaMA), both tiny, the file holds the base weights (`<family>/base/<key>`), the input
(`<family>/input_ids`) and for each case of its metadata the adapter's tensors
(`<family>/<case>/<layer>/<mh or output>/<suffix>`) and the last hidden state (`<family>/<case>`).
"""

import json
import re
from pathlib import Path

import adapters
import torch
from adapters import BnConfig
from safetensors.torch import save_file
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

BEFORE = {"original_ln_before": True}
PLUS = {**BEFORE, "original_ln_after": False, "residual_before_ln": False}
CASES = {
    "after": {},
    "after_norms": {"ln_before": True, "ln_after": True},
    "after_norm_encloses": {"ln_after": True, "adapter_residual_before_ln": True, "scaling": 0.5},
    "before": BEFORE,
    "before_norms": {**BEFORE, "ln_before": True, "ln_after": True},
    "before_norm_encloses": {**BEFORE, "ln_after": True, "adapter_residual_before_ln": True},
    "before_residual_read": {**BEFORE, "residual_before_ln": False},
    "before_residual_read_norm_encloses": {
        **BEFORE,
        "residual_before_ln": False,
        "ln_after": True,
        "adapter_residual_before_ln": True,
    },
    "before_residual_added": {**BEFORE, "residual_before_ln": "post_add"},
    "plus": {**PLUS, "scaling": "channel"},
    "plus_norm_encloses": {**PLUS, "ln_after": True, "adapter_residual_before_ln": True},
    "gated": {**BEFORE, "use_gating": True, "scaling": "learned"},
    "parallel": {"is_parallel": True, "scaling": 4.0},
    "parallel_norm_gated": {"is_parallel": True, "ln_before": True, "ln_after": True,
                            "use_gating": True, "scaling": 2.0},
    "per_layer": {"reduction_factor": {"1": 2, "default": 8}},
    "left_out": {"leave_out": [0], "output_adapter": False},
}  # fmt: skip
COMMON = {"mh_adapter": True, "output_adapter": True, "reduction_factor": 4,
          "non_linearity": "gelu"}  # fmt: skip
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 24, "vocab_size": 32, "max_position_embeddings": 16}  # fmt: skip
SUFFIX = re.compile(r"layers?\.(\d+)\.(.*)adapters\.case\.(.+)")


def base(family):
    torch.manual_seed(0)
    if family == "bert":
        return BertModel(BertConfig(**SIZES), add_pooling_layer=False)
    return LlamaModel(LlamaConfig(**SIZES, num_key_value_heads=1))


def main():
    tensors, configs = {}, {}
    input_ids = torch.arange(14).reshape(2, 7) * 5 % 32
    for family in ("bert", "llama"):
        for key, value in base(family).state_dict().items():
            tensors[f"{family}/base/{key}"] = value.clone()
        tensors[f"{family}/input_ids"] = input_ids.clone()
        for case, options in CASES.items():
            if family == "llama" and case == "before_residual_added":
                continue  # adapters raises UnboundLocalError
            model = base(family).eval()
            adapters.init(model)
            config = BnConfig(**{**COMMON, **options})
            model.add_adapter("case", config=config)
            model.set_active_adapters("case")
            torch.manual_seed(len(case))
            for key, value in model.named_parameters():
                if ".case." in key:
                    value.data = value.data + 0.3 * torch.randn_like(value)
            for key, value in model.state_dict().items():
                # adapters registers the norm in front twice
                if ".case." in key and "adapter_norm_before" not in key:
                    layer, middle, suffix = SUFFIX.search(key).groups()
                    kind = "mh" if "attention" in middle else "output"
                    tensors[f"{family}/{case}/{layer}/{kind}/{suffix}"] = value.clone()
            with torch.no_grad():
                tensors[f"{family}/{case}"] = model(input_ids)[0]
            configs[case] = config.to_dict()
    save_file(
        tensors,
        Path(__file__).parent / "bottleneck_options.safetensors",
        {"configs": json.dumps(configs)},
    )


if __name__ == "__main__":
    main()
