"""Fusion layers of a model: added, trained, saved, deleted, looked at."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from families import first_output, tiny_config, tiny_inputs
from snapshots import bits, changes, of_adapter, refused, snapshot, stir
from transformers import AutoModel

from adapterzoo import (
    AdapterFusionConfig,
    AdapterSetup,
    AdapterTrainer,
    AutoAdapterModel,
    Average,
    Fuse,
    Parallel,
    Split,
    Stack,
    StaticAdapterFusionConfig,
    init,
)
from adapterzoo.errors import (
    CheckpointError,
    CompositionError,
    ConfigError,
    DuplicateNameError,
    SiteError,
    StateError,
    UnknownNameError,
)
from adapterzoo.model import training_checkpoints as snapshot_of

AB = Fuse("a", "b")


def with_fusion(family="bert", dtype=torch.float64, fusion="dynamic"):
    torch.manual_seed(0)
    model = init(AutoModel.from_config(tiny_config(family)).to(dtype).eval())
    for i, name in enumerate("abc"):
        model.add_adapter(name, "seq_bn[reduction_factor=4]")
        stir(model, name, seed=i, std=0.3)
    model.add_adapter("lora", "lora")
    if fusion:
        model.add_adapter_fusion(AB, fusion)
        fill(model, "a,b")
    return model


def fill(model, name, seed=7):
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, layer in model.fusion_modules(name):
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=source) * 0.3)


def fusion_bits(model, name):
    return [
        (path, key, bits(tensor))
        for path, layer in model.fusion_modules(name)
        for key, tensor in layer.state_dict().items()
    ]


def hidden(model, family="bert"):
    with torch.no_grad():
        return first_output(model(**tiny_inputs(family)))


# --- what it computes ---


def test_a_fusion_weighs_what_its_adapters_say():
    """GPT-2: s becomes s + Σ o_i V f_i(s) behind each block; a chain's last hears the others."""
    model = with_fusion("gpt2")
    setup = Fuse(Stack("c", "a"), "b")
    model.set_active_adapters(setup)
    found = hidden(model, "gpt2")
    model.set_active_adapters(None)
    handles = []
    for path, fusion in model.fusion_modules("a,b"):
        a, b, c = (dict(model.adapter_modules(name))[path] for name in "abc")

        def change(module, args, out, a=a, b=b, c=c, fusion=fusion):
            s = out[0] if isinstance(out, tuple) else out

            def f(adapter, x):
                w, v = adapter.adapter_down[0], adapter.adapter_up
                return torch.relu(x @ w.weight.T + w.bias) @ v.weight.T + v.bias

            said = [f(a, s + f(c, s)), f(b, s)]
            q = s @ fusion.query.weight.T + fusion.query.bias
            keys = [z @ fusion.key.weight.T + fusion.key.bias for z in said]
            o = torch.stack([(q * k).sum(-1) for k in keys], -1).softmax(-1)
            s = s + sum(o[..., i : i + 1] * (z @ fusion.value.weight.T) for i, z in enumerate(said))
            return (s, *out[1:]) if isinstance(out, tuple) else s

        handles.append(model.get_submodule(path).register_forward_hook(change))
    expected = hidden(model, "gpt2")
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert (found - hidden(model, "gpt2")).abs().max() > 0.01


@pytest.mark.parametrize(
    ("family", "config"), [("bert", "par_bn"), ("llama", "double_seq_bn"), ("t5", "adapter_plus")]
)
def test_every_kind_of_bottleneck_can_be_fused(family, config):
    """A fusion of an adapter with itself, V the identity, is the adapter."""
    torch.manual_seed(0)
    model = init(AutoModel.from_config(tiny_config(family)).double().eval())
    for name in "ab":
        model.add_adapter(name, config)
        stir(model, name, seed=1, std=0.3)
    model.add_adapter_fusion("a,b", StaticAdapterFusionConfig())
    fill(model, "a,b")
    model.set_active_adapters("a")
    expected = hidden(model, family)
    model.set_active_adapters(AB)
    torch.testing.assert_close(hidden(model, family), expected, rtol=0, atol=1e-9)


def test_fusions_stand_in_stacks_and_setups():
    model = with_fusion()
    model.set_active_adapters(Stack("lora", "c", AB))
    stacked = hidden(model)
    model.set_active_adapters(AB)
    fused = hidden(model)
    assert not torch.allclose(stacked, fused)
    model.set_active_adapters(None)
    plain = hidden(model)
    # a model without the fusion is none that the setup is for
    stranger = with_fusion(fusion=None)
    with AdapterSetup(AB):
        assert stranger.active_adapters is None
        assert torch.equal(hidden(model), fused)
    assert torch.equal(hidden(model), plain)


