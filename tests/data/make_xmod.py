"""Makes xmod.safetensors: adapters of X-MOD and what AdapterHub's `adapters` computes with them.

Run it with `adapters==1.3.0`, `transformers==4.57.6` and torch on the CPU:
`python tests/data/make_xmod.py`. For each base of `BASES`, all tiny and in float64, the file holds
the weights without language adapters (`<base>/base/<key>`), and for each case the last hidden state
under its composition (`<base>/<case>`). The tensors of each adapter are those that `adapters` saves
(`<base>/<name>/<key>`), and its config is in the metadata. `adapters` deletes the language
adapters, so the file has none: those that a test gives to its model must not matter.
"""

import json
import tempfile
from pathlib import Path

import adapters
import adapters.composition as ac
import torch
from safetensors.torch import save_file
from transformers import XmodConfig, XmodModel

SIZES = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 12, "vocab_size": 24, "max_position_embeddings": 12,
         "languages": ["en_XX", "de_DE"], "default_language": "en_XX"}  # fmt: skip
BASES = {
    "default": {},
    "residual_before_norm": {"ln_before_adapter": False},
    "own_norm": {"adapter_layer_norm": True},
    "pre_norm": {"pre_norm": True},
}
LANGUAGE = {"mh_adapter": False, "output_adapter": True, "reduction_factor": 2,
            "non_linearity": "gelu", "original_ln_before": True, "original_ln_after": False,
            "residual_before_ln": False}  # fmt: skip
CONFIGS = {
    "language": lambda: adapters.BnConfig(**LANGUAGE),
    "seq": lambda: adapters.SeqBnConfig(reduction_factor=2),
    "seq_too": lambda: adapters.SeqBnConfig(reduction_factor=2),
    "left_out": lambda: adapters.SeqBnConfig(reduction_factor=2, leave_out=[0]),
    "double_seq": lambda: adapters.DoubleSeqBnConfig(reduction_factor=2),
    "attention": lambda: adapters.BnConfig(
        mh_adapter=True, output_adapter=False, reduction_factor=2, non_linearity="relu",
        original_ln_before=True),
    "par": lambda: adapters.ParBnConfig(reduction_factor=2),
    "gated": lambda: adapters.SeqBnConfig(reduction_factor=2, use_gating=True),
    "inv": lambda: adapters.SeqBnInvConfig(reduction_factor=2),
    "compacter": lambda: adapters.CompacterConfig(
        reduction_factor=2, phm_dim=2, shared_phm_rule=False),
    "lora": lambda: adapters.LoRAConfig(r=2, intermediate_lora=True, output_lora=True),
    "ia3": lambda: adapters.IA3Config(),
    "prefix": lambda: adapters.PrefixTuningConfig(prefix_length=2, bottleneck_size=4),
    "reft": lambda: adapters.LoReftConfig(r=1),
    "prompt": lambda: adapters.PromptTuningConfig(prompt_length=2),
    "mam": lambda: adapters.MAMConfig(
        adapters.PrefixTuningConfig(prefix_length=2, bottleneck_size=4),
        adapters.ParBnConfig(reduction_factor=2)),
}  # fmt: skip
COMPOSITIONS = {
    "language,seq": lambda: ac.Stack("language", "seq"),
    "seq,language": lambda: ac.Stack("seq", "language"),
    "language,lora": lambda: ac.Stack("language", "lora"),
    "lora,left_out": lambda: ac.Stack("lora", "left_out"),
    "fuse": lambda: ac.Fuse("seq", "seq_too"),
}


def main():
    torch.set_default_dtype(torch.float64)
    here = Path(__file__).parent
    input_ids = torch.arange(10).reshape(2, 5) * 3 % 19 + 3
    tensors, bases, folders = {"input_ids": input_ids}, {}, {}
    for base, options in BASES.items():
        torch.manual_seed(0)
        config = XmodConfig(**SIZES, **options)
        model = XmodModel(config, add_pooling_layer=False).eval()
        adapters.init(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        for key, value in model.state_dict().items():
            plain = key.replace("base_layer.", "")
            if "prefix" not in key and "shared" not in key:
                tensors[f"{base}/base/{plain}"] = value.clone()
        names = CONFIGS if base == "default" else ("language", "seq", "double_seq", "lora", "par")
        for name in names:
            model.add_adapter(name, config=CONFIGS[name]())
        if base == "default":
            model.add_adapter_fusion(["seq", "seq_too"])
        model.double().eval()
        torch.manual_seed(1)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                # those of ReFT are orthogonal
                if ".refts." in key:
                    continue
                if f"{base}/base/{key.replace('base_layer.', '')}" not in tensors:
                    parameter.add_(0.3 * torch.randn_like(parameter))
        setups = {name: (lambda name=name: name) for name in names}
        if base == "default":
            setups |= COMPOSITIONS
        else:
            setups["language,seq"] = COMPOSITIONS["language,seq"]
        for case, setup in setups.items():
            model.set_active_adapters(setup())
            with torch.no_grad():
                tensors[f"{base}/{case}"] = model(input_ids)[0]
        model.set_active_adapters(None)
        with torch.no_grad():
            tensors[f"{base}/none"] = model(input_ids)[0]
        with tempfile.TemporaryDirectory() as temporary:
            saved = Path(temporary)
            for name in names:
                model.save_adapter(saved / name, name, with_head=False)
            if base == "default":
                model.save_adapter_fusion(saved / "fusion", ac.Fuse("seq", "seq_too"))
            for folder in saved.iterdir():
                config = next(folder.glob("*config.json")).read_text()
                folders[f"{base}/{folder.name}"] = json.loads(config)
                held = torch.load(next(folder.glob("*.bin")), weights_only=True)
                for key, value in held.items():
                    tensors[f"{base}/{folder.name}/{key}"] = value.contiguous().clone()
        bases[base] = {**SIZES, **options}
    save_file(
        tensors,
        here / "xmod.safetensors",
        {"bases": json.dumps(bases), "folders": json.dumps(folders)},
    )


if __name__ == "__main__":
    main()
