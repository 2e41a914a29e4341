"""AdapterDrop (Rücklé et al. 2021): blocks in which no adapter acts, when training and when not."""

from __future__ import annotations

import pytest
import torch
from families import first_output, tiny_config, tiny_inputs
from snapshots import stir
from transformers import AutoModel

from adapterzoo import AdapterSetup, AutoAdapterModel, BatchSplit, Fuse, Stack, init
from adapterzoo.errors import ConfigError

METHODS = {"lora": "lora", "dora": "dora", "boft": "boft", "bn": "double_seq_bn", "par": "par_bn"}


def with_adapters(family="bert", names=METHODS):
    torch.manual_seed(0)
    model = init(AutoModel.from_config(tiny_config(family)).double().eval())
    for i, name in enumerate(names):
        model.add_adapter(name, METHODS[name])
        stir(model, name, seed=i, std=0.3)
    return model


def hidden(model, family="bert", **kwargs):
    """Of each block, and before the first."""
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in tiny_inputs(family).items()}
    with torch.no_grad():
        return model(**inputs, output_hidden_states=True, **kwargs).hidden_states


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_a_skipped_block_is_the_base_models(family, name):
    """Bit for bit up to the first block that is not skipped; from there on it acts."""
    model = with_adapters(family, [name])
    plain = hidden(model, family)
    model.set_active_adapters(name, skip_layers=[0])
    found = hidden(model, family)
    assert torch.equal(found[0], plain[0])
    assert torch.equal(found[1], plain[1])
    assert not torch.equal(found[2], plain[2])
    if name in ("lora", "bn", "par"):
        # the block behind acts as if that one's adapter added zeros
        for module in model.get_adapter(name)[0].values():
            for parameter in module.parameters():
                torch.nn.init.zeros_(parameter)
        model.set_active_adapters(name)
        torch.testing.assert_close(hidden(model, family)[2], found[2], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["dora", "par"])
def test_training_reaches_the_blocks_that_are_left(name):
    """No gradient in a skipped block; each of the others has one."""
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config("bert")).double()
    model.add_classification_head("a", num_labels=2)
    model.heads["a"].double()
    inputs = {**tiny_inputs("bert"), "labels": torch.tensor([0, 1])}

    def gradients(skipped):
        model.add_adapter("a", METHODS[name], overwrite_ok=True)
        stir(model, "a")
        model.train_adapter("a")
        model.eval()
        model.set_active_adapters("a", skip_layers=skipped)
        model.zero_grad()
        model(**inputs).loss.backward()
        return {n: p.grad for n, p in model.named_parameters() if p.requires_grad}

    found = gradients([0])
    first = {n for n in found if ".layer.0." in n}
    assert first
    assert all(found[n] is None for n in first)
    assert all(found[n].count_nonzero() for n in found if n not in first)
    whole = gradients([])
    assert all(whole[n] is not None for n in first)


def test_a_setup_skips_for_its_block():
    """A setup has its own: None skips nothing; in training each step may skip others."""
    model = with_adapters(names=["lora", "bn"])
    expected = {}
    for skipped in ((), (0,), (1,), (0, 1)):
        model.set_active_adapters("bn", skip_layers=skipped)
        expected[skipped] = hidden(model)[-1]
    model.set_active_adapters("bn", skip_layers=[0])
    with AdapterSetup("bn"):
        assert torch.equal(hidden(model)[-1], expected[()])
    for skipped in expected:
        with AdapterSetup("bn", skip_layers=skipped):
            assert torch.equal(hidden(model)[-1], expected[skipped])
        assert torch.equal(hidden(model)[-1], expected[0,])
    setup = AdapterSetup("bn", skip_layers=[2])
    with pytest.raises(ConfigError, match=r"skip_layers=\(2,\).*blocks are 0 to 1"), setup:
        pass
    assert torch.equal(hidden(model)[-1], expected[0,])


@pytest.mark.parametrize(
    "setup",
    [Stack("lora", "bn"), BatchSplit("dora", "par", batch_sizes=1), Fuse("bn", "other")],
    ids=repr,
)
def test_every_composition_skips(setup):
    model = with_adapters()
    model.add_adapter("other", "double_seq_bn")
    stir(model, "other", seed=9)
    model.add_adapter_fusion(Fuse("bn", "other"))
    plain = hidden(model)
    model.set_active_adapters(setup, skip_layers=[0])
    found = hidden(model)
    assert torch.equal(found[1], plain[1])
    assert not torch.equal(found[2], plain[2])
    model.set_active_adapters(setup, skip_layers=[0, 1])
    assert torch.equal(hidden(model)[2], plain[2])


@pytest.mark.parametrize("active", [None, "bn", "boft"])
def test_rows_do_not_skip_what_the_active_adapter_skips(active):
    model = with_adapters()
    expected = hidden(model, adapter_names=["boft", "dora"])
    model.set_active_adapters(active, skip_layers=[0])
    found = hidden(model, adapter_names=["boft", "dora"])
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_what_is_skipped_is_shown():
    model = with_adapters(names=["lora", "bn"])
    model.set_active_adapters("bn", skip_layers=[0])
    rows = {row["name"]: row for row in model.adapter_summary(as_dict=True)}
    assert rows["bn"]["active"] is True
    assert rows["bn"]["skip_layers"] == [0]
    assert "skip_layers" not in rows["lora"]
    (line,) = [text for text in model.adapter_summary().splitlines() if text.startswith("bn")]
    assert "not in blocks 0 " in line
    setup = AdapterSetup("bn", skip_layers=[1])
    assert repr(setup) == "AdapterSetup(Stack('bn'), skip_layers=[1])"
    with setup:
        assert "not in blocks 1 " in model.adapter_summary()
    with AdapterSetup("bn"):
        assert "not in blocks" not in model.adapter_summary()


def test_what_is_loaded_without_blocks_has_none_there(tmp_path):
    model = with_adapters(names=["bn"])
    model.save_adapter(tmp_path, "bn")
    model.set_active_adapters("bn", skip_layers=[0])
    expected = first_output(model(**tiny_inputs("bert")))
    model.load_adapter(tmp_path, load_as="left", leave_out=[0], set_active=True)
    assert set(model.get_adapter("left")) == {1}
    assert torch.equal(first_output(model(**tiny_inputs("bert"))), expected)
