"""One process of a model that transformers has split; `test_tensor_parallel.py` starts several.

Each process has the whole model too, as one process alone has it, and compares.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from families import tiny_config
from safetensors import safe_open
from snapshots import content
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PhiConfig, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig
from transformers.utils import logging

import adapterzoo
from adapterzoo import AdapterTrainer, AutoAdapterModel, Average, Parallel, Split, Stack
from adapterzoo.config import AdapterConfig, config_strings
from adapterzoo.errors import ConfigError, StateError
from adapterzoo.tensor_parallel import write

LAYERS = {
    # path below a block → the side that its plan splits
    "gpt_neox": {"query_key_value": "column", "dense": "row", "dense_h_to_4h": "column",
                 "dense_4h_to_h": "row"},
}  # fmt: skip
# the norms of the others round to float32, of which the last bit may differ
EXACT = ("gpt_neox", "phi")
EVERYWHERE = "target_modules='all-linear'"
# all that the page names, at layers of both kinds, in one adapter
QUICK = (
    "lora[target_modules=['query_key_value','dense'],dropout=0.2]"
    "|dora[target_modules=['dense_h_to_4h','dense_4h_to_h']]|prefix_tuning|seq_bn"
)
SWEPT = (
    f"lora[{EVERYWHERE},dropout=0.2]", f"dora[{EVERYWHERE},dropout=0.3]", "double_seq_bn",
    "prefix_tuning", f"ia3[{EVERYWHERE},alpha=0.5]", "unipelt",
    f"lora[{EVERYWHERE},use_gating=True,lora_bias=True]",
    f"lora[{EVERYWHERE},init_weights='pissa']", f"lora[{EVERYWHERE},use_rslora=True]",
    "lora[trainable_token_indices=[3,8]]", "prefix_tuning[use_gating=True,dropout=0.2]",
)  # fmt: skip
IDS = torch.arange(3, 31).view(4, 7)


def config_of(family):
    if family == "phi":
        config = PhiConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, pad_token_id=0,
                           num_attention_heads=4, intermediate_size=64, bos_token_id=1,
                           eos_token_id=2, max_position_embeddings=64)  # fmt: skip
    else:
        config = tiny_config(family)
        config.num_key_value_heads = 4
    config.tie_word_embeddings = family == "qwen3"
    return config


def model_of(folder, is_split, **options):
    if is_split:
        options["distributed_config"] = DistributedConfig(tp_size=dist.get_world_size())
    return AutoAdapterModel.from_pretrained(folder, dtype=torch.float64, **options)


def add(model, name, method):
    """Values that differ from the first ones in all tensors, and are equal in all processes."""
    # the first process decides; others draw other values
    torch.manual_seed(1 + (dist.get_rank() if is_split(model) else 0))
    model.add_adapter(name, method)
    source = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _, module in model.adapter_modules(name):
            for p in module.parameters():
                noise = torch.randn(p.shape, generator=source, dtype=p.dtype)
                write(p, whole(p.detach()) + 0.05 * noise)


def is_split(model):
    return any(isinstance(p, DTensor) for p in model.parameters())


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check(holds, what):
    if not holds:
        raise RuntimeError(what)


def close(split, alone, atol, what):
    torch.testing.assert_close(split, alone, rtol=0, atol=atol, msg=lambda m: f"{what}: {m}")


def refused(error_class, call, *says):
    try:
        call()
    except error_class as error:
        check(all(part in str(error) for part in says), str(error))
    else:
        raise RuntimeError(f"not refused: {says}")


def logits_of(model, **inputs):
    model.eval()
    with torch.no_grad():
        return model(input_ids=IDS, **inputs).logits


def trained(model):
    """Some steps in training mode: logits, gradients, values after them, and a merged forward."""
    model.train_adapter("a")
    own = {key: p for key, p in model.named_parameters() if p.requires_grad}
    # Adam would make large differences of small ones
    optimizer = torch.optim.SGD(own.values(), lr=0.5)
    found = {}
    torch.manual_seed(3)
    for step in range(2):
        optimizer.zero_grad()
        output = model(input_ids=IDS, labels=IDS)
        output.loss.backward()
        found[f"logits {step}"] = output.logits.detach()
        found |= {f"gradient {step} of {key}": whole(p.grad).clone() for key, p in own.items()}
        optimizer.step()
    found |= {f"value of {key}": whole(p.detach()) for key, p in own.items()}
    found["evaluated"] = logits_of(model)
    return found


def merged(model):
    try:
        model.merge_adapter("a")
    except StateError:
        return {}
    found = {"merged": logits_of(model)}
    model.reset_adapter()
    return found | {"reset": logits_of(model)}


def equals_one_process(family, method, folder, out):
    atol = 1e-12 if family in EXACT else 1e-5
    found = []
    for split in (False, True):
        model = model_of(folder, split)
        before = logits_of(model)
        classes = {path: (type(m), "forward" in vars(m)) for path, m in model.named_modules()}
        add(model, "a", method)
        check(not split or is_split(model), "not split")
        rows = model.adapter_summary(as_dict=True)
        print_of = model.adapter_fingerprint("a")
        to = out / ("split" if split else f"alone_{dist.get_rank()}")
        model.save_adapter(to, "a")
        values = trained(model)
        model.verify_replicas()
        values |= merged(model)
        model.delete_adapter("a")
        left = {path: (type(m), "forward" in vars(m)) for path, m in model.named_modules()}
        check(left == classes, "an adapter was there, and it shows")
        check(torch.equal(logits_of(model), before), "the model differs from before")
        model.load_adapter(to, load_as="b")
        check(model.adapter_fingerprint("b") == print_of, "other values when loaded")
        found.append((values, rows, print_of))
    (alone, *facts), (split, *others) = found
    check(facts == others, (facts, others))
    check(list(alone) == list(split), "other parameters are trained")
    for key, value in alone.items():
        close(split[key], value, atol, f"{family} {method} {key}")
    dist.barrier()
    names = sorted(path.name for path in (out / "split").iterdir())
    check(names == sorted(path.name for path in (out / "alone_0").iterdir()), names)
    for name in names:
        one, other = (out / which / name for which in ("split", "alone_0"))
        check(content(one) == content(other), f"other content in {one}")
    dist.barrier()


def what_cannot_be_split_is_refused(folder):
    model = model_of(folder, True)
    add(model, "a", "lora")
    state, classes = dict(model.state_dict()), [type(m) for m in model.modules()]
    for method, name in (("dora[convention='adapterhub']", "DoRAConfig at"),
                         ("lora[bias='all']", "BiasConfig at")):  # fmt: skip
        refused(ConfigError, lambda m=method: model.add_adapter("c", m), name, "splits the output")
    refused(ConfigError, lambda: model.add_adapter("c", "boft"),
            "BOFTConfig at 'layers.0.attention.query_key_value': tensor parallelism splits the "
            "output features of the layer", "Write LoRAConfig(), or")  # fmt: skip
    refused(ConfigError, lambda: model.add_adapter("c", "oft[target_modules=['dense_4h_to_h']]"),
            "splits the input features")  # fmt: skip
    refused(StateError, lambda: model.convert_adapter("a", rank=2), "by its tp_plan",
            "Load the model without tp_plan.")  # fmt: skip
    left = model.state_dict()
    check([type(m) for m in model.modules()] == classes, "a refused call changes classes")
    check(list(left) == list(state), "a refused call changes the parameters")
    check(all(torch.equal(whole(left[k]), whole(t)) for k, t in state.items()), "other values")


def cells(folder):
    """For each method, what a split model makes of it: the table of docs/distributed.md."""
    seen = []
    for name in config_strings:
        if name == "union":
            continue
        text = "miss[r=16]" if name == "miss" else name
        config = AdapterConfig.load(text)
        if config in seen:
            continue
        seen.append(config)
        outcomes = dict.fromkeys(("column", "row", "elsewhere"), "–")
        model = model_of(folder, False)
        sites = [p.site for each in config.members for p in each.placements(model.anatomy)]
        if {site.kind for site in sites} == {"linear"}:
            for side, layer in (("column", "query_key_value"), ("row", "dense_4h_to_h")):
                own = config.replace(target_modules=(layer,))
                outcomes[side] = outcome(folder, own)
        else:
            told = outcome(folder, config)
            for site in sites:
                side = LAYERS["gpt_neox"].get(site.path.rpartition(".")[2], "elsewhere")
                outcomes[side] = told
        yield " | ".join((name, *outcomes.values()))


def outcome(folder, config):
    found = []
    for split in (False, True):
        model = model_of(folder, split)
        try:
            add(model, "a", config)
        except ConfigError as error:
            check(split, str(error))
            check(type(config).__name__ in str(error) and "tensor parallelism" in str(error), error)
            return "refused"
        found.append(trained(model))
        model.verify_replicas()
    alone, split = found
    for key, value in alone.items():
        close(split[key], value, 1e-12, f"{config} {key}")
    return "equal"


def compositions_act_as_in_one_process(folder):
    def made(split):
        model = model_of(folder, split)
        for name, method in zip("abdpsi", (
            f"lora[{EVERYWHERE}]", f"lora[{EVERYWHERE}]", f"dora[{EVERYWHERE}]", "prefix_tuning",
            "double_seq_bn", "ia3",
        ), strict=True):  # fmt: skip
            add(model, name, method)
        return model

    alone, split = made(False), made(True)
    setups = (Stack("p", "a", "d", "i", "s"), Average("a", "b", weights=[0.3, 0.7]),
              Parallel("p", "a"), Split("a", "d", splits=[3, 4]))  # fmt: skip
    for setup in setups:
        for model in (alone, split):
            model.set_active_adapters(setup)
        close(logits_of(split), logits_of(alone), 1e-12, repr(setup))
    for strategy, options in (("linear", {}), ("cat", {}), ("svd", {"svd_rank": 4})):
        for model in (alone, split):
            model.average_adapter("c", ["a", "b"], [0.3, 0.7], combine_strategy=strategy,
                                  overwrite_ok=True, set_active=True, **options)  # fmt: skip
        close(logits_of(split), logits_of(alone), 1e-12, strategy)
    rows = ["a", "d", None, "p"]
    for model in (alone, split):
        model.set_active_adapters(None)
    one, other = (logits_of(model, adapter_names=rows) for model in (split, alone))
    close(one, other, 1e-12, "rows")
    for model in (alone, split):
        model.set_active_adapters(Stack("p", "a", "s"))
    one, other = (m.generate(IDS, max_new_tokens=4, do_sample=False) for m in (split, alone))
    check(torch.equal(one, other), "other tokens are generated")


def keys_of(folder):
    """The names of the tensors in the file of a whole model."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


