"""MTL-LoRA: the formula, parameters that tasks share, merging, and the files of adapters."""

import json
from pathlib import Path

import pytest
import torch
from families import tiny_config, tiny_inputs
from made import hidden, made
from safetensors.torch import load_file
from snapshots import refused
from transformers import AutoModel

from adapterzoo import (
    AutoAdapterModel,
    ConfigUnion,
    LoRAConfig,
    MTLLoRAConfig,
    MultiTask,
    MultiTaskConfig,
    load_model,
)
from adapterzoo.errors import (
    CheckpointError,
    CompositionError,
    ConfigError,
    FieldError,
    StateError,
)

SHARED = Path(__file__).resolve().parents[3] / "shared" / "golden" / "adapterhub"
PLAIN = MTLLoRAConfig(r=4, alpha=6, n_up_projection=3)
DENSE = PLAIN.replace(task_specific_matrix_type="linear", weights_sharpness=0.5)
CONFIGS = pytest.mark.parametrize("config", [PLAIN, DENSE], ids=["singular_values", "linear"])
QUERY = "encoder.layer.0.attention.self.query"
TASKS = ("a", "b", "c")
INPUTS = ("input_ids", "attention_mask", "decoder_input_ids", "pixel_values")


def of_tasks(config=PLAIN, **more):
    return made(**dict.fromkeys(TASKS, config), **more)


def at(model, name, path=QUERY):
    return dict(model.adapter_modules(name))[path]


def delta(module, config):
    """The formula of the paper, by plain torch."""
    shares = torch.softmax(module.weights / config.weights_sharpness, 0)
    values = module.task_specific.values
    matrix = torch.diag(values) if values.dim() == 1 else values
    update = sum(w * b @ matrix @ module.lora_A for w, b in zip(shares, module.lora_B, strict=True))
    return config.alpha / config.r * update


# --- the formula ---


@CONFIGS
def test_the_formula(config):
    model = made(a=config)
    layer, module = model.get_submodule(QUERY), at(model, "a")
    assert module.lora_B.shape == (3, 32, 4)
    assert module.task_specific.values.shape == ((4,) if config is PLAIN else (4, 4))
    x = torch.randn(2, 3, 32, dtype=torch.float64)
    base = layer(x)
    model.set_active_adapters("a")
    expected = base + x @ delta(module, config).T
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


@CONFIGS
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_merged_is_active(config, family):
    model = made(family, a=config)
    model.set_active_adapters("a")
    want = hidden(model)
    model.merge_adapter("a")
    model.set_active_adapters(None)
    torch.testing.assert_close(hidden(model), want, rtol=1e-9, atol=1e-9)


@CONFIGS
def test_a_fresh_one_is_the_identity(config):
    model = made()
    model.add_adapter("a", config)
    module = at(model, "a")
    values = module.task_specific.values.detach()
    matrix = torch.diag(values) if values.dim() == 1 else values
    assert torch.equal(matrix, torch.eye(4, dtype=torch.float64))
    assert torch.equal(module.weights.detach(), torch.ones(3, dtype=torch.float64))
    base = hidden(model)
    model.set_active_adapters("a")
    assert torch.equal(hidden(model), base)


@CONFIGS
def test_averages_are_linear(config):
    model = of_tasks(config)
    model.average_adapter("mean", ["a", "b"], weights=[0.25, 0.75])
    for key in ("lora_A", "lora_B", "weights", "task_specific.values"):
        one, other, mean = (at(model, n).get_parameter(key) for n in ("a", "b", "mean"))
        torch.testing.assert_close(mean, 0.25 * one + 0.75 * other)
    with pytest.raises(CompositionError, match="MTLLoRA adapter has none"):
        model.average_adapter("other", ["a", "b"], combine_strategy="svd", svd_rank=2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_up_projection": 0}, r"n_up_projection=0.*from 1"),
        ({"weights_sharpness": 0}, r"weights_sharpness=0.*above 0"),
        ({"task_specific_matrix_type": "diag"}, r"'diag'.*'singular_values', 'linear'"),
        ({"use_dora": True}, r"use_dora=True.*no method with these fields"),
        ({"composition_mode": "scale"}, r"composition_mode='scale'.*no method"),
    ],
)
def test_fields_out_of_range_are_named(fields, message):
    with pytest.raises(ConfigError, match=message):
        MTLLoRAConfig(**fields)


def test_it_is_a_config_of_several_tasks():
    assert isinstance(PLAIN, MultiTaskConfig)
    assert MTLLoRAConfig(use_dora=False, task_specific_matrix_type="linear") == MTLLoRAConfig(
        task_specific_matrix_type="linear"
    )


# --- parameters that tasks share ---


