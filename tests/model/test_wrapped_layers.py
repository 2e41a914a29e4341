"""Modules inside wrappers of torch: their adapters are those of the plain modules."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from families import tiny_config
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import LlamaForCausalLM

import adapterzoo
from adapterzoo import Fuse
from adapterzoo.errors import StateError

IDS = torch.tensor([[1, 5, 9, 4]])
BLOCK = "model.layers.0"


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


WRAPPERS = pytest.mark.parametrize("wrap", [compiled, checkpoint_wrapper])


def llama(wrap=None, path=BLOCK):
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config("llama")).double().eval()
    if wrap is not None:
        wrap_at(model, wrap, path)
    return adapterzoo.init(model)


def wrap_at(model, wrap, path):
    model.set_submodule(path, wrap(model.get_submodule(path)))


def filled(model, name, method):
    torch.manual_seed(0)
    model.add_adapter(name, method, set_active=True)
    for _, module in model.adapter_modules(name):
        for p in module.parameters():
            nn.init.normal_(p, std=0.3)
    return model.eval()


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@WRAPPERS
@pytest.mark.parametrize("path", [BLOCK, f"{BLOCK}.self_attn.q_proj", "model", "lm_head"])
@pytest.mark.parametrize("is_first", [True, False])
def test_what_is_wrapped_is_saved_loaded_added_to_and_deleted(tmp_path, wrap, path, is_first):
    method = "lora[r=2,modules_to_save=['lm_head']]"
    plain = filled(llama(), "a", method)
    right, without = logits(plain), logits(llama())
    plain.save_adapter(tmp_path / "plain", "a")
    model = filled(llama(wrap if is_first else None, path), "a", method)
    if not is_first:
        wrap_at(model, wrap, path)
    torch.testing.assert_close(logits(model), right)
    model.save_adapter(tmp_path / "wrapped", "a")
    assert files(tmp_path / "wrapped") == files(tmp_path / "plain")
    fresh = llama(wrap, path)
    fresh.load_adapter(tmp_path / "plain", load_as="b", set_active=True)
    torch.testing.assert_close(logits(fresh), right)
    model.add_adapter("c", "lora[r=2]")
    model.delete_adapter("c")
    torch.testing.assert_close(logits(model), right)
    model.delete_adapter("a")
    torch.testing.assert_close(logits(model), without)


@WRAPPERS
@pytest.mark.parametrize(
    "method",
    ["dora[r=2]", "seq_bn_inv[reduction_factor=4]", "loreft", "prefix_tuning", "prompt_tuning",
     "seq_bn[reduction_factor=4,phm_layer=True]"],
)  # fmt: skip
def test_methods_act_and_are_saved_as_without_the_wrapper(tmp_path, wrap, method):
    plain, model = filled(llama(), "a", method), filled(llama(), "a", method)
    for number in (0, 1):
        wrap_at(model, wrap, f"model.layers.{number}")
    torch.testing.assert_close(logits(model), logits(plain))
    for name, each in (("plain", plain), ("wrapped", model)):
        each.save_adapter(tmp_path / name, "a")
    assert files(tmp_path / "wrapped") == files(tmp_path / "plain")
    model.delete_adapter("a")
    torch.testing.assert_close(logits(model), logits(llama()))
    found, expected = filled(model, "b", method), filled(llama(), "b", method)
    torch.testing.assert_close(logits(found), logits(expected))


@WRAPPERS
def test_wrapped_layers_are_merged_and_reset(wrap):
    model = filled(llama(), "a", "lora[r=2]")
    right = logits(model)
    wrap_at(model, wrap, BLOCK)
    wrap_at(model, wrap, "model.layers.1.self_attn.v_proj")
    model.merge_adapter("a")
    torch.testing.assert_close(logits(model), right)
    model.reset_adapter()
    torch.testing.assert_close(logits(model), right)
    model.average_adapter("c", ["a"])
    model.set_active_adapters("c")
    torch.testing.assert_close(logits(model), right)


@WRAPPERS
def test_wrapped_layers_are_fused(wrap):
    def fused(model):
        for name in "ab":
            filled(model, name, "seq_bn[reduction_factor=4]")
        model.add_adapter_fusion(Fuse("a", "b"), set_active=True)
        return model.eval()

    model = llama(wrap)
    torch.testing.assert_close(logits(fused(model)), logits(fused(llama())))
    model.delete_adapter_fusion(Fuse("a", "b"))
    model.delete_adapter("a")
    assert model.active_adapters is None or "a" not in model.active_adapters.flatten()


@pytest.mark.filterwarnings("ignore")
def test_fsdp1_is_refused_by_name(tmp_path):
    """It keeps parameters in flat tensors, so that files would hold empty ones."""
    model = filled(llama(), "a", "lora[r=2]").float()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        wrap_at(model, partial(FullyShardedDataParallel, device_id=torch.device("cpu")), BLOCK)
        for call in (
            lambda: model.save_adapter(tmp_path / "a", "a"),
            lambda: model.add_adapter("b", "lora"),
            lambda: model.delete_adapter("a"),
        ):
            with pytest.raises(StateError, match=r"FullyShardedDataParallel wraps.*fully_shard"):
                call()
        assert not (tmp_path / "a").exists()
    finally:
        dist.destroy_process_group()