def files_are_those_of_one_process(family, folder, out):
    """PEFT's format, whole models, models that load split, static heads, tied output layers."""
    atol = 1e-12 if family in EXACT else 1e-5
    method = f"dora[{EVERYWHERE}]" if family != "qwen3" else "lora[trainable_token_indices=[3,8]]"
    alone, split = model_of(folder, False), model_of(folder, True)
    for model in (alone, split):
        add(model, "a", method)
        model.set_active_adapters("a")
    expected = logits_of(alone)
    split.save_adapter(out / "peft", "a", format="peft")
    split.save_pretrained(out / "model")
    if dist.get_rank() == 0:
        alone.save_adapter(out / "alone", "a", format="peft")
        for path in (out / "alone").iterdir():
            check(path.read_bytes() == (out / "peft" / path.name).read_bytes(), path.name)
        alone.save_pretrained(out / "alone_model")
        names, expected_names = keys_of(out / "model"), keys_of(out / "alone_model")
        check(names == expected_names, f"tensors of one file: {names ^ expected_names}")
    dist.barrier()
    close(logits_of(model_of(out / "model", False)), expected, atol, "saved split")
    model = model_of(out / "model", True)
    kinds = {key: type(p) for key, p in model.named_parameters()}
    check(kinds == {key: type(p) for key, p in split.named_parameters()}, kinds)
    check(model.adapter_fingerprint("a") == alone.adapter_fingerprint("a"), "other values")
    close(logits_of(model), expected, atol, "loaded split")
    options = {"dtype": torch.float64,
               "distributed_config": DistributedConfig(tp_size=dist.get_world_size())}  # fmt: skip
    plain = AutoModelForCausalLM.from_pretrained(folder, **options)
    plain.save_pretrained(out / "plain")
    if family == "qwen3":
        # else transformers_saves_ties_once of hosts.py is no longer needed
        check({"lm_head.weight", "model.embed_tokens.weight"} <= keys_of(out / "plain"), "once")
    static = adapterzoo.init(plain)
    load = partial(static.load_adapter, out / "peft", load_as="a", set_active=True)
    if family != "qwen3":
        # its output layer is not tied: the file has it
        refused(StateError, load, "a tp_plan has split 'lm_head'", "with_head=False")
    load(with_head=False)
    close(logits_of(static), expected, atol, "init")
    model = model_of(out / "plain", True)
    model.load_adapter(out / "peft", load_as="a", set_active=True, with_head=False)
    close(logits_of(model), expected, atol, "base saved split")


