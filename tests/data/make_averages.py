"""Makes averages.safetensors: what AdapterHub's `adapters` makes of several adapters, and heads.

Run it with `adapters==1.3.0`, `transformers==4.57.6` and torch on the CPU:
`python tests/data/make_averages.py`. For a tiny BERT the file holds the tensors of `save_adapter`
of what is averaged and of each average (`<method>/<name>/<key>`), those of heads (`head/<name>/…`),
and in its metadata the size of the model, the documents of configs, and the arguments of the calls.
"""

import json
import tempfile
from pathlib import Path

import torch
from adapters import AutoAdapterModel
from safetensors.torch import save_file
from transformers import BertConfig

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 24, "vocab_size": 32, "max_position_embeddings": 16}  # fmt: skip
METHODS = {
    "lora": "lora[r=4,alpha=8]",
    "lora_all": "lora[r=2,alpha=2,intermediate_lora=True,output_lora=True]",
    "dora": "dora[r=4,alpha=4]",
    "seq_bn": "seq_bn[reduction_factor=4]",
    "double_seq_bn": "double_seq_bn[reduction_factor=4,ln_before=True]",
    "par_bn": "par_bn[reduction_factor=4,scaling='learned']",
}
LINEAR = {
    "equal": {},
    "weighted": {"weights": [0.2, 0.8]},
    "normalised": {"weights": [3.0, 1.0]},
    "signed": {"weights": [2.0, -1.0], "normalize_weights": False},
}
LORA = {
    "negated": {"weights": [1.0, -0.5], "normalize_weights": False,
                "combine_strategy": "lora_linear_only_negate_b"},
    "of_rank_4": {"weights": [0.5, 0.25], "normalize_weights": False, "svd_rank": 4,
                  "combine_strategy": "lora_delta_w_svd"},
}  # fmt: skip
HEADS = {"equal": {}, "weighted": {"weights": [3.0, 1.0]},
         "signed": {"weights": [2.0, -1.0], "normalize_weights": False}}  # fmt: skip


def saved(save, name):
    """Tensors and config of what a function saves to a folder."""
    with tempfile.TemporaryDirectory() as folder:
        save(folder, name)
        (config,) = Path(folder).glob("*_config.json")
        (tensors,) = Path(folder).glob("*.bin")
        return torch.load(tensors, weights_only=True), json.loads(config.read_text())


def stirred(parameters):
    for parameter in parameters:
        parameter.data.add_(torch.randn_like(parameter) * 0.3)


def main():
    tensors, documents, calls = {}, {}, {}

    def keep(place, found):
        # adapters registers the norm in front twice
        own = {f"{place}/{key}": value.clone() for key, value in found[0].items()}
        tensors.update(own)
        documents[place] = found[1]

    for method, config in METHODS.items():
        torch.manual_seed(0)
        model = AutoAdapterModel.from_config(BertConfig(**SIZES)).eval()
        for name in "ab":
            model.add_adapter(name, config)
            named = model.named_parameters()
            stirred(value for key, value in named if f".{name}." in key)
            keep(f"{method}/{name}", saved(model.save_adapter, name))
        for name, call in {**LINEAR, **(LORA if method == "lora" else {})}.items():
            model.average_adapter(name, ["a", "b"], **call)
            keep(f"{method}/{name}", saved(model.save_adapter, name))
            calls[f"{method}/{name}"] = call
    model = AutoAdapterModel.from_config(BertConfig(**SIZES)).eval()
    for name in "ab":
        model.add_classification_head(name, num_labels=3)
        stirred(model.heads[name].parameters())
        keep(f"head/{name}", saved(model.save_head, name))
    for name, call in HEADS.items():
        model.average_head(name, ["a", "b"], **call)
        keep(f"head/{name}", saved(model.save_head, name))
        calls[f"head/{name}"] = call
    said = {"sizes": SIZES, "documents": documents, "calls": calls}
    metadata = {key: json.dumps(value) for key, value in said.items()}
    save_file(tensors, Path(__file__).parent / "averages.safetensors", metadata)


if __name__ == "__main__":
    main()