def are_shared(model, names=TASKS):
    own = [[m for path, m in model.adapter_modules(name)] for name in names]
    found = {
        all(m.lora_A is ms[0].lora_A and m.lora_B is ms[0].lora_B for m in ms)
        for ms in zip(*own, strict=True)
    }
    assert len(found) == 1
    assert not any(
        m.weights is ms[0].weights for ms in zip(*own, strict=True) for m in ms[1:]
    )  # fmt: skip
    return found == {True}


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("named", [MultiTask(*TASKS), list(TASKS), "a,b,c"])
def test_tasks_share_a_and_b(named, family):
    model = made(family, **dict.fromkeys(TASKS, PLAIN))
    path, module = next(iter(model.adapter_modules("b")))
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    model.share_parameters(named, name="shared", reference_adapter_name="b")
    first = dict(next(iter(model.adapter_modules("a")))[1].named_parameters())
    now = dict(dict(model.adapter_modules("b"))[path].named_parameters())
    for key, value in before.items():
        assert torch.equal(now[key], value)
        assert (first[key] is now[key]) == key.endswith(("lora_A", "lora_B"))
    shared = [n for n, p in model.named_parameters() if ".a." in n and "lora_" in n]
    assert shared
    assert not [n for n, p in model.named_parameters() if ".b." in n and "lora_" in n]


def test_what_is_shared_is_trained_once_by_all_tasks():
    """The gradient of A is the sum over the tasks; one step of an optimizer moves it once."""
    model, inputs = of_tasks(), tiny_inputs("bert", batch=3)
    model.share_parameters(TASKS)
    model.train_adapter(MultiTask(*TASKS))
    parameters = [p for p in model.parameters() if p.requires_grad]
    assert len(parameters) == len({id(p) for p in parameters})
    model(**inputs, task_ids=[0, 1, 2])[0].square().sum().backward()
    found = at(model, "a").lora_A.grad.clone()
    total = torch.zeros_like(found)
    for row, name in enumerate(TASKS):
        model.zero_grad()
        model.set_active_adapters(name)
        model(**{k: t[row : row + 1] for k, t in inputs.items()})[0].square().sum().backward()
        total += at(model, name).lora_A.grad
    torch.testing.assert_close(found, total, rtol=1e-9, atol=1e-9)
    before = at(model, "c").lora_A.detach().clone()
    torch.optim.SGD(parameters, lr=0.1).step()
    expected = before - 0.1 * at(model, "a").lora_A.grad
    torch.testing.assert_close(at(model, "c").lora_A.detach(), expected)


def test_unsharing_gives_each_task_its_own():
    model = of_tasks()
    model.share_parameters(TASKS, name="shared")
    value = at(model, "a").lora_B.detach().clone()
    model.unshare_parameters(["b", "c"], name="shared")
    assert at(model, "b").lora_B is not at(model, "c").lora_B
    with torch.no_grad():
        at(model, "a").lora_B.zero_()
    assert torch.equal(at(model, "b").lora_B, value)
    with pytest.raises(StateError, match="'b' shares no such"):
        model.unshare_parameters("b")
    model.share_parameters(["a", "b"])
    model.unshare_parameters("a,b")
    assert not are_shared(model)


def test_sharing_again_leaves_the_first_group():
    model = of_tasks()
    model.share_parameters(["a", "b"])
    model.share_parameters(["b", "c"])
    assert at(model, "b").lora_A is at(model, "c").lora_A
    assert at(model, "a").lora_A is not at(model, "b").lora_A
    assert torch.equal(at(model, "a").lora_A, at(model, "b").lora_A)


