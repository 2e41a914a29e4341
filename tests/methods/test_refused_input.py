"""What a user may write that cannot be: each is an error with the value and what to write instead.

Nothing has changed then. Values of single fields beyond their bounds are in test_config_fields.
"""

import json
import warnings

import pytest
import torch
from architectures.tiny_models import tiny_model
from families import tiny_config
from safetensors.torch import load_file, save_file
from snapshots import of_adapter, refused, state, stir
from transformers import AutoModel

from adapterzoo import init
from adapterzoo.errors import (
    AdapterZooError,
    CheckpointError,
    ConfigError,
    SiteError,
    UnknownNameError,
)
from adapterzoo.formats import files, native


def made(family="bert", auto=AutoModel, **configs):
    torch.manual_seed(0)
    model = init(auto.from_config(tiny_config(family)).eval())
    for name, config in configs.items():
        model.add_adapter(name, config)
        stir(model, name)
    return model


# --- configs ---

# family, config, error, value, hint; the model has two blocks of width 32
CONFIGS = [
    # lengths
    ("bert", "prefix_tuning[prefix_length=0]", ConfigError, "from 1 to", "prefix_length=1"),
    ("bert", "prefix_tuning[prefix_length=99999]", ConfigError, "=99999", "prefix_length=65536"),
    ("bert", "prefix_tuning[bottleneck_size=0]", ConfigError, "size=0", "bottleneck_size=1"),
    # ranks
    ("bert", "lora[r=0]", ConfigError, "LoRAConfig(r=0)", "r=1"),
    ("bert", "lora[r=2.5]", ConfigError, "r=2.5", "r=8"),
    ("bert", "dora[r=70000]", ConfigError, "r=70000", "r=65536"),
    ("bert", "vera[r=True]", ConfigError, "r=True", "r=256"),
    ("bert", "ia3[r=2]", ConfigError, "IA3Config(r=2)", "r=1"),
    ("bert", "loreft[r=33]", ConfigError, "have 32 features", "r=32 or less"),
    ("bert", "direft[r=0]", ConfigError, "DiReftConfig(r=0)", "r=1"),
    # positions
    ("bert", "loreft[prefix_positions=-1]", ConfigError, "=-1", "prefix_positions=0"),
    ("bert", "noreft[prefix_positions=0]", ConfigError, "nothing is left", "prefix_positions=3"),
    ("bert", "loreft[suffix_positions=70000]", ConfigError, "=70000", "suffix_positions=65536"),
    ("bert", "prefix_tuning[positions='moved']", ConfigError, "'moved'", "positions='kept'"),
    # widths that do not divide
    ("bert", "boft[boft_block_size=7]", ConfigError, "not legal for d_in=32", "block_size=8"),
    ("bert", "boft[boft_block_num=5]", ConfigError, "not legal for d_in=32", "block_num=8"),
    ("bert", "boft[boft_n_butterfly_factor=9]", ConfigError, "boft_block_size=4", "factor=1"),
    ("bert", "seq_bn[reduction_factor=0]", ConfigError, "factor=0", "reduction_factor=16"),
    ("bert", "seq_bn_inv[inv_adapter_reduction_factor=99]", ConfigError, "=99", "factor=2"),
    # layers that do not exist
    ("bert", "lora[leave_out=[99]]", ConfigError, "leave_out=[99]", "Write leave_out=[1]"),
    ("bert", "lora[layers_to_transform=[0,2]]", ConfigError, "no block 2", "transform=[0]"),
    ("bert", "dora[leave_out=[1,2]]", ConfigError, "the model has 2", "leave_out=[1]"),
    ("bert", "boft[leave_out=[5]]", ConfigError, "no block 5", "leave_out=[1]"),
    ("bert", "vera[layers_to_transform=[7]]", ConfigError, "no block 7", "transform=[1]"),
    ("bert", "ia3[leave_out=[2]]", ConfigError, "no block 2", "leave_out=[1]"),
    ("bert", "loreft[layers=[0,7]]", ConfigError, "no block 7", "layers=[0]"),
    ("bert", "loreft[layers=[]]", ConfigError, "nothing is left", "layers='all'"),
    ("bert", "prefix_tuning[leave_out=[2]]", ConfigError, "no block 2", "leave_out=[1]"),
    ("t5", "prefix_tuning[leave_out=[3,4]]", ConfigError, "the model has 4", "leave_out=[3]"),
    ("bert", "seq_bn[leave_out=[2]]", ConfigError, "no block 2", "leave_out=[1]"),
    ("bert", "double_seq_bn[leave_out=[2]]", ConfigError, "no block 2", "leave_out=[1]"),
    ("bert", "par_bn[leave_out=[2]]", ConfigError, "no block 2", "leave_out=[1]"),
    ("bert", "adapter_plus[leave_out=[2]]", ConfigError, "no block 2", "leave_out=[1]"),
    ("bert", "seq_bn_inv[leave_out=[2]]", ConfigError, "no block 2", "leave_out=[1]"),
    ("bert", "mam[leave_out=[2]]", ConfigError, "no block 2", "leave_out=[1]"),
    ("bert", "seq_bn|lora[leave_out=[9]]", ConfigError, "LoRAConfig(leave_out=[9])", "[1]"),
    # all layers left out
    ("bert", "lora[leave_out=[0,1]]", SiteError, "exclude every layer", "fewer of them"),
    ("bert", "double_seq_bn[leave_out=[0,1]]", SiteError, "left by leave_out", "shorter"),
    ("bert", "prefix_tuning[leave_out=[0,1]]", SiteError, "leave_out leaves no", "shorter"),
    # a method at a site that the model lacks
    ("deberta-v2", "prefix_tuning", SiteError, "computes scores by itself", "LoRAConfig()"),
    ("vit", "prefix_tuning[positions='shifted']", SiteError, "no module", "positions='kept'"),
    ("clip", "prefix_tuning[positions='shifted']", SiteError, "position_embedding", "'kept'"),
    ("bert", "seq_bn[cross_adapter=True]", SiteError, "has such a part", "cross_adapter=False"),
    ("bert", "lora[target_modules=['nope']]", SiteError, "'nope'", "'all-linear'"),
    ("bert", "vera[target_modules=['word_embeddings']]", ConfigError, "an embedding", "exclude"),
    ("bert", "ia3[target_modules=['word_embeddings'],feedforward_modules=['word_embeddings']]",
     ConfigError, "token numbers", "Leave it out"),
    ("bert", "ia3[output_lora=True]", ConfigError, "output_lora=True", "convention='adapterhub'"),
    ("bert", "lora[attn_matrices=[]]", ConfigError, "nothing is left", "all-linear"),
    ("bert", "seq_bn_inv[inv_adapter='glow']", ConfigError, "'glow'", "inv_adapter='nice'"),
    # what is no config
    ("bert", "prefix_tunning", UnknownNameError, "'prefix_tunning'", "Did you mean"),
    ("bert", "mam[r=3]", ConfigError, "no field 'r'", "Write one of these"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "config", "error", "value", "hint"), CONFIGS, ids=[" ".join(c[:2]) for c in CONFIGS]
)
def test_what_a_model_cannot_have_is_refused(family, config, error, value, hint):
    model = made(family)
    with pytest.raises(AdapterZooError) as raised:
        model.add_adapter("a", config)
    assert isinstance(raised.value, error)
    for part in ("add_adapter('a'", value, hint):
        assert part in str(raised.value)
    assert str(raised.value).count("add_adapter") == 1
    assert not any(of_adapter(key) for key in model.state_dict())
    assert not model.adapters_config