def test_a_fusion_has_the_shares_as_an_output():
    model = with_fusion()
    model.set_active_adapters(AB)
    inputs = tiny_inputs("bert")
    outputs = model(**inputs, output_adapter_fusion_attentions=True)
    assert torch.equal(outputs.last_hidden_state, model(**inputs).last_hidden_state)
    shares = outputs.adapter_fusion_attentions
    assert {name: {i: list(at) for i, at in by.items()} for name, by in shares.items()} == {
        "a,b": {0: ["output_adapter"], 1: ["output_adapter"]}
    }
    for by in shares["a,b"].values():
        share = by["output_adapter"]
        assert share.shape == (2, 7, 2)
        torch.testing.assert_close(share.sum(-1), torch.ones(2, 7).double())
    assert "adapter_fusion_attentions" not in model(**inputs)
    assert not any(layer._forward_hooks for _, layer in model.fusion_modules("a,b"))
    last = model(**inputs, output_adapter_fusion_attentions=True, return_dict=False)[-1]
    assert torch.equal(last["a,b"][0]["output_adapter"], shares["a,b"][0]["output_adapter"])


def test_a_block_with_a_fusion_compiles_in_one_graph():
    torch._dynamo.reset()
    model = with_fusion(dtype=torch.float32)
    model.set_active_adapters(Stack("c", AB))
    block, x = model.encoder.layer[0], torch.randn(2, 7, 32)
    compiled = torch.compile(block, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), block(x))
    torch._dynamo.reset()


# --- training ---


def test_the_fusion_and_the_head_are_trained_and_nothing_else():
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config("bert"))
    for name in "ab":
        model.add_adapter(name, "seq_bn")
    model.add_adapter_fusion(["a", "b"])
    model.add_classification_head("task", num_labels=2)
    model.train_adapter_fusion(AB)
    assert model.active_adapters == AB
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert all(".adapter_fusion_layer.a,b." in n or n.startswith("heads.task.") for n in trained)
    assert sum("adapter_fusion_layer.a,b" in n for n in trained) == 2 * 5
    before = {n: bits(p) for n, p in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    loss = model(**tiny_inputs("bert"), labels=torch.tensor([0, 1])).loss
    (loss + model.get_fusion_regularization_loss()).backward()
    optimizer.step()
    changed = {n for n, p in model.named_parameters() if bits(p) != before[n]}
    assert changed == trained
    model.train_adapter_fusion(AB, unfreeze_adapters=True)
    also = {n for n, p in model.named_parameters() if p.requires_grad} - trained
    assert also
    assert all(of_adapter(n, "a") or of_adapter(n, "b") for n in also)
    model.train_adapter("a")
    assert model.get_fusion_regularization_loss() is None
    assert not any(p.requires_grad for _, f in model.fusion_modules("a,b") for p in f.parameters())
    model.freeze_model(False)
    assert not any(p.requires_grad for _, f in model.fusion_modules("a,b") for p in f.parameters())


def test_the_trainer_adds_the_regularisation(tmp_path, monkeypatch):
    from transformers import TrainingArguments

    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config("bert"))
    for name in "ab":
        model.add_adapter(name, "seq_bn")
    model.add_adapter_fusion(["a", "b"])
    fill(model, "a,b")
    model.add_classification_head("task", num_labels=2)
    model.double().train_adapter_fusion(AB)
    start = copy.deepcopy(model.state_dict())
    rows = [{"input_ids": list(range(3, 9)), "labels": i % 2} for i in range(4)]

    def gradient(penalized):
        model.load_state_dict(start)
        with monkeypatch.context() as patch:
            if not penalized:
                patch.setattr(type(model), "get_fusion_regularization_loss", lambda self: None)
            arguments = TrainingArguments(
                tmp_path, max_steps=1, learning_rate=1.0, optim="sgd", max_grad_norm=0.0,
                per_device_train_batch_size=2, lr_scheduler_type="constant",
                gradient_accumulation_steps=2, report_to=[], use_cpu=True, seed=0,
                save_strategy="no", logging_strategy="no", disable_tqdm=True,
            )  # fmt: skip
            model.eval()
            AdapterTrainer(model, arguments, train_dataset=rows).train()
        return [f.value.weight.detach().clone() for _, f in model.fusion_modules("a,b")]

    weights = [start[n] for n in start if n.endswith(".a,b.value.weight")]
    for with_it, without, weight in zip(gradient(True), gradient(False), weights, strict=True):
        expected = 0.01 * 2 * (weight - torch.eye(32))
        torch.testing.assert_close(without - with_it, expected, rtol=0, atol=1e-12)