def test_moves_casts_copies_and_deletions_keep_what_is_shared():
    import copy
    import pickle

    model = of_tasks()
    model.share_parameters(TASKS)
    for other in (model.float(), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert are_shared(other)
    model.adapter_to("a", dtype=torch.float64)
    assert are_shared(model)
    model.delete_adapter("a")
    assert are_shared(model, ("b", "c"))
    model.delete_adapter("b")
    with pytest.raises(StateError, match="'c' shares no such"):
        model.unshare_parameters("c")


def test_whole_models_are_saved_with_what_is_shared(tmp_path):
    model = of_tasks(dtype=torch.float32)
    model.share_parameters(TASKS, name="shared")
    model.set_active_adapters(MultiTask(*TASKS))
    model.save_pretrained(tmp_path)
    keys = load_file(tmp_path / "model.safetensors")
    assert sum("lora_A" in key for key in keys) == 4
    again = load_model(tmp_path, AutoModel.from_config(tiny_config("bert")).__class__)
    assert are_shared(again)
    inputs = tiny_inputs("bert", batch=3)
    with torch.no_grad():
        pair = [m.eval()(**inputs, task_ids=["c", "a", "b"])[0] for m in (model, again)]
    torch.testing.assert_close(*pair, rtol=0, atol=0)
    again.unshare_parameters(TASKS, name="shared")


@pytest.mark.parametrize("form", ["native", "adapterhub"])
def test_files_of_tasks_share_again(tmp_path, form):
    model = of_tasks()
    model.share_parameters(TASKS)
    model.save_all_adapters(tmp_path, format=form)
    one, other = made(), made()
    for name in TASKS:
        one.load_adapter(tmp_path / name)
    assert are_shared(one)
    other.load_all_adapters(tmp_path)
    assert are_shared(other)
    for each in (one, other):
        for name in TASKS:
            each.set_active_adapters(name)
            model.set_active_adapters(name)
            torch.testing.assert_close(hidden(each), hidden(model), rtol=0, atol=0)


def test_other_files_share_nothing(tmp_path):
    model = of_tasks()
    # fresh ones of one seed have equal bits, and B is zero
    seeded = PLAIN.replace(init_weights_seed=1)
    for name in ("d", "e"):
        model.add_adapter(name, seeded)
    model.save_all_adapters(tmp_path)
    again = made()
    again.load_all_adapters(tmp_path)
    assert not are_shared(again)
    assert torch.equal(at(again, "d").lora_A, at(again, "e").lora_A)
    assert not are_shared(again, ("d", "e"))


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda m: m.share_parameters(["a", "l"]), TypeError, ("'l'", "'mtl_lora'")),
        (lambda m: m.share_parameters(["a", "u"]), FieldError, ("'u'",)),
        (lambda m: m.share_parameters(["a", "w"]), ConfigError, ("shapes", "equal configs")),
        (
            lambda m: m.share_parameters(["a", "b"], reference_adapter_name="c"),
            ConfigError, ("reference_adapter_name='c'", "'a', 'b'"),
        ),
        (lambda m: m.share_parameters(["a", "x"]), Exception, ("'x'",)),
        (lambda m: m.unshare_parameters(["a"]), StateError, ("'a' shares no such",)),
        (
            lambda m: m.unshare_parameters(["a"], name="other"),
            StateError, ("'a' shares no such",),
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_shared_is_refused(call, error, says):
    union = ConfigUnion(PLAIN, LoRAConfig(attn_matrices=["k"]))
    model = of_tasks(l=LoRAConfig(), u=union, w=PLAIN.replace(r=2))
    with pytest.raises(error) as caught:
        call(model)
    assert not [part for part in says if part not in str(caught.value)], str(caught.value)


def test_a_merged_task_is_not_shared():
    model = of_tasks()
    model.merge_adapter("a")
    with refused(model, StateError, "share_parameters(", "'a' is merged", "reset_adapter()"):
        model.share_parameters(TASKS)


# --- files ---

FAMILIES = [f for f in ("bert", "roberta", "llama", "t5", "vit") if (SHARED / f).is_dir()]


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_tasks(family, tmp_path):
    folder = SHARED / family / "mtl_lora"
    expected = load_file(folder / "expected.safetensors")
    model = AutoAdapterModel.from_pretrained(SHARED / family / "base").eval()
    for name in TASKS:
        model.load_adapter(folder / name)
    assert are_shared(model)
    inputs = {key: expected[key] for key in INPUTS if key in expected}
    inputs = {k: t.double() if t.is_floating_point() else t for k, t in inputs.items()}
    counts = expected.get("compare", torch.ones(expected["hidden"].shape[:2])).bool()
    counts = counts[:, : expected["hidden"].shape[1]] if "compare" in expected else counts
    for name in TASKS:
        model.save_adapter(tmp_path / name, name, format="adapterhub", with_head=False)
        theirs, ours = (
            torch.load(f / name / "pytorch_adapter.bin", weights_only=True)
            for f in (folder, tmp_path)
        )
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], tensor) for key, tensor in theirs.items())
        said = [
            json.loads((f / name / "adapter_config.json").read_text()) for f in (folder, tmp_path)
        ]
        assert said[0]["config"] == said[1]["config"]
    model.double()
    cases = {name: {"adapter_names": [name] * len(counts)} for name in TASKS}
    for name, rows in {"hidden": None, **cases}.items():
        if rows is None:
            model.set_active_adapters(MultiTask(*TASKS))
            rows = {"task_ids": expected["task_ids"]}
        with torch.no_grad():
            found = model(**inputs, **rows)[0]
        key = "hidden" if name == "hidden" else f"hidden.{name}"
        theirs = expected[key].double()
        torch.testing.assert_close(found[counts], theirs[counts], rtol=0, atol=2e-5)


def test_a_dense_matrix_is_not_in_files_of_adapters(tmp_path):
    model = made(a=DENSE)
    with pytest.raises(CheckpointError, match="task_specific_matrix_type='linear'"):
        model.save_adapter(tmp_path, "a", format="adapterhub")
    model.save_adapter(tmp_path, "a")
    again = made()
    again.load_adapter(tmp_path, set_active=True)
    model.set_active_adapters("a")
    torch.testing.assert_close(hidden(again), hidden(model), rtol=0, atol=0)
