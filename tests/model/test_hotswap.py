"""Hotswap: values of files and of other adapters go through one adapter, in place."""

import pytest
import torch
from families import tiny_config, tiny_inputs
from graphs import Counting
from snapshots import output, refused, stir
from swept import all_but
from transformers import BertForSequenceClassification
from variants import SWEPT, VARIANTS

from adapterzoo import AutoAdapterModel, DoRAConfig, LoRAConfig, init
from adapterzoo.config import AdapterConfig, ConfigUnion
from adapterzoo.errors import CheckpointError, ConfigError, StateError, UnknownNameError

_GATED = "lora_bias=True,use_gating=True"
# methods whose sizes zeros make up for: the slot, and configs that fit
SIZED = {
    "lora": ("lora[r=16]", ["lora[r=1,alpha=3]", "lora[r=5,use_rslora=True]"]),
    "gated": (f"lora[r=4,{_GATED}]", [f"lora[r=2,{_GATED}]"]),
    "pissa": ("lora[r=8]", ["lora[r=3,init_weights='pissa']"]),
    "start": ("lora[r=8,init_weights='pissa']", ["lora[r=3]", "lora[r=3,init_weights='pissa']"]),
    "rank_pattern": ("lora[r=8]", [LoRAConfig(r=2, rank_pattern={"query": 7})]),
    "spelling": ("lora[r=8]", [LoRAConfig(r=2, target_modules=["query", "value"])]),
    "dora": ("dora[r=16]", ["dora[r=3,alpha=7]"]),
    "mtl_lora": ("mtl_lora[r=8,n_up_projection=2]", ["mtl_lora[r=3,n_up_projection=2]"]),
    "vera": ("vera[r=16]", ["vera[r=5]"]),
    "dvora": ("dvora[r=16]", ["dvora[r=5]"]),
    "loha": ("loha[r=8]", ["loha[r=3,alpha=5]"]),
    "lokr": ("lokr[r=16]", ["lokr[r=2,alpha=5]", "lokr[r=1]"]),
    "lokr_both": ("lokr[r=3,decompose_both=True]", ["lokr[r=1,decompose_both=True,alpha=3]"]),
    "noreft": ("noreft[r=6]", ["noreft[r=2]"]),
    "loreft": ("loreft[r=6]", ["loreft[r=2]"]),
    "bottleneck": ("double_seq_bn[reduction_factor=2]", ["double_seq_bn[reduction_factor=8]"]),
    "invertible": (
        "seq_bn_inv[inv_adapter_reduction_factor=1]",
        ["seq_bn_inv[inv_adapter_reduction_factor=4]"],
    ),
    "union": ("lora[r=8]|par_bn[reduction_factor=1]", ["lora[r=3]|par_bn[reduction_factor=2]"]),
}  # fmt: skip


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def made(**configs):
    torch.manual_seed(0)
    config = tiny_config("bert")
    config.num_hidden_layers = 1
    model = AutoAdapterModel.from_config(config).eval()
    for seed, (name, config) in enumerate(configs.items()):
        model.add_adapter(name, config)
        stir(model, name, seed=seed + 1)
    return model


def saved(folder, *configs):
    """Each config's adapter in a folder, with its output."""
    found = []
    for number, config in enumerate(configs):
        model, path = made(**{"w" * (number + 1): config}), folder / str(number)
        name = "w" * (number + 1)
        stir(model, name, seed=number + 10)
        model.set_active_adapters(name)
        model.save_adapter(path, name)
        found.append((path, output(model)))
    return found


def run(compiled):
    with torch.no_grad():
        return compiled(**tiny_inputs("bert")).last_hidden_state


