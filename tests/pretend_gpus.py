"""Two pretend GPUs on a CPU: run a model's DataParallel replicas, each on its own device.

A script, run in a process of its own because it gives torch a new device type. It prints one JSON
object, case to error, "" for a case that passes. Tensors are FakeTensors: they hold no data, but
every operation checks that its operands are on one device, as a real GPU would.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from unittest import mock

import torch
from architectures.small import SMALL
from families import tiny_config
from torch import nn
from torch._subclasses import FakeTensorMode

from adapterzoo import AdapterSetup, AutoAdapterModel
from adapterzoo.config import config_strings
from adapterzoo.heads import StaticConfig

replicate_module = importlib.import_module("torch.nn.parallel.replicate")
DEVICES = ("pretend:0", "pretend:1")

# the truncated normal of its own initialisation looks at the numbers that it draws
DRAWN = {**SMALL, "adapter_plus": "adapter_plus[init_weights='bert']"}
METHODS = {
    **{name: DRAWN.get(name, name) for name in config_strings if name != "union"},
    "lora with everything": "lora[dropout=0.1,lora_bias=True,use_gating=True,use_rslora=True]",
    "gated bottleneck": "seq_bn[use_gating=True,scaling='learned',ln_before=True,dropout=0.1]",
    "union": "lora|par_bn",
    "shifted prefix": "prefix_tuning_flat[prefix_length=3,positions='shifted']",
}
HEADS = {
    "classification": lambda m: m.add_classification_head("h", num_labels=3),
    "mean": lambda m: m.add_classification_head("h", num_labels=3, pooling="mean"),
    "multilabel": lambda m: m.add_classification_head("h", num_labels=3, multilabel=True),
    "tagging": lambda m: m.add_tagging_head("h", num_labels=3),
    "question answering": lambda m: m.add_qa_head("h"),
    "masked lm": lambda m: m.add_masked_lm_head("h"),
    "causal lm": lambda m: m.add_causal_lm_head("h"),
    "static": lambda m: m.add_prediction_head_from_config(
        "h", StaticConfig(model_class="BertForPreTraining")
    ),
}


def move(module, fn):
    """What `Module._apply` does, without swapping tensors in place, which FakeTensors forbid."""
    for child in module.children():
        move(child, fn)
    for key, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[key] = nn.Parameter(fn(parameter.detach()), parameter.requires_grad)
    for key, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[key] = fn(buffer)
    return module


def broadcast(tensors, devices, detach=False):
    sources = [t.detach() if detach else t for t in tensors]
    return [[t.to(f"pretend:{d}") for t in sources] for d in devices]


@contextlib.contextmanager
def pretend_gpus():
    # the guard of the device type counts one device, so autograd runs on this thread only
    with (
        mock.patch.object(nn.Module, "_apply", lambda m, fn, recurse=True: move(m, fn)),
        mock.patch.object(replicate_module, "_broadcast_coalesced_reshape", broadcast),
        mock.patch.object(
            replicate_module, "_get_device_index", lambda d, *_: torch.device(d).index
        ),
        FakeTensorMode(allow_non_fake_inputs=False),
        torch.autograd.set_multithreading_enabled(False),
    ):
        yield


def build(method, head="tagging", family="bert"):
    config = tiny_config(family)
    config._attn_implementation = "eager"
    model = AutoAdapterModel.from_config(config)
    model.add_adapter("a", method)
    model.add_adapter("b", method)
    HEADS[head](model)
    model.train_adapter("a")
    return model


def run(model, setup=None):
    """Forward and backward of both replicas; whatever is on the wrong device raises."""
    model.to(DEVICES[0])
    tensors = [*model.named_parameters(), *model.named_buffers()]
    stray = [name for name, tensor in tensors if str(tensor.device) != DEVICES[0]]
    if stray:
        raise RuntimeError(f"did not move: {stray[:3]}")
    context = AdapterSetup(setup) if setup is not None else contextlib.nullcontext()
    with context:
        replicas = replicate_module.replicate(model, list(DEVICES))
    trained = [p for p in model.parameters() if p.requires_grad]
    for device, replica in zip(DEVICES, replicas, strict=True):
        ids = torch.ones(2, 7, dtype=torch.long, device=device)
        # decoders: transformers makes masks and caches in ways that know no pretend device
        causal = torch.zeros(2, 1, 7, 7, device=device)
        decoder = {"attention_mask": causal, "use_cache": False}
        out = replica(input_ids=ids, **({} if model.config.model_type == "bert" else decoder))
        scores = [v for k, v in out.items() if "logits" in k]
        if any(str(s.device) != device for s in scores):
            raise RuntimeError(f"the output of the replica on {device} is elsewhere")
        sum(s.float().sum() for s in scores).backward()
    if setup is None:
        missing = [p.shape for p in trained if p.grad is None or p.grad.device != p.device]
        if missing:
            raise RuntimeError(f"no gradient came back to {len(missing)} parameters")


class Words:
    """As much of a tokenizer as `add_embeddings` asks for."""

    pad_token_id = 0

    def __len__(self):
        return 40

    def get_vocab(self):
        return {f"word{n}": n for n in range(40)}


def other_embeddings(method, head, family):
    """Train embeddings that are not the model's own, with a head that is tied to them."""
    model = build(method, head, family)
    model.add_embeddings("other", Words(), "default", Words())
    model.train_adapter("a", train_embeddings=True)
    return model