TYPES = [
    # no gradient would reach the function, or no input
    ("maskformer", "seq_bn_inv", "zeros", "inv_adapter=None"),
    ("mimi", "seq_bn_inv", "quantized", "inv_adapter=None"),
    pytest.param(
        "sam3_lite_text", "seq_bn_inv", "boxes", "inv_adapter=None",
        marks=pytest.mark.needs("transformers>=5.24", "it had no SAM 3 Lite"),
    ),
    # the stream in front of attention is in no module
    ("higgs_audio_v2", "double_seq_bn", "tokens of text and of audio", "leave_out"),
    # blocks that cut their tokens into windows, or count them
    ("levit", "prompt_tuning[joins='embeddings']", "a grid of patches", "LoRAConfig()"),
    ("longformer", "prompt_tuning[joins='embeddings']", "whole windows", "joins='inputs'"),
    ("yolos", "prompt_tuning[joins='embeddings']", "positions", "LoRAConfig()"),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "config", "value", "hint"), TYPES)
def test_what_an_architecture_cannot_have_is_refused(model_type, config, value, hint):
    model = init(tiny_model(model_type).model)
    with pytest.raises(SiteError) as raised:
        model.add_adapter("a", config)
    for part in ("add_adapter('a'", value, hint):
        assert part in str(raised.value)