@pytest.mark.parametrize("kind", all_but([*SIZED][::4], SIZED))
def test_smaller_sizes_go_through_one_slot_without_compiling_again(kind, tmp_path):
    slot, configs = SIZED[kind]
    files = saved(tmp_path, *configs, slot)
    model = made(slot=slot)
    model.set_active_adapters("slot")
    before = {name: id(p) for name, p in model.named_parameters()}
    backend = Counting()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    run(compiled)
    for path, expected in [*files, *files]:
        assert model.load_adapter(path, load_as="slot", hotswap=True) == "slot"
        torch.testing.assert_close(output(model), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(run(compiled), expected, rtol=1e-5, atol=1e-5)
    assert backend.graphs == 1
    assert {name: id(p) for name, p in model.named_parameters()} == before
    # config and tensors of the slot describe the same adapter
    assert model.adapters_config["slot"] == AdapterConfig.load(slot)
    model.load_adapter(files[0][0], load_as="slot", hotswap=True)
    model.save_adapter(tmp_path / "again", "slot")
    other = made()
    other.load_adapter(tmp_path / "again", set_active=True)
    assert torch.equal(output(other), output(model))
    assert not torch.allclose(files[0][1], files[-1][1], atol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("variant", SWEPT)
def test_every_method_swaps_without_compiling_again(variant, tmp_path):
    config = VARIANTS[variant]
    files = saved(tmp_path, config, config, config)
    model = made(slot=config)
    model.set_active_adapters("slot")
    backend = Counting()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    run(compiled)
    for path, expected in [*files, files[0]]:
        model.load_adapter(path, load_as="slot", hotswap=True)
        assert torch.equal(output(model), expected)
        torch.testing.assert_close(run(compiled), expected, rtol=1e-5, atol=1e-5)
    assert backend.graphs == 1
    assert not torch.equal(files[0][1], files[1][1])


# the slot says which layers may be adapted, and the copies beside them
PLACED = [
    name
    for name, config in VARIANTS.items()
    if all("target_modules" in member.slot_fields for member in config.members)
]

# names of layers for methods that act elsewhere than in linear ones
LAYERS = {
    "ln_tuning": ["attention.output.LayerNorm", "embeddings.LayerNorm"],
    "trainable_tokens": ["word_embeddings", "position_embeddings"],
}


def in_layers(config, names):
    """The config with other target modules."""
    if config.members == (config,):
        return config.replace(target_modules=names)
    return ConfigUnion(*(member.replace(target_modules=names) for member in config.members))


@pytest.mark.parametrize("variant", all_but(PLACED[::6], PLACED))
def test_layers_that_a_file_lacks_do_nothing(variant, tmp_path):
    every = LAYERS.get(variant, ["query", "key", "value"])
    one = every[:1]
    ((few, expected),) = saved(tmp_path, in_layers(VARIANTS[variant], one))
    ((many, then),) = saved(tmp_path / "more", in_layers(VARIANTS[variant], every))
    model = made(slot=in_layers(VARIANTS[variant], every))
    model.set_active_adapters("slot")
    before = output(model)
    model.load_adapter(few, load_as="slot", hotswap=True)
    torch.testing.assert_close(output(model), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(expected, before, atol=1e-4)
    model.load_adapter(many, load_as="slot", hotswap=True)
    assert torch.equal(output(model), then)
    # a slot has no room for layers that it lacks
    narrow = made(slot=in_layers(VARIANTS[variant], one))
    narrow.set_active_adapters("slot")
    with refused(narrow, ConfigError, every[1], "in one of them only"):
        narrow.load_adapter(many, load_as="slot", hotswap=True)


def test_fifty_ranks_compile_one_frame(tmp_path):
    model = made(slot=LoRAConfig(r=50))
    files = saved(tmp_path, *(LoRAConfig(r=r, alpha=2 * r % 7 + 1) for r in range(1, 51)))
    model.set_active_adapters("slot")
    backend = Counting()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for path, expected in files:
        model.load_adapter(path, load_as="slot", hotswap=True)
        torch.testing.assert_close(run(compiled), expected, rtol=1e-5, atol=1e-5)
    assert backend.graphs == 1


def test_waiting_adapters_go_through_a_slot_without_compiling_again():
    waiting = {f"a{r}": LoRAConfig(r=r, alpha=r + 1) for r in range(1, 17)}
    model = made(slot=LoRAConfig(r=16), **waiting)
    seen = {}
    for name in waiting:
        model.set_active_adapters(name)
        seen[name] = output(model)
    model.set_active_adapters("slot")
    backend = Counting()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for name, expected in seen.items():
        model.hotswap_adapter(name, into="slot")
        torch.testing.assert_close(run(compiled), expected, rtol=1e-5, atol=1e-5)
        model.set_active_adapters(name)
        assert torch.equal(output(model), expected)
        model.set_active_adapters("slot")
    assert backend.graphs == 1


@pytest.mark.long
@pytest.mark.parametrize(
    "configs",
    [
        ["lora[r=2]", "lora[r=5,alpha=3]", LoRAConfig(r=1, rank_pattern={"query": 6})],
        ["lora[r=2,use_rslora=True]", "lora[r=4]"],
        ["lora[r=3,init_weights='pissa']", "lora[r=6]"],
        ["dora[r=2]", "dora[r=5,alpha=3]"],
        ["vera[r=2]", "vera[r=5]"],
        ["loha[r=2]", "loha[r=5]"],
        ["lora[r=2]|par_bn", "lora[r=4]|par_bn"],
        ["boft", "boft"],
    ],
    ids=str,
)
def test_code_for_transformers_swaps_at_the_second_load(configs, tmp_path):
    files = saved(tmp_path, *configs)
    model, backend = made(), Counting()
    model.enable_peft_hotswap(target_rank=8)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for path, expected in [*files, *files]:
        model.load_adapter(path, adapter_name="default")
        torch.testing.assert_close(output(model), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(run(compiled), expected, rtol=1e-5, atol=1e-5)
    assert backend.graphs == 1
    with refused(model, ConfigError, "Leave leave_out out", "hotswap=False"):
        model.load_adapter(files[0][0], load_as="default", leave_out=[0])
    model.load_adapter(files[0][0], load_as="default", hotswap=False, overwrite_ok=True)
    assert model.adapters_config["default"] == AdapterConfig.load(configs[0])


def test_adapters_of_a_model_become_slots():
    model = made(a="lora[r=2]", b="dora[r=3]", c="seq_bn")
    model.set_active_adapters(["a", "c"])
    expected = output(model)
    with refused(model, StateError, "'a', 'b', 'c'", "check_compiled='ignore'"):
        model.enable_peft_hotswap(8)
    with refused(model, ConfigError, "(r=3)", "target_rank=3"):
        model.enable_peft_hotswap(2, check_compiled="ignore")
    for rank in (0, True, 8.0):
        with refused(model, ConfigError, f"target_rank={rank}", "Write target_rank="):
            model.enable_peft_hotswap(rank)
    with refused(model, ConfigError, "hotswap='always'", "'auto'"):
        model.load_adapter("nowhere", hotswap="always")
    with pytest.warns(UserWarning, match="compiles again"):
        model.enable_peft_hotswap(8, check_compiled="warn")
    assert [model.adapters_config[name]["r"] for name in "ab"] == [8, 8]
    torch.testing.assert_close(output(model), expected, rtol=1e-5, atol=1e-5)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert any(".loras.a.lora_B" in name for name in trained)


def test_a_rank_above_the_target_is_refused(tmp_path):
    ((path, _),) = saved(tmp_path, "lora[r=9]")
    model = made(other="seq_bn")
    model.enable_peft_hotswap(8, check_compiled="ignore")
    with refused(model, ConfigError, "(r=9)", "target_rank=9"):
        model.load_adapter(path)


def test_a_head_is_swapped_with_its_adapter(tmp_path):
    def with_head(name, seed):
        model = made(**{name: "lora"})
        stir(model, name, seed)
        torch.manual_seed(seed)
        model.add_classification_head(name, num_labels=3)
        model.set_active_adapters(name)
        return model

    writer, model = with_head("a", 7), with_head("slot", 8)
    writer.save_adapter(tmp_path, "a")
    head = model.heads["slot"]
    assert not torch.equal(output(model), output(writer))
    model.load_adapter(tmp_path, load_as="slot", hotswap=True)
    assert model.heads["slot"] is head
    assert torch.equal(output(model), output(writer))
    with refused(made(slot="lora"), ConfigError, "'slot' has none", "with_head=False"):
        bare = made(slot="lora")
        bare.load_adapter(tmp_path, load_as="slot", hotswap=True)
    bare.load_adapter(tmp_path, load_as="slot", hotswap=True, with_head=False)
    other = with_head("slot", 8)
    other.add_classification_head("slot", num_labels=4, overwrite_ok=True)
    with refused(other, CheckpointError, "num_labels=3", "num_labels=4"):
        other.load_adapter(tmp_path, load_as="slot", hotswap=True)


def test_a_copy_of_a_static_head_is_swapped_and_the_original_stays(tmp_path):
    def with_copy(name, seed):
        torch.manual_seed(0)
        model = init(BertForSequenceClassification(tiny_config("bert")).eval())
        model.add_adapter(name, "lora")
        stir(model, name, seed)
        model.train_adapter(name)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if parameter.requires_grad and "classifier" in key:
                    parameter.add_(seed)
        return model.eval()

    writer, model = with_copy("a", 3), with_copy("slot", 4)
    writer.save_adapter(tmp_path, "a")
    before = {name: id(p) for name, p in model.named_parameters()}
    model.set_active_adapters(None)
    base = output(model)
    model.load_adapter(tmp_path, load_as="slot", hotswap=True)
    assert torch.equal(output(model), base)
    model.set_active_adapters("slot")
    assert torch.equal(output(model), output(writer))
    assert {name: id(p) for name, p in model.named_parameters()} == before


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("lora[r=9]", ("[8, 32]", "[9, 32]", "hotswap=False")),
        ("lora[output_lora=True]", ("output.dense", "in one of them only", "hotswap=False")),
        ("dora", ("'lora'", "'dora'", "hotswap=False")),
        ("lora[lora_bias=True]", ("lora_bias=False and not True", "hotswap=False")),
    ],
)
def test_a_file_that_does_not_fit_changes_nothing(config, says, tmp_path):
    ((path, _),) = saved(tmp_path, config)
    model = made(slot="lora[r=8]")
    model.set_active_adapters("slot")
    with refused(model, ConfigError, *says):
        model.load_adapter(path, load_as="slot", hotswap=True)


def test_scalings_that_no_factor_can_take_over_are_refused():
    dora = {"convention": "adapterhub"}
    model = made(
        slot=LoRAConfig(alpha=0),
        a=LoRAConfig(),
        wide=DoRAConfig(r=8, **dora),
        narrow=DoRAConfig(r=4, **dora),
        weak="seq_bn[scaling=2.0]",
        strong="seq_bn[scaling=4.0]",
        orthonormal="loreft[r=4,non_linearity='relu']",
        small="loreft[r=2,non_linearity='relu']",
        phm="compacter[reduction_factor=4]",
        phm8="compacter[reduction_factor=8]",
    )
    for name, slot, *says in (
        ("a", "slot", "scaling is 0", "another alpha"),
        ("narrow", "wide", "r=8 and not 4", "hotswap=False"),
        ("strong", "weak", "scaling=2.0 and not 4.0", "hotswap=False"),
        ("small", "orthonormal", "r=4 and not 2", "hotswap=False"),
        ("phm8", "phm", "reduction_factor=4 and not 8", "hotswap=False"),
    ):
        with refused(model, ConfigError, *says):
            model.hotswap_adapter(name, into=slot)


def test_merged_shared_and_missing_adapters_are_refused(tmp_path):
    ((path, _),) = saved(tmp_path, "lora")
    model = made(slot="lora")
    model.merge_adapter("slot")
    with refused(model, StateError, "'slot' is merged", "reset_adapter()"):
        model.load_adapter(path, load_as="slot", hotswap=True)
    model.reset_adapter()
    with refused(model, UnknownNameError, "'other'", "slot"):
        model.load_adapter(path, load_as="other", hotswap=True)
    with refused(model, ConfigError, "Leave leave_out out", "hotswap=False"):
        model.load_adapter(path, load_as="slot", hotswap=True, leave_out=[0])
    with refused(model, ConfigError, "hotswap=True", "Leave overwrite_ok out"):
        model.load_adapter(path, load_as="slot", hotswap=True, overwrite_ok=False)
    model = made(x="mtl_lora", y="mtl_lora", z="mtl_lora")
    model.share_parameters(adapter_names=["x", "y"])
    with refused(model, StateError, "shares parameters", "unshare_parameters("):
        model.hotswap_adapter("z", into="x")


# PEFT adapts the fused layer of GPT-2 as a whole
@pytest.mark.parametrize(
    ("family", "format", "slot"),
    [
        ("bert", "adapterhub", "lora[r=8]"),
        ("gpt2", "adapterhub", "lora[r=8]"),
        ("gpt2", "peft", "lora[r=8,target_modules=['c_attn']]"),
        ("llama", "peft", "lora[r=8]"),
        ("mixtral", "peft", "lora[r=8]"),
    ],
)
def test_files_of_the_peers_go_into_slots_of_any_family(family, format, slot, tmp_path):
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config(family)).eval()
    model.add_adapter("slot", slot)
    expected = {}
    for seed, (name, config) in enumerate(
        {"a": "lora[r=2]", "b": "lora[r=4,alpha=3,attn_matrices=['q','v']]"}.items()
    ):
        model.add_adapter(name, config)
        stir(model, name, seed=seed)
        model.save_adapter(tmp_path / name, name, format=format)
        model.set_active_adapters(name)
        expected[name] = output(model)
    model.set_active_adapters("slot")
    base = output(model)
    for name, found in expected.items():
        model.load_adapter(tmp_path / name, load_as="slot", hotswap=True)
        torch.testing.assert_close(output(model), found, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(found, base, atol=1e-4)


def test_an_argument_that_is_not_legal_changes_nothing(tmp_path):
    ((path, _),) = saved(tmp_path, "lora")
    model = made(slot="lora")
    with refused(model, UnknownNameError, "'nothing'", "Known config strings"):
        model.load_adapter(path, config="nothing", load_as="slot", hotswap=True)


def test_the_facts_of_the_file_are_kept(tmp_path):
    writer = made(a="lora[r=2]")
    writer.save_adapter(tmp_path, "a", meta_dict={"task": "new"})
    model = made(slot="lora")
    model.load_adapter(tmp_path, load_as="slot", hotswap=True, set_active=True)
    assert model._adapter_state.records["slot"].meta == {"task": "new"}
    assert "slot" in model.active_adapters