def planted_attribute(model):
    """A tensor in a plain attribute: it stays where it was when the model moves."""
    _, module = next(model.adapter_modules("a"))
    kept = torch.ones(1)
    forward = type(module).forward
    cls = type("Planted", (type(module),), {"forward": lambda s, x, b: forward(s, x, b) * s.kept})
    module.__class__ = cls
    module.kept = kept
    return model


def planted_shared(model):
    """A container that all replicas share, filled by the first one to run."""
    _, module = next(model.adapter_modules("a"))
    forward = type(module).forward

    def remembering(self, x, base):
        self.cache.setdefault("one", x.new_ones(1))
        return forward(self, x, base) * self.cache["one"]

    module.__class__ = type("Planted", (type(module),), {"forward": remembering})
    module.cache = {}
    return model


def cases():
    for name, config in METHODS.items():
        # a prompt lengthens masks of two dimensions, and those of decoders have four here
        for family in ("bert",) if name == "prompt_tuning" else ("bert", "gpt2", "llama"):
            yield f"{name} on {family}", lambda c=config, f=family: run(build(c, family=f))
    for head in HEADS:
        yield f"head: {head}", lambda h=head: run(build("lora", h))
    # what acts on the embeddings acts inversely in front of the logits
    yield "exit on bert", lambda: run(build("seq_bn_inv", "masked lm"), ["a", "b"])
    yield "exit on llama", lambda: run(build("seq_bn_inv", "causal lm", "llama"))
    yield "embeddings of bert", lambda: run(other_embeddings("lora", "masked lm", "bert"))
    yield "embeddings of gpt2", lambda: run(other_embeddings("lora", "causal lm", "gpt2"))
    yield "stack", lambda: run(build("lora"), ["a", "b"])
    yield "setup of the thread", lambda: run(build("seq_bn"), "b")
    yield "planted attribute", lambda: run(planted_attribute(build("lora")))
    yield "planted shared container", lambda: run(planted_shared(build("lora")))


def main():
    torch.utils.backend_registration._setup_privateuseone_for_python_backend(rename="pretend")
    torch.pretend.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    errors = {}
    for name, case in cases():
        errors[name] = ""
        try:
            with pretend_gpus():
                case()
        except Exception as error:  # noqa: BLE001  every failure is a line of the report
            errors[name] = f"{type(error).__name__}: {error}"[:300]
    json.dump(errors, sys.stdout)


if __name__ == "__main__":
    main()


def replicas_on_cpu(model: nn.Module) -> list[nn.Module]:
    """Two replicas as DataParallel makes them, with numbers of their own on the CPU."""
    with mock.patch.multiple(
        replicate_module,
        _broadcast_coalesced_reshape=lambda tensors, devices, detach=False: [
            [(t.detach() if detach else t).clone() for t in tensors] for _ in devices
        ],
        _get_device_index=lambda device, *_: device,
    ):
        return replicate_module.replicate(model, [0, 1])
