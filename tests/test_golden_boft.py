"""Checkpoints and outputs that PEFT 0.21.2 made, reproduced from its tensors.

They lie beside the repository; the tests are skipped where they are not there.
"""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from adapterzoo import BOFTConfig, init

SHARED = Path(__file__).resolve().parents[2] / "shared" / "golden" / "peft"
# in this PEFT, BOFT refuses the Conv1D layers of GPT-2
CASES = [
    pytest.param(SHARED / family / case, id=f"{family}-{case}")
    for family in ("bert", "llama", "t5", "vit")
    for case in ("boft_m1", "boft_m2", "boft_blocknum")
]
PREFIX = "base_model.model."


def golden_config(folder: Path, factors: int) -> BOFTConfig:
    """PEFT's config, with the number of factors that the tensors have."""
    config = json.loads((folder / "adapter_config.json").read_text())
    fields = ("boft_block_size", "boft_block_num", "boft_dropout", "target_modules")
    return BOFTConfig(**{f: config[f] for f in fields}, boft_n_butterfly_factor=factors)


@pytest.mark.parametrize("folder", CASES)
def test_boft_gives_the_golden_outputs(folder: Path):
    if not folder.is_dir():
        pytest.skip(f"no golden checkpoints in {SHARED.name}/")
    base = folder.parent / "base"
    architecture = json.loads((base / "config.json").read_text())["architectures"][0]
    model = init(getattr(transformers, architecture).from_pretrained(base)).eval()
    file = load_file(folder / "adapter_model.safetensors")
    # PEFT makes one factor of several where it cannot build its CUDA extension
    (factors,) = {t.shape[0] for key, t in file.items() if key.endswith(".boft_R")}
    model.add_adapter("golden", golden_config(folder, factors))
    modules = {name: m for name, m in model.named_modules() if type(m).__name__ == "BOFT"}
    places = {name.replace(".adapters.golden", ""): module for name, module in modules.items()}
    found = {}
    for key, value in file.items():
        path, _, parameter = key.removeprefix(PREFIX).rpartition(".")
        if parameter in ("boft_R", "boft_s"):
            found.setdefault(path, {})[parameter] = value
        else:
            # the head, which PEFT saves whole
            model.get_submodule(path).get_parameter(parameter).data.copy_(value)
    assert set(found) == set(places)
    for path, values in found.items():
        places[path].load_state_dict(values)
    outputs = load_file(folder / "expected.safetensors")
    logits, logits_base = outputs.pop("logits"), outputs.pop("logits_base")
    with torch.no_grad():
        plain = model(**outputs).logits
        model.set_active_adapters("golden")
        adapted = model(**outputs).logits
        model.merge_adapter("golden")
        merged = model(**outputs).logits
    torch.testing.assert_close(adapted, logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(merged, logits, rtol=0, atol=1e-5)
    assert (logits - logits_base).abs().max() > 0.01
    if not any("classifier" in key for key in file):
        torch.testing.assert_close(plain, logits_base, rtol=0, atol=1e-5)
