"""The containers of a layer: their names are those of `adapters`; callers see them as one."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import pytest
import torch
from families import tiny_config, tiny_inputs
from safetensors.torch import load_file
from snapshots import output, same_bits, stir
from test_inject import Times, X, active, layer, state_of
from torch import Tensor, nn
from transformers import BertModel

from adapterzoo import AutoAdapterModel, DoubleSeqBnConfig, Fuse, LoRAConfig, Stack, init, inject
from adapterzoo.errors import DuplicateNameError, StateError
from adapterzoo.inject.adapted import Adapted, adapters_of
from adapterzoo.runtime import ActiveState, Default

HERE = Path(__file__).resolve().parent / "data" / "golden_adapterhub"
SHARED = Path(__file__).resolve().parents[2] / "shared" / "golden" / "adapterhub"
GOLDEN = [
    pytest.param(file.parent, id=f"{place.name}-{file.parent.parent.name}-{file.parent.name}")
    for place in (HERE, SHARED)
    for file in sorted(place.glob("*/*/adapter_config.json"))
    if file.parent.parent.name in ("bert", "t5")
]


def containers(keys, name):
    """What precedes the name in keys."""
    return {m[1] for key in keys if (m := re.search(rf"(\w+)\.{name}\.", key))}


def tensors_of(folder: Path) -> dict[str, Tensor]:
    files = [*folder.glob("adapter.safetensors"), *folder.glob("pytorch_adapter.bin")]
    read = load_file if files[0].suffix == ".safetensors" else torch.load
    return read(files[0])


# NoReFT and DiReFT are written alike
@pytest.mark.filterwarnings("ignore:adapter_config.json fits NoReFT")
@pytest.mark.parametrize("folder", GOLDEN)
def test_parameters_are_in_the_containers_of_adapters(folder):
    model = AutoAdapterModel.from_pretrained(folder.parent / "base")
    model.load_adapter(folder, with_head=False)
    theirs = containers(tensors_of(folder), "golden")
    assert containers(model.state_dict(), "golden") == theirs


class Scales(Times):
    container = "scales"


def both() -> tuple[nn.Module, ActiveState]:
    """A layer with adapters of two methods."""
    plain, selection = layer(), active("a", "b")
    inject.put(plain, "a", Times(2.0), selection, "at")
    inject.put(plain, "b", Scales(3.0), selection, "at")
    return plain, selection


def test_adapters_of_two_containers_act_together():
    plain, _ = both()
    keys = {"adapters.a.factor", "scales.b.factor"}
    assert keys == {k for k in plain.state_dict() if "factor" in k}
    assert torch.equal(plain(X), 6.0 * layer()(X))
    assert list(adapters_of(plain)) == ["a", "b"]
    for copied in (copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        with torch.no_grad():
            copied.scales["b"].factor.fill_(5.0)
        assert torch.equal(copied(X), 10.0 * layer()(X))
    assert torch.equal(plain(X), 6.0 * layer()(X))


def test_a_replica_uses_its_own_containers():
    plain, _ = both()
    replica = plain._replicate_for_data_parallel()
    for name, child in plain._modules.items():
        made = child._replicate_for_data_parallel()
        for key, adapter in child._modules.items():
            own = made._modules[key] = adapter._replicate_for_data_parallel()
            own.factor = 10 * adapter.factor.detach()
        replica._modules[name] = made
    replica.weight, replica.bias = plain.weight.detach(), plain.bias.detach()
    torch.testing.assert_close(replica(X), 600.0 * layer()(X))


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_the_last_of_two_containers_restores_the_layer(order):
    before, (plain, selection) = state_of(layer()), both()
    first = inject.take(plain, order[0])
    selection.default.plan = active(order[1]).default.plan
    factor = {"a": 2.0, "b": 3.0}[order[1]]
    assert torch.equal(plain(X), factor * layer()(X))
    assert [first.container] != plain._link.containers
    inject.take(plain, order[1])
    assert state_of(plain) == before


def test_a_name_is_taken_in_all_containers():
    plain, selection = both()
    with pytest.raises(DuplicateNameError, match="'at' already has an adapter 'a'"):
        inject.put(plain, "a", Scales(1.0), selection, "at")
    assert list(adapters_of(plain)) == ["a", "b"]


@pytest.mark.parametrize("own", ["scales", "adapters"])
def test_only_the_container_must_be_free(own):
    plain = layer()
    vars(plain)[own] = "mine"
    if own == "scales":
        with pytest.raises(StateError, match="has an attribute 'scales'"):
            inject.put(plain, "a", Scales(1.0), ActiveState(Default()), "at")
        assert type(plain) is nn.Linear
    else:
        inject.put(plain, "a", Scales(2.0), active("a"), "at")
        assert torch.equal(plain(X), 2.0 * layer()(X))
        assert plain.adapters == "mine"


def test_nothing_has_changed_if_the_base_model_has_the_name_of_what_layers_share():
    model = AutoAdapterModel.from_config(tiny_config("bert"))
    container = "shared_parameters"
    setattr(model.base_model, container, "mine")
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(StateError, match=f"has an attribute '{container}'"):
        model.add_adapter("a", "vera")
    assert before.keys() == model.state_dict().keys()
    assert not model.adapters_config
    assert not any(isinstance(module, Adapted) for module in model.modules())


def test_methods_at_one_layer_of_a_model(tmp_path):
    """Bottlenecks, their fusion and LoRA share a layer, and the names of parameters say which."""
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config("bert")).eval()
    for name in "ab":
        model.add_adapter(name, DoubleSeqBnConfig())
        stir(model, name)
    model.add_adapter("l", LoRAConfig(output_lora=True))
    stir(model, "l")
    model.add_adapter_fusion(["a", "b"])
    dense = model.base_model.encoder.layer[0].output.dense
    held = {name for name, child in dense._modules.items() if isinstance(child, nn.ModuleDict)}
    assert held == {"adapters", "loras", "adapter_fusion_layer"}
    assert list(dense.adapter_fusion_layer) == ["a,b"]
    model.set_active_adapters(Stack("l", Fuse("a", "b")))
    found = output(model)
    model.save_pretrained(tmp_path)
    again = AutoAdapterModel.from_pretrained(tmp_path).eval()
    assert same_bits(output(again), found)
    keys = list(model.state_dict())
    assert list(again.state_dict()) == keys
    model.delete_adapter_fusion("a,b")
    for name in "abl":
        model.delete_adapter(name)
    assert not isinstance(dense, Adapted)


def test_paths_of_parameters_lead_to_them():
    """Also through the property `invertible_adapters` of a model that is its own base model."""
    model = init(BertModel(tiny_config("bert")))
    model.add_adapter("a", "seq_bn_inv")
    model.add_adapter("b", "prefix_tuning|compacter")
    for name, parameter in model.named_parameters():
        assert model.get_parameter(name) is parameter
    assert list(model.invertible_adapters) == ["a"]
    assert model.invertible_adapters["a"] is model._modules["invertible_adapters"]["a"]
    model.set_active_adapters("a")
    assert model(**tiny_inputs("bert"))[0].isfinite().all()
