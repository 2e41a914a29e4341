"""Requests with many adapters in one batch beside one adapter after the other: tokens, then time.

    make batching

200 requests over 32 adapters of four methods, and over none, on tiny models: each gives the tokens
that it gives alone with `generate`, in float64. Then the time of `generate_batch` for all of them
in one call, and for those of one adapter after those of another, in the same process.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from adapterzoo import init

METHODS = ("lora[r=8]", "dora[r=4]", "boft", "seq_bn[reduction_factor=4]")
FAMILIES = {
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
}
PAGE = 8
# of the prompts of an adapter, every second one begins with as many blocks of its own
SHARED = 3


@dataclass
class Result:
    """What a run has shown.

    Attributes:
        equal: requests with the tokens that each gives alone.
        hits: prompts of which the cache had the beginning, computed for the same adapter.
        across: the same of one prompt with each adapter once; none in a correct run.
        together: seconds of one call for all requests.
        apart: seconds of the calls for one adapter each.
    """

    equal: int
    hits: int
    across: int
    together: float
    apart: float

    @property
    def ratio(self) -> float:
        """How many times the requests of one call are faster."""
        return self.apart / self.together


def model_of(family: str, adapters: int) -> Any:
    """Return a tiny model with adapters that change what it says."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        family, vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=256, **FAMILIES[family],
    )  # fmt: skip
    # the grouped products of experts do not take float64
    kinds = {"attn_implementation": "sdpa", "experts_implementation": "eager"}
    model: Any = init(AutoModelForCausalLM.from_config(config, **kinds))
    for number in range(adapters):
        model.add_adapter(f"a{number}", METHODS[number % len(METHODS)])
        torch.manual_seed(100 + number)
        for _, module in model.adapter_modules(f"a{number}"):
            for parameter in module.parameters():
                torch.nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def requests_of(count: int, adapters: int) -> tuple[list[list[int]], list[str | None]]:
    """Return prompts and the adapter of each, None for some."""
    source = torch.Generator().manual_seed(1)
    names: list[str | None] = [
        None if number == adapters else f"a{number}"
        for number in torch.randint(adapters + 1, (count,), generator=source).tolist()
    ]
    begin = torch.randint(5, 97, (SHARED * PAGE,), generator=source).tolist()
    prompts = []
    for number in range(count):
        size = int(torch.randint(2, 40, (1,), generator=source))
        own = torch.randint(5, 97, (size,), generator=source).tolist()
        # all adapters have this beginning: only its own may be shared
        prompts.append([*begin, *own] if number % 2 else own)
    return prompts, names


def run(family: str, count: int = 200, adapters: int = 32, tokens: int = 8) -> Result:
    """Run the requests together, one adapter after the other, and each alone."""
    model = model_of(family, adapters)
    prompts, names = requests_of(count, adapters)
    found, seconds, computed = batched(model, prompts, names, tokens)
    start = perf_counter()
    for name in dict.fromkeys(names):
        own = [p for p, n in zip(prompts, names, strict=True) if n == name]
        batched(model, own, [name] * len(own), tokens)
    apart = perf_counter() - start
    equal = sum(
        tokens_alone(model, prompt, name, tokens) == out
        for prompt, name, out in zip(prompts, names, found, strict=True)
    )
    every = list(dict.fromkeys(names))
    same = [prompts[1]] * len(every)
    _, _, once = batched(model, same, every, tokens)
    return Result(equal, hits(prompts, computed, tokens), hits(same, once, tokens), seconds, apart)


def hits(prompts: Sequence[list[int]], computed: int, tokens: int) -> int:
    """Return of how many prompts the cache had the beginning."""
    whole = sum(len(prompt) + tokens - 1 for prompt in prompts)
    return (whole - computed) // (SHARED * PAGE)


def batched(
    model: Any, prompts: Sequence[list[int]], names: Sequence[str | None], tokens: int
) -> tuple[list[list[int]], float, int]:
    """Return the tokens of each request, the time of the call, and how many tokens it computed."""
    computed = 0

    def count(_: object, args: tuple[torch.Tensor, ...]) -> None:
        nonlocal computed
        computed += args[0].numel()

    hook = model.get_input_embeddings().register_forward_pre_hook(count)
    config = ContinuousBatchingConfig(
        num_blocks=2048, page_size=PAGE, max_batch_tokens=256, use_async_batching=False
    )
    start = perf_counter()
    found = model.generate_batch(
        list(prompts), generation_config=greedy(tokens), continuous_batching_config=config,
        warmup=False, adapter_names=list(names),
    )  # fmt: skip
    seconds = perf_counter() - start
    hook.remove()
    return [list(out.generated_tokens) for out in found.values()], seconds, computed


def tokens_alone(model: Any, prompt: list[int], name: str | None, tokens: int) -> list[int]:
    """Return the tokens of a request by `generate`."""
    model.set_active_adapters(name)
    out = model.generate(torch.tensor([prompt]), generation_config=greedy(tokens))
    model.set_active_adapters(None)
    return [int(token) for token in out[0, len(prompt) :]]


def greedy(tokens: int) -> GenerationConfig:
    """Return the settings of all requests."""
    # no token ends a request
    ends = {"eos_token_id": -1, "pad_token_id": 0}
    return GenerationConfig(max_new_tokens=tokens, do_sample=False, use_cuda_graph=False, **ends)


def main(given: Sequence[str] | None = None) -> int:
    """Print a line for each family; return 1 if a token is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--family", choices=[*FAMILIES], action="append")
    options = parser.parse_args(given)
    transformers.logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    wrong = 0
    for family in options.family or FAMILIES:
        found = run(family, options.requests, options.adapters, options.tokens)
        wrong += options.requests - found.equal + found.across
        print(
            f"{family}: {found.equal} of {options.requests} equal, {found.hits} prefix hits within "
            f"an adapter, {found.across} across, together {found.together:.1f} s, adapter by "
            f"adapter {found.apart:.1f} s: {found.ratio:.2f} times as fast"
        )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