# --- storing ---


def test_a_fusion_is_saved_and_loaded_bit_for_bit(tmp_path):
    model = with_fusion(fusion="static")
    model.set_active_adapters(AB)
    model.save_adapter_fusion(tmp_path, AB, meta_dict={"made": "here"})
    other = with_fusion(fusion=None)
    assert other.load_adapter_fusion(tmp_path, set_active=True) == "a,b"
    assert fusion_bits(other, "a,b") == fusion_bits(model, "a,b")
    assert other.active_adapters == AB
    assert torch.equal(hidden(other), hidden(model))
    assert other.load_adapter_fusion(tmp_path, load_as="again", set_active=True) == "again"
    assert other.active_adapters == Fuse("a", "b", name="again")
    assert torch.equal(hidden(other), hidden(model))


def test_a_fusion_that_does_not_fit_is_refused(tmp_path):
    model = with_fusion(dtype=torch.float32)
    model.save_adapter_fusion(tmp_path, "a,b")
    with refused(model, DuplicateNameError, "a fusion 'a,b'", "overwrite_ok=True"):
        model.load_adapter_fusion(tmp_path, overwrite_ok=False)
    with pytest.warns(UserWarning, match="the fusion 'a,b' of the model has been replaced"):
        model.load_adapter_fusion(tmp_path)
    model.delete_adapter_fusion(AB)
    model.delete_adapter("b")
    both = "the fusion takes the adapters 'a', 'b', and the model lacks "
    a, b = (f"model.load_adapter(…, load_as={name!r})" for name in "ab")
    with refused(model, UnknownNameError, f"{both}'b'", f"Write {b} first."):
        model.load_adapter_fusion(tmp_path, set_active=True)
    model.delete_adapter("a")
    with refused(model, UnknownNameError, f"{both}'a', 'b'", f"Write {a} and {b} first."):
        model.load_adapter_fusion(tmp_path)
    model.add_adapter("a", "seq_bn")
    model.add_adapter("b", "double_seq_bn")
    with refused(model, SiteError, "have different sites", "Fuse adapters of one"):
        model.load_adapter_fusion(tmp_path)
    wide = with_fusion(dtype=torch.float64, fusion=None)
    with pytest.raises(CheckpointError, match=r"dtype=torch\.float64"):
        wide.load_adapter_fusion(tmp_path)
    wide.load_adapter_fusion(tmp_path, dtype=torch.float64)
    (tmp_path / "adapter_fusion.safetensors").unlink()
    with pytest.raises(CheckpointError, match="adapter_fusion"):
        wide.load_adapter_fusion(tmp_path, overwrite_ok=True)


def test_names_with_commas_need_a_name_for_their_fusion(tiny, tmp_path):
    model = tiny()
    for name in ("a,b", "c", "a", "b,c"):
        model.add_adapter(name)
    for children in (("a,b", "c"), ("a", "b,c")):
        with pytest.raises(
            CompositionError, match=r"has a comma\. Write Fuse\(…, name='my_fusion'\)"
        ):
            model.add_adapter_fusion(list(children))
    model.add_adapter_fusion(Fuse("a,b", "c", name="one"))
    model.add_adapter_fusion(Fuse("a", "b,c", name="two"))
    assert dict(model.adapters_config.fusion_name_map) == {"one": ["a,b", "c"], "two": ["a", "b,c"]}
    fill(model, "one")
    for format in ("native", "adapterhub"):
        model.save_adapter_fusion(tmp_path / format, "one", format=format)
        other = copy.deepcopy(model)
        other.delete_adapter_fusion("one")
        assert other.load_adapter_fusion(tmp_path / format) == "one"
        assert fusion_bits(other, "one") == fusion_bits(model, "one")


