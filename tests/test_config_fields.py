"""A wrong field of any config is an error of this library that names it, and those there are."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import adapterzoo.methods
from adapterzoo import AdapterConfig, BnConfig, ConfigUnion, LoRAConfig, SeqBnConfig
from adapterzoo.config import Range, field
from adapterzoo.errors import ConfigError, SiteError
from adapterzoo.heads._base import HeadConfig
from adapterzoo.heads.pooled import ClassificationConfig
from adapterzoo.methods.fusion import AdapterFusionConfig


def family(cls: type) -> Iterator[type]:
    """The class and all below it that the library defines."""
    yield cls
    for child in cls.__subclasses__():
        if child.__module__.startswith("adapterzoo."):
            yield from family(child)


CONFIGS = sorted(
    {
        cls
        for root in (AdapterConfig, AdapterFusionConfig, HeadConfig)
        for cls in family(root)
        if not issubclass(cls, ConfigUnion)
    },
    key=lambda cls: cls.__name__,
)


@pytest.mark.parametrize("cls", CONFIGS, ids=lambda cls: cls.__name__)
def test_an_unknown_field_is_named_with_those_that_are_there(cls: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        cls(bogus=1)
    assert str(caught.value).startswith(f"{cls.__name__}(bogus=1): there is no field 'bogus'.")
    fields = [field.name for field in dataclasses.fields(cls)]
    assert all(repr(name) in str(caught.value) for name in fields)


def test_the_list_of_configs_is_not_empty_of_what_users_write() -> None:
    assert {LoRAConfig, BnConfig, AdapterFusionConfig, ClassificationConfig} <= {*CONFIGS}


def test_a_close_field_is_suggested() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'attn_matrices'"):
        LoRAConfig(attn_matrixes=["q"])  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="Did you mean 'num_labels'"):
        ClassificationConfig(num_label=2)  # type: ignore[call-arg]


def test_a_config_string_is_named_as_it_was_written() -> None:
    with pytest.raises(ConfigError) as caught:
        AdapterConfig.load("lora[alfa=1]")
    assert str(caught.value).startswith("config='lora[alfa=1]': there is no field 'alfa'.")
    assert "Did you mean 'alpha'?" in str(caught.value)


def test_a_field_without_its_name_and_a_missing_one_are_told() -> None:
    with pytest.raises(ConfigError, match=r"LoRAConfig\(8\): too many positional"):
        LoRAConfig(8)  # type: ignore[call-arg, misc]
    with pytest.raises(ConfigError, match=r"BnConfig\(\): missing a required"):
        BnConfig()  # type: ignore[call-arg]


def test_a_union_takes_no_fields() -> None:
    with pytest.raises(ConfigError, match=r"there is no field 'bogus'"):
        ConfigUnion(SeqBnConfig(), LoRAConfig(), bogus=1)  # type: ignore[call-arg]


class Undecorated(LoRAConfig):
    rate: int = field(3, Range(1, 9))


class Nowhere(LoRAConfig):
    def placements(self, anatomy: Any) -> list[Any]:
        return []


def test_a_config_that_its_author_left_unfinished_says_what_to_write() -> None:
    with pytest.raises(ConfigError, match=r"declares fields.* Write @method_config\('name'\)"):
        Undecorated()
    model = adapterzoo.init(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    with pytest.raises(SiteError, match="the placements of Nowhere in this Sequential are empty"):
        model.add_adapter("a", Nowhere())
    assert "a" not in model.adapters_config


def test_a_type_error_of_a_class_itself_stays() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Broken(LoRAConfig):
        def __post_init__(self) -> None:
            len(3)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="has no len") as caught:
        Broken()
    assert not isinstance(caught.value, ConfigError)
    with pytest.raises(TypeError, match="abstract"):
        AdapterConfig()  # type: ignore[abstract]


@pytest.mark.parametrize("cls", CONFIGS, ids=lambda cls: cls.__name__)
def test_the_signature_that_help_shows_is_that_of_the_fields(cls: Any) -> None:
    assert [*inspect.signature(cls).parameters] == [f.name for f in dataclasses.fields(cls)]


# a legal value for each field that has no default
NEEDED: dict[str, Any] = {
    "mh_adapter": True, "output_adapter": True, "reduction_factor": 2, "non_linearity": "relu",
    "num_labels": 2, "model_class": "BertForMaskedLM", "target_tokens": (1,), "token_indices": (1,),
}  # fmt: skip
CONCRETE = [cls for cls in CONFIGS if not inspect.isabstract(cls)]


@pytest.mark.parametrize("cls", CONCRETE, ids=lambda cls: cls.__name__)
def test_a_config_is_what_dataclass_makes_of_it(cls: Any) -> None:
    needed = {
        f.name: NEEDED[f.name]
        for f in dataclasses.fields(cls)
        if f.default is f.default_factory is dataclasses.MISSING
    }
    plain: Any = dataclasses.dataclass(frozen=True, kw_only=True)
    # with the functions that dataclass generates
    theirs = plain(type(cls)("Plain", (cls,), {"__qualname__": cls.__qualname__}))
    config, other = cls(**needed), theirs(**needed)
    assert repr(config) == repr(other)
    assert config == other
    assert hash(config) == hash(other)
    assert inspect.signature(cls) == inspect.signature(theirs)
    assert inspect.signature(cls.__init__) == inspect.signature(theirs.__init__)
    assert cls.__match_args__ == theirs.__match_args__ == ()
    assert dataclasses.fields(cls) == dataclasses.fields(theirs)
    assert dataclasses.replace(config) == config


def test_a_config_that_holds_itself_is_shown() -> None:
    config = LoRAConfig()
    object.__setattr__(config, "rank_pattern", config)
    assert "rank_pattern=..." in repr(config)


@pytest.mark.parametrize(
    "config",
    [
        LoRAConfig(r=4),
        BnConfig(mh_adapter=True, output_adapter=True, reduction_factor=4, non_linearity="relu"),
        ConfigUnion(SeqBnConfig(), LoRAConfig()),
        ClassificationConfig(num_labels=3),
    ],
    ids=lambda config: type(config).__name__,
)
def test_copies_and_pickles_need_no_fields(config: Any) -> None:
    assert adapterzoo.methods
    for again in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert again == config
