"""Compositions of adapters as AdapterHub's `adapters` 1.3.0 computed them, from its tensors.

The files lie beside the repository; the tests are skipped where they are not there.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from snapshots import refused

from adapterzoo import AutoAdapterModel, BatchSplit, Fuse, Parallel, Split, Stack
from adapterzoo.errors import CheckpointError, UnknownNameError

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden" / "composition"
FAMILIES = ("bert", "gpt2", "llama")
COMPOSITIONS = {
    "stack_a_b": Stack("a", "b"),
    "stack_a_la": Stack("a", "la"),
    "batchsplit_a_b": BatchSplit("a", "b", batch_sizes=[3, 1]),
    "batchsplit_la_lb": BatchSplit("la", "lb", batch_sizes=[1, 3]),
    "split_a_b": Split("a", "b", splits=[4, 7]),
    "parallel_a_b": Parallel("a", "b"),
    "fuse_a_b": Fuse("a", "b"),
    "stack_c_fuse_a_b": Stack("c", Fuse("a", "b")),
}


def golden_model(family):
    """The base model with all golden adapters and heads, in float64.

    How far the peer's float32 is from that is the same on every processor.
    """
    model = AutoAdapterModel.from_pretrained(GOLDEN / family / "base").eval()
    for name in ("a", "b", "c", "la", "lb"):
        with_head = (GOLDEN / family / name / "head_config.json").exists()
        model.load_adapter(GOLDEN / family / name, with_head=with_head)
    assert model.load_adapter_fusion(GOLDEN / family / "fusion") == "a,b"
    return model.double()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_the_golden_outputs(family, name):
    file = GOLDEN / family / "outputs" / f"{name}.safetensors"
    if not file.exists():
        pytest.skip("adapters 1.3.0 could not compute it, or there are no golden files")
    model = golden_model(family)
    expected = load_file(file)
    hidden, logits = expected.pop("hidden", None), expected.pop("logits", None)
    by_head = [expected.pop(f"logits_{head}", None) for head in ("a", "b")]
    model.set_active_adapters(COMPOSITIONS[name])
    with torch.no_grad():
        if hidden is not None:
            model.active_head = None
            close(model(**expected).last_hidden_state, hidden)
            close(model.base_model(**expected).last_hidden_state, hidden)
        elif logits is not None:
            close(model(**expected).logits, logits)
        else:
            outputs = model(**expected)
            for output, one in zip(outputs, by_head, strict=True):
                close(output.logits, one)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_golden_files_of_a_fusion_are_written_back(family, tmp_path):
    """From AdapterHub's format, by way of ours, to AdapterHub's."""
    golden = GOLDEN / family / "fusion"
    if not golden.exists():
        pytest.skip("there are no golden files")
    model = AutoAdapterModel.from_pretrained(GOLDEN / family / "base").eval()
    with pytest.raises(UnknownNameError, match=r"load_adapter_fusion.*the model lacks 'a', 'b'"):
        model.load_adapter_fusion(golden)
    for name in ("a", "b"):
        model.load_adapter(GOLDEN / family / name, with_head=False)
    assert model.load_adapter_fusion(golden, load_as="other") == "other"
    model.load_adapter_fusion(golden)
    model.save_adapter_fusion(tmp_path / "ours", "a,b")
    model.delete_adapter_fusion("a,b")
    model.load_adapter_fusion(tmp_path / "ours")
    written = tmp_path / "theirs"
    model.save_adapter_fusion(written, "a,b", meta_dict={"made": "here"}, format="adapterhub")
    assert {p.name for p in written.iterdir()} == {p.name for p in golden.iterdir()}
    theirs, ours = (
        json.loads((f / "adapter_fusion_config.json").read_text()) for f in (golden, written)
    )
    # where the base model lay
    del theirs["model_name"], ours["model_name"]
    assert ours == theirs | {"made": "here"}
    theirs, ours = (
        torch.load(f / "pytorch_model_adapter_fusion.bin", weights_only=True)
        for f in (golden, written)
    )
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert ours[key].dtype == tensor.dtype
        assert torch.equal(ours[key], tensor), key


def test_what_adapterhub_cannot_say_of_a_fusion_is_an_error_before_anything_is_written(
    tiny, tmp_path
):
    model = tiny("bert")
    for name in ("a", "b"):
        model.add_adapter(name, "seq_bn")
    model.add_adapter_fusion(["a", "b"], {"temperature": True}, name="hot")
    model.add_adapter_fusion(["a", "b"])
    out = tmp_path / "out"

    def save(name="a,b", **kwargs):
        model.save_adapter_fusion(out, name, **kwargs)

    with refused(model, CheckpointError, "save_adapter_fusion(", "PEFT has no fusions"):
        save(format="peft")
    with refused(model, UnknownNameError, "'adapter_hub'", "'adapterhub-safetensors', 'native'"):
        save(format="adapter_hub")
    with refused(model, CheckpointError, "'config', 'name'", "Rename these"):
        save(format="adapterhub", meta_dict={"name": 1, "config": 2, "fine": 3})
    for _, layer in model.fusion_modules("hot"):
        layer.steps.fill_(7)
    with refused(model, CheckpointError, "is at step 7", "format='native'"):
        save("hot", format="adapterhub")
    for family, method, words in (
        ("gpt_neox", "seq_bn", ("no names for models of type 'gpt_neox'", "format='native'")),
        ("albert", "double_seq_bn", ("site_convention='albert'", "format='native'")),
        ("gpt2", "par_bn", ("adds_input=True", "adds_input=False", "format='native'")),
    ):
        other = tiny(family)
        for name in ("a", "b"):
            other.add_adapter(name, method)
        other.add_adapter_fusion(["a", "b"])
        with refused(other, CheckpointError, *words):
            other.save_adapter_fusion(out, "a,b", format="adapterhub")
    assert not out.exists()
    model.save_adapter_fusion(tmp_path / "read", "a,b", format="adapterhub")
    # the last of them, with parallel bottlenecks
    other.delete_adapter_fusion("a,b")
    with refused(other, CheckpointError, "load_adapter_fusion(", "in the file only"):
        other.load_adapter_fusion(tmp_path / "read")
    for first, second in (("native", "adapterhub"), ("adapterhub", "native")):
        out = tmp_path / first
        save(format=first)
        save(format=second)
        found = {file.name for file in out.iterdir()}
        out = tmp_path / f"only {second}"
        save(format=second)
        assert {file.name for file in out.iterdir()} == found


def test_a_fusion_of_adapterhub_that_does_not_fit_is_refused(tmp_path):
    folder = GOLDEN / "bert" / "fusion"
    if not folder.exists():
        pytest.skip("there are no golden files")
    model = AutoAdapterModel.from_pretrained(GOLDEN / "bert" / "base").eval()
    for name in ("a", "b"):
        model.load_adapter(GOLDEN / "bert" / name, with_head=False)
    config, name = "adapter_fusion_config.json", "pytorch_model_adapter_fusion.bin"
    document = json.loads((folder / config).read_text())
    tensors = torch.load(folder / name, weights_only=True)
    lost = next(iter(tensors))
    wrong = {
        "there is no tensor": (document, {k: t for k, t in tensors.items() if k != lost},
                               "in the model only"),
        "a block too many": (document, {**tensors, lost.replace("layer.0", "layer.7"):
                                        tensors[lost]}, "layer.7"),
        "no adapters": ({**document, "adapter_names": []}, tensors, "not names"),
        "no config": ({**document, "config": None}, tensors, "no 'config' of a fusion"),
    }  # fmt: skip
    for texts, values, says in wrong.values():
        (tmp_path / config).write_text(json.dumps(texts))
        torch.save(values, tmp_path / name)
        with refused(model, CheckpointError, "load_adapter_fusion(", says):
            model.load_adapter_fusion(tmp_path)


def close(found, expected):
    torch.testing.assert_close(found, expected.double(), rtol=0, atol=1e-5)