def test_models_are_saved_with_their_fusions(tmp_path):
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config("bert")).eval()
    for name in "abc":
        model.add_adapter(name, "seq_bn")
    model.add_adapter_fusion(AB)
    model.add_adapter_fusion(["b", "c"], "static", name="other")
    fill(model, "a,b")
    model.set_active_adapters(Stack("c", AB))
    model.save_pretrained(tmp_path)
    loaded = AutoAdapterModel.from_pretrained(tmp_path)
    assert loaded.active_adapters == Stack("c", AB)
    assert fusion_bits(loaded, "a,b") == fusion_bits(model, "a,b")
    assert fusion_bits(loaded, "other") == fusion_bits(model, "other")


def test_copies_have_fusions_of_their_own():
    model = with_fusion()
    model.set_active_adapters(AB)
    before = hidden(model)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(hidden(made), before)
        fill(made, "a,b", seed=8)
        assert not torch.equal(hidden(made), before)
        assert torch.equal(hidden(model), before)


# --- add and delete ---


def test_deleting_leaves_no_trace():
    model = with_fusion(dtype=torch.float32, fusion=None)
    before = snapshot(model)
    model.add_adapter_fusion(AB, set_active=True)
    assert changes(before, snapshot(model))
    model.delete_adapter_fusion("a,b")
    assert model.active_adapters is None
    assert not changes(before, snapshot(model))


def test_what_stays_active_when_a_fusion_goes():
    model = with_fusion()
    model.set_active_adapters("c")
    model.delete_adapter_fusion(["a", "b"])
    assert model.active_adapters == Stack("c")
    model.add_adapter_fusion(AB, "static")
    # one is replaced by another
    model.add_adapter_fusion(AB, overwrite_ok=True)
    assert all(layer.value is not None for _, layer in model.fusion_modules("a,b"))
    model.set_active_adapters(Stack("c", AB))
    model.delete_adapter_fusion(AB)
    assert model.active_adapters == Stack("c")


def test_what_cannot_be_fused_is_refused():
    model = with_fusion(dtype=torch.float32)
    model.add_adapter("wide", "double_seq_bn")
    model.add_adapter("lorb", "lora")
    add, act, delete = (
        model.add_adapter_fusion, model.set_active_adapters, model.delete_adapter_fusion
    )  # fmt: skip
    both = Parallel("a", "b")
    for call, error, *says in (
        (lambda: add(AB), DuplicateNameError, "there is a fusion 'a,b'", "overwrite_ok=True"),
        (lambda: add(["a", "z"]), UnknownNameError, "'z'", "Known adapters"),
        (lambda: add(Fuse(Stack("z", "b"), "c")), UnknownNameError, "'z'", "Known adapters"),
        (lambda: add(3), CompositionError, "Fuse(3)", "Write Fuse('a', 'b')"),
        (lambda: add("a,wide"), SiteError, "'a' and 'wide'", "leave_out"),
        (lambda: add("lora,lorb"), ConfigError, "'lora' is a LoRA", "'seq_bn'"),
        (lambda: add("b,c", "dinamic"), UnknownNameError, "'dinamic'", "'dynamic'"),
        (lambda: add("b,c", name="x/y"), ConfigError, "'x/y'", "Write"),
        (lambda: act(Fuse("b", "c")), StateError, "no fusion layers", "add_adapter_fusion(Fuse("),
        (lambda: act(Fuse("b", "a")), StateError, "for Fuse('b', 'a')", "Write add_adapter"),
        (
            lambda: model.delete_adapter("a"),
            StateError,
            "'a' is fused",
            "delete_adapter_fusion('a,b",
        ),
        (lambda: delete("b,c"), UnknownNameError, "no fusion 'b,c'", "Known fusions: 'a,b'"),
        (
            lambda: model.train_adapter_fusion("a"),
            StateError,
            "no fusion in the setup",
            "Fuse('a', 'b')",
        ),
        (lambda: model.train_adapter_fusion(both), StateError, "Parallel('a', 'b')", "Write Fuse"),
        (
            lambda: model.train_adapter_fusion(Fuse("b", "a")),
            StateError,
            "no fusion layers for Fuse('b', 'a')",
            "Write add_adapter_fusion(Fuse('b', 'a'))",
        ),
    ):
        with refused(model, error, *says):
            call()
    with AdapterSetup(AB), refused(model, StateError, "'a,b' is active", "Leave the"):
        model.delete_adapter_fusion(AB)
    model.merge_adapter("lora")
    with refused(model, StateError, "'lora' is merged", "Write reset_adapter()"):
        add(Fuse(Stack("lora", "b"), "c"), set_active=True)
    model.reset_adapter()
    # what was there of the name comes back
    add("b,c")
    for name in (None, "new"):
        fuse = Fuse(Stack("lora", "b"), "c", name=name)
        with refused(model, CompositionError, "Stack('lora', 'b') lacks an adapter", "same sites"):
            add(fuse, overwrite_ok=True, set_active=True)
    assert list(model._adapter_state.fusions) == ["a,b", "b,c"]


