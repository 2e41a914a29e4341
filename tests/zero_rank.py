"""One process of a run under ZeRO stage 3 on the CPU; `test_zero.py` starts two."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from families import tiny_config
from fsdp_rank import check, refused, same_files
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

import adapterzoo
from adapterzoo import AutoAdapterModel, LoRAConfig
from adapterzoo.errors import StateError

WORLD = 2
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    # clipped at 1.0 unless it is said
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
}


def named():
    """Named heads, two methods, and their fusion."""
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config("bert"))
    for name, method in {"a": "seq_bn", "b": "seq_bn[reduction_factor=8]"}.items():
        model.add_adapter(name, method)
        model.add_classification_head(name, num_labels=3)
    model.add_adapter_fusion(["a", "b"])
    model.train_adapter("a")
    return model


def static():
    """The head of a class, whose output layer the file names by its digest, and an own table."""
    torch.manual_seed(0)
    model = adapterzoo.init(LlamaForCausalLM(tiny_config("llama")))
    model.add_adapter("a", "dora")
    model.add_adapter("b", LoRAConfig(r=2, modules_to_save=["norm", "lm_head"]))
    model.train_adapter("a", train_embeddings=True)
    return model


def batch(model, rank=None):
    ids = torch.randint(3, 99, (4 * WORLD, 7), generator=torch.Generator().manual_seed(0))
    ids = ids if rank is None else ids[4 * rank : 4 * rank + 4]
    labels = ids if "ForCausalLM" in type(model).__name__ else ids[:, 0] % 3
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def save(model, folder, head):
    for name in ("a", "b"):
        model.save_adapter(folder / name, name)
        if head:
            model.save_head(folder / f"head of {name}", name)
    if head:
        model.save_adapter_fusion(folder / "fusion", "a,b")


def same(folder, other):
    for each in sorted(other.iterdir()):
        same_files(folder / each.name, each)


def trains_and_is_saved(build, rank, folder):
    import deepspeed

    alone, model, is_named = build(), build(), build is named
    before = {name: alone.adapter_fingerprint(name) for name in ("a", "b")}
    sizes = [row["#param"] for row in alone.adapter_summary(as_dict=True)]
    if rank == 0:
        save(alone, folder / "one before", is_named)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(trained, lr=0.5), config=CONFIG
    )
    check(all(p.ds_id >= 0 and p.numel() == 0 for p in trained), "not partitioned")
    check(before == {n: model.adapter_fingerprint(n) for n in ("a", "b")}, "other fingerprint")
    check(sizes == [row["#param"] for row in model.adapter_summary(as_dict=True)], "other sizes")
    model.verify_replicas()
    save(model, folder / "two before", is_named)
    dist.barrier()
    same(folder / "two before", folder / "one before")
    if rank == 0:
        # dropout draws other numbers in each process
        alone.eval()
        alone(**batch(alone)).loss.backward()
        with torch.no_grad():
            for p in alone.parameters():
                if p.requires_grad:
                    p.sub_(p.grad, alpha=0.5)
        save(alone, folder / "one after", is_named)
    engine.eval()
    engine.backward(engine(**batch(model, rank)).loss)
    engine.step()
    check(before["a"] != model.adapter_fingerprint("a"), "not trained")
    check(before["b"] == model.adapter_fingerprint("b"), "trained")
    save(model, folder / "two after", is_named)
    dist.barrier()
    for file in sorted((folder / "one after").glob("*/*.safetensors")):
        one, two = (load_file(folder / run / file.parent.name / file.name)
                    for run in ("one after", "two after"))  # fmt: skip
        check(one.keys() == two.keys(), f"other keys in {file}")
        for key, value in one.items():
            # the sum over two batches has another order
            torch.testing.assert_close(two[key], value, rtol=0, atol=1e-5)

    names = [*model.adapters_config]
    own = (
        [lambda: model.delete_adapter_fusion("a,b")]
        if is_named
        else [
            lambda: model.delete_adapter("b"),
            lambda: model.merge_adapter("a"),
            lambda: model.average_adapter("c", ["b", "b"]),
        ]
    )
    for call in (
        *own,
        lambda: model.add_adapter("c", "lora"),
        lambda: model.load_adapter(folder / "one after" / "a", load_as="c"),
        lambda: model.resize_token_embeddings(120),
        lambda: model.save_adapter(folder / "peft", "a", format="peft", with_head=False),
        lambda: model.get_adapter_state_dict("a"),
    ):
        refused(StateError, call, "sharded over 2 processes, and ZeRO handles")
    check([*model.adapters_config] == names, "not refused before a change")
    check(not (folder / "peft").exists(), "refused after a file was written")
    engine.eval()
    engine(**batch(model, rank))


def quantized_has_no_digest(rank, folder):
    """Frozen parameters as int8, where small weights are 0 and have no sign."""
    import deepspeed
    from deepspeed.runtime.zero import partition_parameters

    class OnCpu:
        """DeepSpeed's own quantizer is a CUDA kernel."""

        def quantize(self, tensor, groups=None):
            return tensor.to(torch.int8), torch.ones(1)

        def dequantize(self, tensor, scale, dtype=torch.float32):
            return tensor.to(dtype)

    partition_parameters.CUDAQuantizer = OnCpu
    model = named()
    zero = {**CONFIG["zero_optimization"], "zero_quantized_nontrainable_weights": True}
    trained = [p for p in model.parameters() if p.requires_grad]
    deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(trained, lr=0.5),
        config={**CONFIG, "zero_optimization": zero},
    )
    types = {p.ds_tensor.dtype for p in model.parameters() if not p.requires_grad}
    check(torch.int8 in types, "not quantized")
    model.save_adapter(folder / "quantized", "a")
    if rank == 0:
        said = [
            json.loads((folder / each / "adapter_config.json").read_text()).keys()
            for each in ("named/two before/a", "quantized")
        ]
        check(said[0] - said[1] == {"base_digest"}, "a digest of quantized parameters")


def main(rank, rendezvous, folder):
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD),
        "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    import deepspeed

    # would be compiled
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    for build in (named, static):
        trains_and_is_saved(build, rank, folder / build.__name__)
    quantized_has_no_digest(rank, folder)
    sys.stdout.write("done\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
