"""Makes heard.safetensors: what AdapterHub's `adapters` says of gates and fusions in a forward.

Run it with `adapters==1.3.0`, `transformers==4.57.6` and torch on the CPU:
`python tests/data/make_heard.py`. For tiny models the file holds the base weights
(`<family>/base/<key>`), the input (`<family>/input_ids`), the adapters as `adapters` saves them
(`<family>/adapter/<name>/<key>`), the fusion (`<family>/fused/<key>`), and for each case of the
metadata the last hidden state (`<family>/<case>`), the scores of gates
(`<family>/<case>/gates/<adapter>/<block>/<location>`) and the shares of the fusion
(`<family>/<case>/shares/<fusion>/<block>/<location>`). Configs are in the metadata.
"""

import json
import tempfile
from pathlib import Path

import adapters
import torch
from adapters import DoubleSeqBnConfig, Fuse, LoRAConfig, ParBnConfig, SeqBnConfig
from adapters.composition import BatchSplit, Parallel, Split, Stack
from safetensors.torch import save_file
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, LlamaConfig, LlamaModel

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 24, "vocab_size": 32, "max_position_embeddings": 16}  # fmt: skip
MODELS = {
    "bert": lambda: BertModel(BertConfig(**SMALL), add_pooling_layer=False),
    "llama": lambda: LlamaModel(LlamaConfig(**SMALL, num_key_value_heads=1)),
    "gpt2": lambda: GPT2Model(
        GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=16)
    ),
}
ADAPTERS = {
    "a": SeqBnConfig(reduction_factor=4, use_gating=True),
    "b": SeqBnConfig(reduction_factor=4, use_gating=True, ln_before=True),
    "c": DoubleSeqBnConfig(reduction_factor=4, use_gating=True, scaling="learned"),
    "d": ParBnConfig(reduction_factor=4, use_gating=True),
    # what alpha is does not matter: a gated update is not scaled
    "e": LoRAConfig(r=2, alpha=8, use_gating=True, attn_matrices=["q", "k", "v"]),
}
CASES = {
    "one": ("bert llama gpt2", "a"),
    "double": ("bert llama gpt2", "c"),
    "parallel bottleneck": ("bert llama gpt2", "d"),
    "lora": ("bert llama gpt2", "e"),
    "stack": ("bert llama gpt2", Stack("a", "b")),
    "split": ("bert gpt2", Split("a", "b", splits=[3, 4])),
    "rows": ("bert gpt2", BatchSplit("a", "b", batch_sizes=[1, 2])),
    "copies": ("bert gpt2", Parallel("a", "b")),
    "fusion": ("bert llama gpt2", Fuse("a", "b")),
}


def main():
    tensors, documents = {}, {}
    for family, make in MODELS.items():
        torch.manual_seed(0)
        model = make().eval()
        for key, value in model.state_dict().items():
            tensors[f"{family}/base/{key}"] = value.clone()
        adapters.init(model)
        for name, config in ADAPTERS.items():
            model.add_adapter(name, config=config)
        model.add_adapter_fusion(["a", "b"], "dynamic")
        for key, value in model.named_parameters():
            if any(part in key for part in (".adapters.", ".loras.", "_fusion_layer.")):
                value.data = value.data + 0.3 * torch.randn_like(value)
        for name in ADAPTERS:
            store(f"{family}/adapter/{name}", tensors, documents, model.save_adapter, name)
        store(f"{family}/fused", tensors, documents, model.save_adapter_fusion, "a,b")
        # adapters makes its fusion layers in training mode
        model.eval()
        input_ids = torch.arange(21).reshape(3, 7) * 5 % 32
        tensors[f"{family}/input_ids"] = input_ids
        for case, (families, setup) in CASES.items():
            if family not in families.split():
                continue
            model.set_active_adapters(setup)
            with torch.no_grad():
                outputs = model(
                    input_ids,
                    output_adapter_gating_scores=True,
                    output_adapter_fusion_attentions=True,
                )
            tensors[f"{family}/{case}"] = outputs[0].clone()
            for kind, said in (
                ("gates", outputs.adapter_gating_scores),
                ("shares", outputs.adapter_fusion_attentions),
            ):
                for name, blocks in said.items():
                    for block, at in blocks.items():
                        for location, value in at.items():
                            key = f"{family}/{case}/{kind}/{name}/{block}/{location}"
                            tensors[key] = torch.as_tensor(value).clone().contiguous()
    metadata = {"documents": json.dumps(documents), "cases": json.dumps({
        case: str(setup) for case, (_, setup) in CASES.items()
    })}  # fmt: skip
    save_file(tensors, Path(__file__).parent / "heard.safetensors", metadata)


def store(start, tensors, documents, save, name):
    with tempfile.TemporaryDirectory() as folder:
        save(folder, name)
        (config,) = Path(folder).glob("*_config.json")
        documents[start] = [config.name, json.loads(config.read_text())]
        (weights,) = Path(folder).glob("*.bin")
        documents[start].append(weights.name)
        for key, value in torch.load(weights, weights_only=True).items():
            tensors[f"{start}/{key}"] = value.clone()


if __name__ == "__main__":
    main()
