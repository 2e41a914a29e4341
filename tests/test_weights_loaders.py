"""`custom_weights_loaders`: weights of other modules beside an adapter."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import adapterzoo
from adapterzoo.errors import AdapterZooError, CheckpointError
from adapterzoo.loading import WeightsLoader


class PoolerLoader(WeightsLoader):
    """The dense layer of BERT's pooler, which the name does not choose."""

    def __init__(self, model):
        super().__init__(model, "pooler.bin", "pooler_config.json")

    def filter_func(self, name):
        return lambda key: ".pooler." in key

    def rename_func(self, old_name, new_name):
        return str


def with_pooler(tiny, value):
    model = tiny("bert")
    model.add_adapter("a", "seq_bn[reduction_factor=8]")
    model.add_tagging_head("a", num_labels=2)
    model.add_adapter("b", "seq_bn[reduction_factor=8]")
    pooler = model.base_model.pooler.dense
    pooler.weight.data.fill_(value)
    pooler.bias.data.fill_(value)
    return model, pooler


def test_weights_beside_an_adapter(tmp_path, tiny):
    model, _ = with_pooler(tiny, 0.25)
    saved = [PoolerLoader(model)]
    model.add_adapter_fusion(["a", "b"])
    setup = adapterzoo.Stack("a", "b")
    model.save_adapter(tmp_path / "one", "a", custom_weights_loaders=saved)
    model.save_all_adapters(tmp_path / "all", custom_weights_loaders=saved)
    model.save_adapter_fusion(tmp_path / "fusion", ["a", "b"], custom_weights_loaders=saved)
    model.save_adapter_setup(tmp_path / "setup", setup, custom_weights_loaders=saved)
    for load in (
        lambda m, loaders: m.load_adapter(
            tmp_path / "one", overwrite_ok=True, custom_weights_loaders=loaders
        ),
        lambda m, loaders: m.load_adapter(
            tmp_path / "all" / "b", overwrite_ok=True, custom_weights_loaders=loaders
        ),
        lambda m, loaders: m.load_adapter(
            tmp_path / "one", load_as="c", custom_weights_loaders=loaders
        ),
        lambda m, loaders: m.load_adapter_fusion(
            tmp_path / "fusion", custom_weights_loaders=loaders
        ),
    ):
        other, pooler = with_pooler(tiny, 1.0)
        load(other, [PoolerLoader(other)])
        assert pooler.weight.eq(0.25).all()
        assert pooler.bias.eq(0.25).all()
    bare = tiny("bert")
    bare.load_adapter_setup(tmp_path / "setup", custom_weights_loaders=[PoolerLoader(bare)])
    assert bare.base_model.pooler.dense.weight.eq(0.25).all()


def test_weights_that_do_not_fit_change_nothing(tmp_path, tiny):
    model, pooler = with_pooler(tiny, 0.25)
    loader = PoolerLoader(model)
    loader.save(tmp_path, "a")
    saved = load_file(tmp_path / "pooler.safetensors")
    weight = next(key for key in saved if key.endswith("weight"))
    save_file({weight: saved[weight]}, tmp_path / "pooler.safetensors")
    pooler.weight.data.fill_(1.0)
    with pytest.raises(CheckpointError, match=r"pooler\.dense\.bias +in the model only"):
        loader.load(tmp_path)
    assert pooler.weight.eq(1.0).all()
    # as the loader of `adapters` writes them
    (tmp_path / "pooler.safetensors").unlink()
    torch.save(saved, tmp_path / "pooler.bin")
    assert loader.load(tmp_path, load_as="b") == (str(tmp_path), "b")
    assert pooler.weight.eq(0.25).all()


@pytest.mark.parametrize("wrong", [object(), PoolerLoader], ids=["object", "class"])
def test_what_is_not_a_loader_is_refused_before_anything_is_saved(tmp_path, tiny, wrong):
    model, _ = with_pooler(tiny, 0.25)
    model.add_adapter_fusion(["a", "b"])
    for call in (
        lambda: model.save_adapter(tmp_path, "a", True, None, [wrong]),
        lambda: model.save_adapter_fusion(tmp_path, ["a", "b"], None, [wrong]),
        lambda: model.save_adapter_setup(tmp_path, "a", None, None, [wrong]),
        lambda: model.load_adapter(tmp_path, custom_weights_loaders=[wrong]),
    ):
        with pytest.raises(AdapterZooError, match=r"Write custom_weights_loaders=\[\w+\(model\)\]"):
            call()
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]
