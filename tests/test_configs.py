"""Configs: strings, dicts, files and constructors say the same; nothing illegal gets in."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from pathlib import Path

import pytest

import adapterzoo
from adapterzoo import (
    AdapterConfig,
    AdapterFusionConfig,
    AdapterPlusConfig,
    BnConfig,
    ConfigUnion,
    DoubleSeqBnConfig,
    IA3Config,
    LoRAConfig,
    MAMConfig,
    ParBnConfig,
    PrefixTuningConfig,
    SeqBnConfig,
)
from adapterzoo.config import MAX_WIDTH, architectures
from adapterzoo.errors import ConfigError, DuplicateNameError, FieldError, UnknownNameError
from adapterzoo.heads import TaggingConfig
from adapterzoo.registry import Registry

SPECIAL = [
    LoRAConfig(r=3, alpha=1.5, attn_matrices=("k",), rank_pattern={"query": 2}, dtype="float32"),
    LoRAConfig(target_modules=["query", "value"], layers_to_transform=[1], use_rslora=True),
    LoRAConfig(target_modules=".*query", exclude_modules="pooler", leave_out=[0]),
    BnConfig(mh_adapter=True, output_adapter=False, reduction_factor=4, non_linearity="gelu"),
    SeqBnConfig(reduction_factor={"0": 8, "default": 16.5}, scaling="learned"),
    ParBnConfig(leave_out=(1, 2), init_weights_seed=0),
    ConfigUnion(SeqBnConfig(), LoRAConfig(r=2)),
]


# those of plain strings: dict_round_trip and repr_is_a_call of adapterzoo.testing
@pytest.mark.parametrize("config", SPECIAL, ids=lambda config: repr(config)[:40])
def test_a_config_goes_through_json_repr_and_pickle(config):
    written = json.dumps(config.to_dict(), allow_nan=False)
    read = AdapterConfig.from_dict(json.loads(written))
    assert read == config
    if isinstance(config, BnConfig):
        assert hash(read) == hash(config)
    assert read.to_dict() == config.to_dict()
    assert AdapterConfig.load(json.loads(written)) == config
    assert eval(repr(config), vars_of_package()) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.replace() == config


def vars_of_package():
    names = [name for name in dir(adapterzoo) if name.endswith("Config") or name == "ConfigUnion"]
    return {name: getattr(adapterzoo, name) for name in names}


def test_strings_mean_what_the_classes_mean():
    load = AdapterConfig.load
    assert load(None) == load("seq_bn") == load("pfeiffer") == SeqBnConfig()
    assert load("double_seq_bn") == load("houlsby") == DoubleSeqBnConfig()
    assert load("par_bn") == load("parallel") == ParBnConfig()
    assert load("scaled_par_bn") == ParBnConfig(scaling="learned")
    assert load("adapter_plus") == AdapterPlusConfig()
    assert load("lora") == load("lora[]") == LoRAConfig()
    assert load("lora[r=16,alpha=32]") == LoRAConfig(r=16, alpha=32)
    assert load(" lora[ r = 16 , use_rslora = True ] ") == LoRAConfig(r=16, use_rslora=True)
    assert load('lora[attn_matrices=["q","k"],dropout=0.1]') == LoRAConfig(
        attn_matrices=("q", "k"), dropout=0.1
    )
    assert load('lora[target_modules="(a|b)"]') == LoRAConfig(target_modules="(a|b)")
    assert load('seq_bn[reduction_factor={"0":8,"default":16}]') == SeqBnConfig(
        reduction_factor={"0": 8, "default": 16}
    )
    # bars and brackets in quotes are no others'
    assert load('lora[target_modules="query|[kv]ey"]|seq_bn') == ConfigUnion(
        LoRAConfig(target_modules="query|[kv]ey"), SeqBnConfig()
    )
    assert load('lora[target_modules="q|v",layers_to_transform=[0]]') == LoRAConfig(
        target_modules="q|v", layers_to_transform=(0,)
    )
    assert load("mam") == ConfigUnion(PrefixTuningConfig(bottleneck_size=800), ParBnConfig())
    assert load("unipelt[convention='adapterhub']") == ConfigUnion(
        PrefixTuningConfig(prefix_length=10, use_gating=True, convention="adapterhub"),
        SeqBnConfig(use_gating=True, convention="adapterhub"),
        LoRAConfig(r=8, alpha=8, use_gating=True, convention="adapterhub"),
    )
    assert load("mam|lora").members == (*load("mam").members, LoRAConfig())
    assert load("seq_bn|lora[r=2]") == ConfigUnion(SeqBnConfig(), LoRAConfig(r=2))
    assert load("par_bn[leave_out=[0,1]] | lora") == ConfigUnion(
        ParBnConfig(leave_out=(0, 1)), LoRAConfig()
    )
    config = LoRAConfig(r=5)
    assert load(config) is config


def test_a_config_is_read_like_a_mapping():
    config = LoRAConfig(r=3, leave_out=[1])
    assert config["r"] == config.get("r") == 3
    assert config["architecture"] == config.get("architecture") == "lora"
    assert config["leave_out"] == (1,)
    assert config.get("rank") is None
    assert config.get("rank", 8) == 8
    assert "r" in config
    assert "rank" not in config
    assert dict(config) == dict(**config)
    assert LoRAConfig(**{k: v for k, v in dict(config).items() if k != "architecture"}) == config
    assert TaggingConfig(num_labels=3)["head_type"] == "tagging"
    assert AdapterFusionConfig.load("static")["value"] is False
    assert len(ConfigUnion(SeqBnConfig(), LoRAConfig())["configs"]) == 2


def test_a_field_that_does_not_exist_cannot_be_read():
    with pytest.raises(KeyError, match=r"there is no field 'rr'\. Did you mean 'r'") as caught:
        LoRAConfig()["rr"]
    assert isinstance(caught.value, UnknownNameError)


@pytest.mark.parametrize(
    "config",
    [LoRAConfig(), SeqBnConfig(), ConfigUnion(SeqBnConfig(), LoRAConfig()), TaggingConfig(),
     AdapterFusionConfig()],
    ids=lambda config: type(config).__name__,
)  # fmt: skip
def test_a_config_cannot_be_changed(config):
    name = dataclasses.fields(config)[0].name
    before = config.to_dict()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, name, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        delattr(config, name)
    with pytest.raises(TypeError, match="item assignment"):
        config[name] = None
    assert config.to_dict() == before


def test_loading_takes_changes_of_fields():
    load = AdapterConfig.load
    assert load("seq_bn", reduction_factor=2) == SeqBnConfig(reduction_factor=2)
    assert load(None, reduction_factor=2) == SeqBnConfig(reduction_factor=2)
    assert load("lora[r=4,alpha=2]", r=5) == LoRAConfig(r=5, alpha=2)
    assert load(LoRAConfig(r=4).to_dict(), alpha=1) == LoRAConfig(r=4, alpha=1)
    assert AdapterFusionConfig.load("static", key=False)["key"] is False
    with pytest.raises(ConfigError, match="there is no field 'rank'"):
        load("lora", rank=4)


def test_a_config_is_loaded_from_a_json_file(tmp_path):
    config = LoRAConfig(r=3, rank_pattern={"query": 2})
    path = tmp_path / "my_config.json"
    path.write_text(json.dumps(config.to_dict()))
    assert AdapterConfig.load(path) == AdapterConfig.load(str(path)) == config
    assert AdapterConfig.load(str(path), r=4).r == 4
    # as it is saved beside an adapter
    path.write_text(json.dumps({"config": config.to_dict(), "name": "a"}))
    assert AdapterConfig.load(path) == config
    for text in ("{", "[" * 10_000, "[1]", "5", '{"architecture": "lora", "rank": 2}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="Write "):
            AdapterConfig.load(path)
    for missing in (tmp_path / "none.json", tmp_path, "none.json"):
        with pytest.raises(ConfigError, match="not a JSON file"):
            AdapterConfig.load(missing)


def test_every_class_is_checked_by_the_table_of_its_fields():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Small(LoRAConfig):
        r: int = 2
        switch: bool = False

    assert Small() == Small(r=2)
    assert hash(Small()) == hash(Small(r=2))
    for wrong in ({"r": 0}, {"switch": 1}, {"use_gating": "yes"}):
        with pytest.raises(ConfigError, match=rf"Small\({next(iter(wrong))}="):
            Small(**wrong)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("lora[8]", "field=value"),
        ("lora[8]", "Write 'lora' without them."),
        ("lora[r=8,r=9]", "field=value"),
        ("lora[r=]", "field=value"),
        ("lora[r=8)+f(r=9]", "field=value"),
        ("lora[r=8)(alpha=9]", "field=value"),
        ("lora[r=8) #]", "field=value"),
        ("lora[r={[]: 1}]", "field=value"),
        ("lora[r=" + "-" * 100_000 + "1]", "field=value"),
        ("lora[r=8\0]", "field=value"),
        ("lora[r=x]", "field=value"),
        ("lora[init_weights=pissa]", "'text' in quotes"),
        ("lora[" + "(" * 5000 + "]", "field=value"),
        ("lora[rank=8]", "Its fields: "),
        ("lora[**{'rank': 8}]", "Its fields: "),
        ("scaled_par_bn[nope=8]", "nope"),
        ("lora[r=0]", "Write r=1."),
    ],
)
def test_a_wrong_string_is_refused(text, hint):
    with pytest.raises(ConfigError) as caught:
        AdapterConfig.load(text)
    assert hint in str(caught.value)


def test_a_dict_without_its_kind_says_that_it_may_have_one():
    with pytest.raises(FieldError, match="For another method, add 'architecture' to the dict"):
        AdapterConfig.load({"r": 8})


def test_a_string_runs_no_code(tmp_path):
    file = tmp_path / "made"
    for value in (f"open({str(file)!r},'w')", f"__import__('pathlib').Path({str(file)!r}).touch()"):
        with pytest.raises(ConfigError, match="field=value"):
            AdapterConfig.load(f"lora[r={value}]")
    assert not Path(file).exists()


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("lroa", "Did you mean 'lora'?"),
        ("seq_bm[reduction_factor=2]", "Did you mean 'seq_bn'?"),
        ("zzz", "Known config strings: "),
        ("lora[r=8", "'lora[r=8'"),
        ("lora]", "'lora]'"),
        ("", "''"),
        ("seq_bn|", "''"),
        ({"architecture": "lroa"}, "Did you mean 'lora'?"),
        ({"architecture": "zzz"}, "Known architectures: "),
    ],
)
def test_an_unknown_method_is_met_with_the_known_ones(asked, says):
    with pytest.raises(UnknownNameError) as caught:
        AdapterConfig.load(asked)
    assert says in str(caught.value)


@pytest.mark.parametrize("asked", [5, LoRAConfig, ["lora"], b"lora", True])
def test_what_is_no_config_is_refused(asked):
    with pytest.raises(ConfigError) as caught:
        AdapterConfig.load(asked)
    assert repr(asked) in str(caught.value)
    assert "Write config='seq_bn'" in str(caught.value)


@pytest.mark.parametrize(
    "asked",
    [
        {"architecture": "lora", "rank": 8},
        {"architecture": "lora", "r": 8, 5: 1},
        {"architecture": ["lora"]},
        {"architecture": "lora", "attn_matrices": 5},
        {"architecture": "lora", "rank_pattern": 5},
        {"architecture": "lora", "alpha": None},
        {"architecture": "union"},
        {"architecture": "union", "configs": 5},
        {"architecture": "union", "configs": [5, 6]},
        {"architecture": "union", "configs": ["lora", "seq_bn"], "r": 3},
        {"reduction_factor": 16},
        {**SeqBnConfig().to_dict(), "reduction_factor": [16]},
        {**SeqBnConfig().to_dict(), "mh_adapter": 1},
        {**SeqBnConfig().to_dict(), "non_linearity": 5},
    ],
)
def test_a_dict_of_anything_else_is_refused(asked):
    with pytest.raises((ConfigError, UnknownNameError)):
        AdapterConfig.load(asked)


def test_a_field_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(ConfigError) as caught:
        AdapterConfig.load({"architecture": "lora", "rank": 8, "lora_alfa": 2})
    text = str(caught.value)
    assert "there is no field 'lora_alfa', 'rank'" in text
    assert all(repr(field.name) in text for field in dataclasses.fields(LoRAConfig))
    with pytest.raises(ConfigError, match="there is no field 'rank'"):
        LoRAConfig().replace(rank=3)


@pytest.mark.parametrize(
    ("r", "near"),
    [(0, 1), (-1, 1), (10**9, MAX_WIDTH), (MAX_WIDTH + 1, MAX_WIDTH), (True, 8), (8.5, 8), ("8", 8),
     (None, 8), (math.nan, 8), (math.inf, MAX_WIDTH)],
)  # fmt: skip
def test_a_rank_out_of_bounds_is_refused(r, near):
    for make in (lambda: LoRAConfig(r=r), lambda: LoRAConfig(rank_pattern={"query": r})):
        with pytest.raises(ConfigError) as caught:
            make()
        assert f"r={r!r}" in str(caught.value)
        assert f"from 1 to {MAX_WIDTH}" in str(caught.value)
        assert f"Write r={near}." in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "hint"),
    [
        ("alpha", math.inf, "Write alpha="),
        ("dropout", 1.0, "Write dropout="),
        ("dropout", -0.1, "Write dropout=0.0"),
        ("init_weights", "pizza", "Write init_weights='lora'"),
        ("dtype", "int8", "Write dtype=None"),
        ("attn_matrices", ("q", "z"), "Write attn_matrices=['q', 'v']"),
        ("attn_matrices", (), "Write target_modules='all-linear'"),
        ("leave_out", (-1,), "Write leave_out=[0, 1]"),
        ("leave_out", ("0",), "Write leave_out=[0, 1]"),
        ("leave_out", "0", "Write leave_out=[0, 1]"),
        ("layers_to_transform", (0.5,), "Write layers_to_transform=[0, 1]"),
        ("target_modules", (), "Write target_modules='all-linear'"),
        ("target_modules", ("",), "Write target_modules=['query', 'value']"),
        ("target_modules", 5, "Write target_modules=['query', 'value']"),
        ("target_modules", "(", "not a regular expression"),
        ("exclude_modules", "[", "not a regular expression"),
        ("rank_pattern", {"(": 4}, "not a regular expression"),
        ("alpha_pattern", {"(": 4}, "not a regular expression"),
        ("alpha", math.nan, "Write alpha=8"),
    ],
)
def test_a_value_that_is_not_legal_is_refused(field, value, hint):
    for make in (LoRAConfig, LoRAConfig().replace):
        with pytest.raises(ConfigError) as caught:
            make(**{field: value})
        assert field in str(caught.value)
        assert hint in str(caught.value)


@pytest.mark.parametrize("alpha", [math.nan, math.inf, "16", None])
def test_patterns_hold_legal_values(alpha):
    with pytest.raises(ConfigError, match=r"LoRAConfig\(alpha=.*Write alpha="):
        LoRAConfig(alpha_pattern={"query": alpha})
    config = LoRAConfig(rank_pattern={"query": 2}, alpha_pattern={"value": 4})
    assert config.rank_at("a.query") == 2
    assert config.scaling_at("a.query") == 8 / 2
    assert config.scaling_at("a.value") == 4 / 8


@pytest.mark.parametrize(
    "members",
    [
        (),
        (SeqBnConfig(),),
        (SeqBnConfig(), "lora"),
        (SeqBnConfig(), LoRAConfig),
    ],
)
def test_a_union_wants_two_configs(members):
    with pytest.raises(ConfigError, match=r"Write ConfigUnion\("):
        ConfigUnion(*members)


def test_a_union_of_unions_has_the_members_of_all():
    inner = ConfigUnion(SeqBnConfig(), LoRAConfig())
    assert ConfigUnion(inner, IA3Config(), inner) == ConfigUnion(
        SeqBnConfig(), LoRAConfig(), IA3Config(), SeqBnConfig(), LoRAConfig()
    )
    assert ConfigUnion(inner) == inner
    document = {"architecture": "union", "configs": [inner.to_dict(), IA3Config().to_dict()]}
    assert AdapterConfig.from_dict(document) == AdapterConfig.load("seq_bn|lora|ia3")
    assert AdapterConfig.load("mam|lora") == ConfigUnion(MAMConfig(), LoRAConfig())
    # each makes adapters of its own
    same = LoRAConfig()
    twice = ConfigUnion(same, same)
    assert twice[0] == twice[1]
    assert twice[0] is not twice[1]


def test_a_union_is_read_like_a_mapping():
    """As in adapters: a member by its number, a field with the number in front."""
    union = ConfigUnion(SeqBnConfig(reduction_factor=8), LoRAConfig(r=3))
    assert union[0] == SeqBnConfig(reduction_factor=8)
    assert union[-1] == LoRAConfig(r=3)
    assert (union["architecture"], len(union["configs"])) == ("union", 2)
    assert union["1.r"] == union.get("1.r") == 3
    assert union.get("1.reduction_factor", 5) == 5
    assert next(iter(union)) == "0.architecture"
    assert "0.mh_adapter" in [*union]
    assert len(union) == len(union[0]) + len(union[1])
    assert dict(union)["0.reduction_factor"] == 8
    with pytest.raises(KeyError, match=r"'1\.rr'.*Did you mean '1\.r'"):
        union["1.rr"]
    with pytest.raises(IndexError):
        union[2]


def test_the_dict_of_a_union_has_a_list_and_nothing_else():
    for fields, says in (({"configs": 5}, "configs=5"), ({"configs": [], "r": 8}, "'r'")):
        with pytest.raises(ConfigError, match=rf"{says}.*not the dict of a union"):
            AdapterConfig.from_dict({"architecture": "union", **fields})


def test_a_union_is_the_identity_when_all_members_are():
    assert ConfigUnion(ParBnConfig(), LoRAConfig()).starts_as_identity
    assert not ConfigUnion(SeqBnConfig(), LoRAConfig()).starts_as_identity


def test_equal_fields_are_equal_configs_and_others_are_not():
    spelled = BnConfig(
        mh_adapter=False, output_adapter=True, reduction_factor=16, non_linearity="relu",
        original_ln_before=True,
    )  # fmt: skip
    assert spelled == SeqBnConfig()
    assert hash(spelled) == hash(SeqBnConfig())
    assert SeqBnConfig() != SeqBnConfig(reduction_factor=8)
    assert SeqBnConfig() != LoRAConfig()
    assert LoRAConfig(r=4) != LoRAConfig(r=8)
    assert SeqBnConfig(reduction_factor=16) != ParBnConfig(reduction_factor=16)


def test_every_config_of_a_method_is_registered_and_exported():
    classes = set(architectures.values())
    assert {BnConfig, LoRAConfig, ConfigUnion} <= classes
    for cls in classes:
        assert architectures[cls.architecture] is cls
        assert getattr(adapterzoo, cls.__name__) is cls


def test_a_config_that_nobody_registered_says_which_line_is_missing():
    with pytest.raises(UnknownNameError, match="architecture 'mine'") as caught:
        AdapterConfig.from_dict({"architecture": "mine"})
    assert "write @architectures.register('mine') above its config class" in str(caught.value)
    with pytest.raises(UnknownNameError) as caught:
        AdapterConfig.load("mine")
    assert "register" not in str(caught.value)


def test_a_registry_refuses_a_taken_name_and_keeps_what_it_had():
    registry: Registry[object] = Registry("thing")
    first, second = object(), object()
    registry.register("a", "b")(first)
    registry.register("a")(first)
    with pytest.raises(DuplicateNameError, match="Write another name"):
        registry.register("c", "b")(second)
    assert dict(registry) == {"a": first, "b": first}
