"""The plug-in interface of `adapters`: names of layers, for models where they are not found.

`init(model, interface=…)` compares the names with what anatomy finds, and uses them for layers that
it does not know.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import nn

from .anatomy import Anatomy, Role
from .config import AdapterConfig
from .errors import ConfigError, listing
from .folders.names import INTERFACE
from .spelling import adapterhub_spellings


class AdapterMethod:
    """The kinds of methods that an interface can allow.

    Attributes:
        examples: a config string for each kind whose name is not a config string.
    """

    bottleneck = "bottleneck"
    prefix_tuning = "prefix_tuning"
    lora = "lora"
    prompt_tuning = "prompt_tuning"
    reft = "reft"
    invertible = "invertible"

    examples: ClassVar[Mapping[Any, str]] = {
        bottleneck: "seq_bn",
        reft: "loreft",
        invertible: "seq_bn_inv",
    }

    @staticmethod
    def get_from_config(config: AdapterConfig) -> list[str]:
        """Return the kinds of methods in a config, under the names of `adapters`.

        Args:
            config: of an adapter; a method that `adapters` lacks has its own name.
        """
        found: list[str] = []
        for member in config.members:
            if member.get("inv_adapter"):
                found.append(AdapterMethod.invertible)
            spelling = adapterhub_spellings.get(member.architecture)
            if spelling is not None and spelling.added:
                continue
            name = member.architecture if spelling is None else spelling.architecture[0]
            found.append(name or AdapterMethod.bottleneck)
        return found


@dataclass
class AdapterModelInterface:
    """Where the layers of a model are, by their names.

    Attributes:
        adapter_methods: the kinds of methods that may be added, see `AdapterMethod`.
        model_embeddings: the embeddings, below the base model.
        model_layers: the list of blocks, below the base model.
        layer_self_attn: attention, below a block.
        layer_cross_attn: the same of cross-attention; None without one.
        attn_o_proj: the output projection, below attention.
        layer_intermediate_proj: the first feed-forward layer, below a block.
        layer_output_proj: the last one.
        attn_k_proj: keys, below attention; with `attn_q_proj` and `attn_v_proj`.
        attn_q_proj: queries.
        attn_v_proj: values.
        attn_qkv_proj: all three in one layer, instead of these.
        layer_pre_self_attn: the module that reads the residual stream before attention, below a
            block.
        layer_pre_cross_attn: the same of cross-attention.
        layer_pre_ffn: the same of the feed-forward part.
        layer_ln_1: the norm behind attention.
        layer_ln_2: the norm behind the feed-forward part.
        base_model: the base model, below the model; None: the path in the model's class.
    """

    adapter_methods: list[str]
    model_embeddings: str
    model_layers: str
    layer_self_attn: str
    layer_cross_attn: str | None
    attn_o_proj: str | None
    layer_intermediate_proj: str
    layer_output_proj: str
    attn_k_proj: str | None = None
    attn_q_proj: str | None = None
    attn_v_proj: str | None = None
    attn_qkv_proj: str | None = None
    layer_pre_self_attn: str | None = None
    layer_pre_cross_attn: str | None = None
    layer_pre_ffn: str | None = None
    layer_ln_1: str | None = None
    layer_ln_2: str | None = None
    base_model: str | None = None

    def __post_init__(self) -> None:
        """Check that attention has three input layers or one, each with one name.

        Raises:
            ConfigError: it has other layers, or two have one name.
        """
        given = [self.attn_q_proj, self.attn_k_proj, self.attn_v_proj, self.attn_o_proj]
        if twice := sorted({n for n in given if n is not None and given.count(n) > 1}):
            raise ConfigError(f"AdapterModelInterface: {twice[0]!r} names two layers. Name each.")
        apart = (self.attn_k_proj, self.attn_q_proj, self.attn_v_proj)
        if all(apart) == (self.attn_qkv_proj is not None):
            raise ConfigError(
                f"AdapterModelInterface(attn_qkv_proj={self.attn_qkv_proj!r}): write attn_k_proj, "
                f"attn_q_proj and attn_v_proj, or attn_qkv_proj."
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the names as JSON types."""
        return dataclasses.asdict(self)

    @classmethod
    def load(cls, interface: str | os.PathLike[str]) -> Self:
        """Return the interface in a folder, of `adapters` or of `save_pretrained`.

        Args:
            interface: the folder, or the path of the file in it.

        """
        path = Path(interface)
        file = path / INTERFACE if path.is_dir() else path
        return cls(**json.loads(file.read_text("utf-8"))["interface"])

    def roles(self) -> dict[str, Role]:
        """Return the path of each layer below a block to its role."""
        projections: Mapping[str | None, Role] = {
            self.attn_q_proj: "query",
            self.attn_k_proj: "key",
            self.attn_v_proj: "value",
            self.attn_qkv_proj: "qkv",
            self.attn_o_proj: "attention_out",
        }
        found: dict[str, Role] = {
            f"{attention}.{name}": role
            for attention in (self.layer_self_attn, self.layer_cross_attn)
            for name, role in projections.items()
            if attention is not None and name is not None
        }
        found[self.layer_intermediate_proj] = "mlp_in"
        found[self.layer_output_proj] = "mlp_out"
        return found

    def check_names(self, base_model: nn.Module) -> None:
        """Check that a base model has the modules that the interface names.

        Args:
            base_model: of the model.

        Raises:
            AttributeError: a module is missing.
        """
        base_model.get_submodule(self.model_embeddings)
        block = next(base_model.get_submodule(self.model_layers).children())
        layers = [v for k, v in self.to_dict().items() if k.startswith("layer_") and v is not None]
        for path in (*layers, *self.roles()):
            block.get_submodule(path)

    def check_roles(self, anatomy: Anatomy) -> None:
        """Check that the layers do not have other roles in the anatomy.

        Args:
            anatomy: of the base model, found without the interface.

        Raises:
            ConfigError: a layer has another role.
        """
        roles = self.roles()
        for block in anatomy.blocks:
            if block.stack != self.model_layers:
                continue
            for site in block.sites:
                asked = roles.get(site.path.removeprefix(f"{block.path}."))
                if asked is not None and site.role not in ("other", asked):
                    path = next((s.path for s in block.sites if s.role == asked), "another layer")
                    raise ConfigError(
                        f"AdapterModelInterface: {site.path!r} is {site.role!r}, not {asked!r}, "
                        f"which is {path!r}. Write that path."
                    )

    def check_method(self, config: AdapterConfig) -> None:
        """Check that the interface allows an adapter.

        Args:
            config: of the adapter.

        Raises:
            ConfigError: it does not.
        """
        wrong = [m for m in AdapterMethod.get_from_config(config) if m not in self.adapter_methods]
        if wrong:
            raise ConfigError(
                f"the model's interface allows {listing(self.adapter_methods)}. Add {wrong[0]!r} "
                f"to its adapter_methods."
            )