def what_the_page_shows(folder):
    """Runs its block, and clips the gradients as it says."""
    text = (Path(__file__).parents[1] / "docs" / "distributed.md").read_text()
    (block,) = re.findall(r"```py\n(.*?)```", text, re.DOTALL)
    names = {"path": folder, "AutoAdapterModel": AutoAdapterModel}
    exec(block, names)
    model = names["model"]
    model(input_ids=IDS, labels=IDS).loss.backward()
    own = [p for p in model.parameters() if p.requires_grad]
    check(all(isinstance(p, DTensor) for p in own), "parameters of split layers are DTensors")
    norm = torch.nn.utils.clip_grad_norm_(own, 1e-3)
    parts = torch.stack([whole(p.grad).norm() for p in own])
    close(parts.norm(), torch.tensor(1e-3, dtype=parts.dtype), 1e-6, f"clipped {norm}")
    # when torch can do it, the page need not say how
    plain = torch.nn.Parameter(torch.ones(2))
    plain.grad = torch.ones(2)
    refused(RuntimeError, lambda: torch.nn.utils.clip_grad_norm_([*own, plain], 1.0), "mixed")


def train(folder, out, split):
    """Train by the trainers, and save the adapter beside the checkpoints of each."""
    source = torch.Generator().manual_seed(0)
    rows = [{"input_ids": r, "labels": r} for r in torch.randint(3, 99, (32, 7), generator=source)]
    for trainer_class in (Trainer, AdapterTrainer):
        name = trainer_class.__name__
        model = model_of(folder, split)
        add(model, "a", f"lora[{EVERYWHERE},dropout=0.1]")
        model.train_adapter("a")
        args = TrainingArguments(
            output_dir=str(out / name), max_steps=4, per_device_train_batch_size=4,
            learning_rate=1e-2, max_grad_norm=0.5, lr_scheduler_type="constant", use_cpu=True,
            dataloader_pin_memory=False, save_steps=2, save_only_model=True, report_to="none",
            disable_tqdm=True,
        )  # fmt: skip
        if split:
            check(args.world_size == dist.get_world_size(), "one process")
            # accelerate knows no tensor parallelism on a CPU
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        trainer_class(model, args, train_dataset=rows).train()
        if split:
            model.verify_replicas()
        model.save_adapter(out / name / "adapter", "a")


def main(rank, world, rendezvous, folder, cases):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    for case in cases:
        what, _, family = case.partition("-")
        base, out = folder / family, folder / case
        if rank == 0 and not base.exists():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config_of(family)).double()
            with torch.no_grad():
                for p in model.parameters():
                    # biases too
                    p += 0.05 * torch.randn_like(p)
            model.save_pretrained(base)
        dist.barrier()
        if what in ("quick", "swept"):
            methods = (QUICK,) if what == "quick" else SWEPT
            for i, method in enumerate(methods):
                equals_one_process(family, method, base, out / str(i))
        elif what == "page":
            what_the_page_shows(base)
        elif what == "refused":
            what_cannot_be_split_is_refused(base)
        elif what == "cells":
            for line in cells(base):
                print(line, flush=True)  # noqa: T201  the test reads it
        elif what == "compositions":
            compositions_act_as_in_one_process(base)
        elif what == "files":
            files_are_those_of_one_process(family, base, out)
        elif what == "trainers":
            train(base, out, True)
        print(case, flush=True)  # noqa: T201
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), sys.argv[5:])