# --- training checkpoints ---


def test_training_checkpoints_hold_all_fusions(tmp_path):
    """Trained ones and others, and how far the temperature has decayed."""

    def made():
        model = with_fusion(dtype=torch.float32)
        model.add_adapter_fusion(["b", "c"], AdapterFusionConfig(temperature=True), name="warm")
        return model

    model, other = made(), made()
    for name in ("a,b", "warm"):
        fill(model, name, seed=11)
    for _, layer in model.fusion_modules("warm"):
        layer.steps.fill_(321)
    model.train_adapter_fusion(AB)
    other.train_adapter_fusion(AB)
    snapshot_of.save_trained(model, tmp_path)
    # the trained one lies with the others, not with what is left of the base model
    assert not (tmp_path / snapshot_of.UNFROZEN).exists()
    trained = [p for p in other.parameters() if p.requires_grad]
    snapshot_of.restore_trained(other, tmp_path)
    for name in ("a,b", "warm"):
        assert fusion_bits(other, name) == fusion_bits(model, name)
    # an optimizer that was made before has the same parameters
    again = [p for p in other.parameters() if p.requires_grad]
    assert all(x is y for x, y in zip(trained, again, strict=True))
    loaded = with_fusion(dtype=torch.float32, fusion=None)
    assert loaded.load_adapter_fusion(tmp_path / "warm") == "warm"
    assert fusion_bits(loaded, "warm") == fusion_bits(model, "warm")
    fresh = with_fusion(dtype=torch.float32)
    with refused(fresh, CheckpointError, "has the fusions 'a,b', 'warm'", "Add or delete fusions"):
        snapshot_of.restore_trained(fresh, tmp_path)
    fresh.add_adapter_fusion(["b", "c"], "static", name="warm")
    with refused(fresh, CheckpointError, "checkpoint's fusion 'warm'", "the model's"):
        snapshot_of.restore_trained(fresh, tmp_path)


def test_what_a_fusion_says_is_not_the_last_adapter_s():
    """Its head is not chosen: the one that was active stays so, and is what is trained."""
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config("bert"))
    for name in "ab":
        model.add_adapter(name, "seq_bn")
        model.add_classification_head(name, num_labels=2)
    model.add_adapter_fusion(["a", "b"])
    model.add_classification_head("target", num_labels=2)
    for setup in (AB, Stack("a", AB), Average("a", "b"), Split("a", "b", splits=[3, 4])):
        model.active_head = "target"
        model.set_active_adapters(setup)
        assert model.active_head == "target"
    model.train_adapter_fusion(AB)
    heads = {n.split(".")[1] for n, p in model.named_parameters() if p.requires_grad}
    assert "target" in heads
    assert not heads & {"a", "b"}
    model.set_active_adapters(Stack("b", "a"))
    assert model.active_head == "a"


def test_rows_of_a_batch_do_not_get_deleted_fusion_layers():
    model = with_fusion()
    inputs, rows = tiny_inputs("bert"), [AB, None]
    before = first_output(model(**inputs, adapter_names=rows))
    model.delete_adapter_fusion(AB)
    with pytest.raises(StateError, match="no fusion layers"):
        model(**inputs, adapter_names=rows)
    model.add_adapter_fusion(AB)
    fill(model, "a,b", seed=8)
    after = first_output(model(**inputs, adapter_names=rows))
    with AdapterSetup(AB):
        torch.testing.assert_close(after[0], first_output(model(**inputs))[0])
    assert not torch.allclose(after[0], before[0])


def test_a_block_of_another_thread_does_not_get_deleted_fusion_layers():
    model = with_fusion()
    inputs, started, deleted = tiny_inputs("bert"), threading.Event(), threading.Event()
    errors = []

    def run():
        with AdapterSetup(AB):
            model(**inputs)
            started.set()
            deleted.wait(60)
            try:
                model(**inputs)
            except StateError as error:
                errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(60)
    model.delete_adapter_fusion(AB)
    model.add_adapter_fusion(AB)
    deleted.set()
    thread.join()
    assert len(errors) == 1
    assert "'a,b' was deleted" in errors[0]