def test_nothing_that_is_there_changes():
    model = made(a="lora")
    with refused(model, ConfigError, "leave_out=[99]", "Write leave_out=[1]"):
        model.add_adapter("a", "lora[leave_out=[99]]", overwrite_ok=True)


def test_a_file_may_leave_out_layers_that_the_model_lacks(tmp_path):
    """Its author had them; what it has here is what was trained."""
    model = made(a="lora[leave_out=[1]]")
    model.save_adapter(tmp_path, "a", format="adapterhub")
    file = tmp_path / "adapter_config.json"
    values = json.loads(file.read_text())
    values["config"]["leave_out"] = [1, 9]
    file.write_text(json.dumps(values))
    model.load_adapter(tmp_path, load_as="b")
    assert model.adapters_config["b"].leave_out == (1, 9)


# --- forwards ---


def test_a_mask_of_zeros_leaves_a_prefix_alone_to_see():
    model = made("llama", a="prefix_tuning[prefix_length=3,flat=True]")
    model.set_active_adapters("a")
    mask = torch.zeros(2, 5, dtype=torch.long)
    with torch.no_grad():
        out = model(input_ids=torch.ones(2, 5, dtype=torch.long), attention_mask=mask)[0]
    assert out.isfinite().all()


# --- files ---

FILES = {
    "lora": "lora[r=4]",
    "dora": "dora[r=4]",
    "boft": "boft",
    "oft": "oft[oft_block_size=4]",
    "miss": "miss[r=4]",
    "vera": "vera[r=4]",
    "dvora": "dvora[r=4]",
    "ia3": "ia3",
    "loha": "loha[r=2]",
    "lokr": "lokr[r=2]",
    "seq_bn": "seq_bn[reduction_factor=4]",
    "seq_bn_inv": "seq_bn_inv[reduction_factor=4]",
    "compacter": "compacter[reduction_factor=4]",
    "loreft": "loreft[r=2]",
    "prefix_tuning": "prefix_tuning[prefix_length=3,bottleneck_size=4]",
    "prefix_tuning_flat": "prefix_tuning_flat[prefix_length=3]",
    "mam": "prefix_tuning[prefix_length=3,bottleneck_size=4]|par_bn[reduction_factor=4]",
}


def spoiled(tensors, how):
    """The key that does not fit, what a file has there, and what the model has."""
    key = next(key for key in sorted(tensors) if tensors[key].dim())
    if how == "missing":
        del tensors[key]
    elif how == "surplus":
        key = f"{key}_more"
        tensors[key] = torch.ones(3)
    elif how == "misshapen":
        tensors[key] = torch.ones(*tensors[key].shape[:-1], tensors[key].shape[-1] + 1)
    return key


SPOILED = {
    "missing": "in the model only",
    "surplus": "in the file only",
    "misshapen": "model [",
}


@pytest.mark.parametrize("how", SPOILED)
@pytest.mark.parametrize("method", FILES)
def test_native_files_that_do_not_fit_are_refused(method, how, tmp_path):
    model = made(a=FILES[method])
    model.save_adapter(tmp_path, "a")
    metadata, tensors = native.read(tmp_path / "adapter.safetensors")
    key = spoiled(tensors, how)
    metadata = native.hashed(metadata, tensors)
    files.write_tensors(tmp_path / "adapter.safetensors", metadata, tensors)
    del metadata["sha256"]
    (tmp_path / "adapter_config.json").write_text(json.dumps(metadata))
    says = ("difference", "nothing has been loaded", key, SPOILED[how])
    with refused(model, CheckpointError, f"load_adapter({str(tmp_path)!r})", *says):
        model.load_adapter(tmp_path, load_as="b")


HUB = {
    name: FILES[name]
    for name in FILES
    if name not in ("boft", "oft", "miss", "dora", "vera", "dvora", "ia3", "loha", "lokr", "loreft")
}
HUB["ia3"] = "ia3[convention='adapterhub']"
HUB["vera"] = "vera[r=4,convention='adapterhub']"
HUB["dvora"] = "dvora[r=4,convention='adapterhub']"
for _name in ("prefix_tuning", "prefix_tuning_flat"):
    HUB[_name] = HUB[_name].replace("prefix_length", "convention='adapterhub',prefix_length")
HUB["mam"] = HUB["mam"].replace("bottleneck_size", "convention='adapterhub',bottleneck_size")
HUB["loreft"] = "loreft[r=2]"


@pytest.mark.parametrize("how", SPOILED)
@pytest.mark.parametrize("method", HUB)
def test_files_of_adapters_that_do_not_fit_are_refused(method, how, tmp_path):
    model = made(a=HUB[method])
    model.save_adapter(tmp_path, "a", format="adapterhub")
    file = tmp_path / "pytorch_adapter.bin"
    tensors = torch.load(file, weights_only=True)
    spoiled(tensors, how)
    torch.save(tensors, file)
    with refused(model, CheckpointError, f"load_adapter({str(tmp_path)!r})", SPOILED[how]):
        model.load_adapter(tmp_path, load_as="b")


PEFT = {
    name: FILES[name]
    for name in ("lora", "dora", "boft", "oft", "miss", "vera", "ia3", "loha", "lokr")
}
PEFT["prefix_tuning"] = "prefix_tuning_flat[prefix_length=3,positions='shifted']"


@pytest.mark.parametrize("how", SPOILED)
@pytest.mark.parametrize("method", PEFT)
def test_files_of_peft_that_do_not_fit_are_refused(method, how, tmp_path):
    if how == "missing" and method in ("ia3", "oft", "miss"):
        pytest.skip("a layer without its only tensor is one without an adapter")
    model = made("gpt2" if method == "prefix_tuning" else "bert", a=PEFT[method])
    model.save_adapter(tmp_path, "a", format="peft")
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    spoiled(tensors, how)
    save_file(tensors, file)
    with refused(model, CheckpointError, f"load_adapter({str(tmp_path)!r})", "file"):
        model.load_adapter(tmp_path, load_as="b")


def shapes_beside(shape):
    """Shapes that are not this one."""
    yield (*shape[:-1], shape[-1] + 1)
    yield (*shape, 2)
    if len(shape) > 1:
        yield (shape[0] + 1, *shape[1:])
        yield (torch.Size(shape).numel(),)


WRITTEN = [("adapterhub", method) for method in HUB] + [("peft", method) for method in PEFT]


@pytest.mark.parametrize(("name", "method"), WRITTEN)
def test_every_tensor_must_have_its_shape(name, method, tmp_path):
    """One of each kind, in shapes that a reader might multiply with others before it compares."""
    config = (PEFT if name == "peft" else HUB)[method]
    model = made("gpt2" if "positions" in config else "bert", a=config)
    model.save_adapter(tmp_path, "a", format=name)
    if name == "peft":
        file = tmp_path / "adapter_model.safetensors"
        tensors, save = load_file(file), save_file
    else:
        file = tmp_path / "pytorch_adapter.bin"
        tensors, save = torch.load(file, weights_only=True), torch.save
    before = state(model)
    kinds = {tuple(key.split(".")[-2:]): key for key in reversed([*tensors])}
    for key in kinds.values():
        for shape in shapes_beside(tensors[key].shape):
            if key.endswith("boft_R") and shape[1:] == tensors[key].shape[1:]:
                continue  # more factors, which the tensors tell
            save({**tensors, key: torch.ones(*shape)}, file)
            # the number of BOFT's factors is that of the tensors, with a warning
            with (
                pytest.raises(CheckpointError, match="load_adapter"),
                warnings.catch_warnings(action="ignore"),
            ):
                model.load_adapter(tmp_path, load_as="b")
    assert state(model) == before
