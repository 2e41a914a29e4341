"""Trained copies: an adapter's own values in place of the base model's.

y = f_θ'(x) with the layer's function f and the adapter's parameters θ', initially the layer's θ.
After other adapters in a stack it adds its change: y + f_θ'(x) − f_θ(x).

Layers (`modules_to_save`, norms, the token table with `train_embeddings`) have whole copies.

Rows of the table (`trainable_token_indices`): E'(t) = R[i] for the i-th token of the list, E(t) for
all others. The embedding's padding token gets no gradient there, as in torch. An output layer tied
to the table also scores these tokens with R: logits[t] = h · R[i] + b[t].

Biases (`bias`; Ben Zaken et al. 2021, arXiv:2106.10199, BitFit): y + b' − b.

Differs from PEFT: several can act in one call, in a stack or an average, and each row of a batch
can have its own, at any layer; merging writes the values into the layer. The base model's own
biases do not change, so the model without the adapter keeps them. For rows, the table is not
copied in each forward, and the output layer keeps its bias. Differs from adapters: there
`train_embeddings` trains the table of the base model, for all adapters.
Cost: the layer's parameters for each adapter, and, if it acts alone, nothing in the forward; d_out
for a bias; tokens · d for rows. The file of a table holds only the rows that differ.
Cannot do: layers called with more than one input, quantized layers, batch norms.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import embedding, linear

from adapterzoo.anatomy import Anatomy, Site
from adapterzoo.averaging import Combination
from adapterzoo.config import AdapterConfig, ConfigUnion, Placement, config_class, field
from adapterzoo.contracts import BaseLayer, CopyAdapter, WeightAdapter, replaced
from adapterzoo.errors import ConfigError, SiteError, listing
from adapterzoo.patterns import Saved, TokenIds, around, matches

from ._init import dtype_named

ROWS = "token rows"
"""The location of a table's rows, shared by all modules that share the table."""
TIED, TIED_COPY = "tied", "tied copy"
"""The locations of an adapter of the token table that acts in all layers with its weight."""
WITH_OUTPUTS = (ROWS, TIED, TIED_COPY)
"""The locations of adapters that also act in output layers tied to the table."""


class Copy(WeightAdapter):
    """y = f_θ'(x), with the layer's function f and parameters θ', initially the layer's θ.

    Attributes:
        noun: what is copied, for messages.
    """

    noun: ClassVar[str]

    @abstractmethod
    def identity_values(self, base: BaseLayer) -> dict[str, Tensor]:
        """Return θ, the values of the layer, by the names of the adapter's parameters."""

    def init_from_layer(self, base: BaseLayer) -> None:
        """Copy the values of the layer."""
        with torch.no_grad():
            for name, value in self.identity_values(base).items():
                self.get_parameter(name).copy_(value)

    def _refuse(self, strategy: Combination) -> None:
        """Refuse strategies that drop entries; all others combine the values linearly."""
        if strategy.prunes:
            raise strategy.refusal(f"{self.noun} has none")


# --- whole layers ---


@config_class
class CopyConfig(AdapterConfig):
    """Base of the configs whose adapters are copies of layers."""

    def build(self, site: Site, device: torch.device, dtype: torch.dtype) -> LayerCopy:
        """Return an adapter that does not have its copy yet."""
        return LayerCopy(site.transposed or site.kind == "embedding")


class LayerCopy(Copy, CopyAdapter):
    """y = layer(x) with a copy of the layer.

    Attributes:
        transposed: whether the layer stores its weight as `[d_in, d_out]`.
        held: name of the copy in keys.
    """

    container = "modules_to_save"
    noun: ClassVar[str] = "a copy of a layer"
    held: ClassVar[str] = "layer"

    def __init__(self, transposed: bool) -> None:
        """Prepare for the copy; the argument sets the attribute."""
        super().__init__()
        self.transposed = transposed

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the copy's output, or, after earlier adapters, add its change."""
        if self.transposed and x.is_floating_point() and isinstance(self.layer, nn.Embedding):
            return self._scored(x, base)
        if base.is_original:
            return self._run(x, base)
        y, plain = base(x), base.original(x)
        own = self._run(x, base)
        return own if y is plain else y + (own - plain)

    def _scored(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the logits `[*batch, vocab]` of an output layer that is tied to the table."""
        y, plain = base(x), base.original(x)
        own = linear(x, self._own("weight").to(x.dtype), base.bias).to(y.dtype)
        return own if y is plain else y + (own - plain)

    def _run(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the copy's output; values in another dtype are cast to the layer's."""
        like = base.parameters
        out: Tensor
        if all(self._own(name).dtype is value.dtype for name, value in like.items()):
            out = self.layer(x)
        else:
            cast = {name: self._own(name).to(value.dtype) for name, value in like.items()}
            out = functional_call(self.layer, cast, (x,))
        return out

    def merged_weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged weight, `[d_out, d_in]`."""
        own = self._own("weight").to(w.dtype)
        return replaced(w, own.mT if self.transposed else own, base.weight.to(w.dtype))

    def merged_bias(self, b: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged bias, `[d_out]`."""
        return b if base.bias is None else self.parameter("bias", b, base)

    def parameter(self, name: str, value: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged value of any parameter, as the layer stores it."""
        plain = base.parameters[name].to(value.dtype)
        return replaced(value, self._own(name).to(value.dtype), plain)

    def identity_values(self, base: BaseLayer) -> dict[str, Tensor]:
        """Return the values of the layer."""
        return {f"{self.held}.{name}": value for name, value in base.parameters.items()}

    @property
    def weight(self) -> Tensor | None:
        """The weight of the copy."""
        return self.layer._parameters.get("weight")

    @property
    def bias(self) -> Tensor | None:
        """The bias of the copy."""
        return self.layer._parameters.get("bias")

    def _own(self, name: str) -> Tensor:
        own: Tensor = self.layer._parameters[name]  # type: ignore[assignment]
        return own


class Table(LayerCopy):
    """The token embedding with its own table, `[vocab_size, d]`, for `train_embeddings`.

    All embeddings that share the model's table share this one.
    """

    noun: ClassVar[str] = "a table"
    held: ClassVar[str] = "table"

    def __init__(self, table: nn.Module) -> None:
        """Take a copy of the embedding."""
        super().__init__(transposed=True)
        self.table = table

    @property
    def layer(self) -> nn.Module:  # type: ignore[override]
        """The copy."""
        return self.table


@config_class
class SavedModulesConfig(CopyConfig):
    """The part of a config that `modules_to_save` adds.

    Attributes:
        names: names of modules; each layer in one gets a copy.
        tied: paths of layers with the same weight, which share one copy.
    """

    architecture: ClassVar[str] = "modules_to_save"

    names: str | tuple[str, ...] = ()
    tied: tuple[str, ...] = ()

    def placements(self, anatomy: Anatomy) -> list[Placement]:
        """Return one placement for each layer in the modules.

        Raises:
            SiteError: a name matches no module with parameters, or a layer cannot be copied.
        """
        sites = {s.path: s for s in (*anatomy, *anatomy.others)}
        if anatomy.output is not None and anatomy.output.path in self.tied:
            sites[anatomy.output.path] = anatomy.output
        # a string is one pattern, a tuple holds names
        for one in [self.names] if isinstance(self.names, str) else [(n,) for n in self.names]:
            if not any(_is_in(path, one) for path in sites):
                known = sorted({name for path in sites for name in path.split(".")})
                names = listing([name for name in known if not name.isdecimal()], limit=30)
                raise SiteError(
                    f"modules_to_save={self.names!r}: no module of the base model matches "
                    f"{one if isinstance(one, str) else one[0]!r}. Write some of {names}."
                )
        found = [s for p, s in sites.items() if p not in self.tied and _is_in(p, self.names)]
        for site in found:
            if len(group := anatomy.sharing(site.path)) > 1:
                raise SiteError(
                    f"modules_to_save: {listing(group)} share the table at {site.path!r}. Write "
                    f"trainable_token_indices=[…], or train_adapter(…, train_embeddings=True)."
                )
            if site.parameter is not None:
                raise SiteError(
                    f"modules_to_save: {site.path!r} cannot be copied: the model computes with "
                    f"its {site.parameter!r} directly. Leave it out."
                )
        tables = [p for p in self.tied if p in sites and sites[p].kind == "embedding"]
        return [
            *(Placement(site, self, "modules_to_save") for site in found),
            *(Placement(sites[path], self, TIED_COPY) for path in tables),
        ]


def _is_in(path: str, wanted: str | tuple[str, ...]) -> bool:
    """Return whether a layer, or a module around it, matches."""
    return any(matches(each, wanted) for each in around(path))


# --- biases ---


@config_class
class BiasConfig(AdapterConfig):
    """The part of a config that `bias` adds.

    Attributes:
        paths: paths of the layers; None for all that have a bias.
    """

    architecture: ClassVar[str] = "bias"

    paths: tuple[str, ...] | None = None

    def placements(self, anatomy: Anatomy) -> list[Placement]:
        """Return one placement for each of the layers with a bias.

        Raises:
            SiteError: a layer does more with its bias than add it to the output.

        Warns:
            UserWarning: no layer has a bias.
        """
        wanted = None if self.paths is None else {*self.paths}
        odd = [path for path in anatomy.odd_biases if wanted is None or path in wanted]
        sites = [s for s in anatomy.biases if wanted is None or s.path in wanted]
        if odd:
            raise SiteError(f"bias: {listing(odd)} do more than add theirs. Write bias='none'.")
        if not sites:
            warnings.warn("bias: no layer has a bias to train. Write bias='none'.", stacklevel=2)
        return [Placement(site, self, "bias") for site in sites]

    def build(self, site: Site, device: torch.device, dtype: torch.dtype) -> OwnBias:
        """Return a fresh adapter for the site."""
        return OwnBias(site, device, dtype)


class OwnBias(Copy):
    """y = base(x) + b' − b."""

    noun: ClassVar[str] = "a bias"
    keeps_weight: ClassVar[bool] = True

    def __init__(self, site: Site, device: torch.device, dtype: torch.dtype) -> None:
        """Make the bias.

        Args:
            site: the site, which sets the width.
            device: device of the bias.
            dtype: the layer's dtype.
        """
        super().__init__()
        # the output of a convolution, or a norm over channels, is [batch, d_out, *places]
        self.is_spatial = site.kind == "layer"
        self.own = nn.Parameter(torch.zeros(site.d_out, device=device, dtype=dtype))

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the layer with the adapter's bias. `x` `[*batch, d_in]` → `[*batch, d_out]`."""
        y = base(x)
        if base.bias is None:
            return y
        change = self.own - base.bias  # [d_out]
        if self.is_spatial:
            # a convolution may have no batch
            weight = base.parameters.get("weight")
            like = y if weight is None or weight.dim() < 3 else weight
            change = change.view(-1, *(1 for _ in like.shape[2:]))  # [d_out, *ones]
        return y + change.to(y.dtype)

    def merged_weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """Return the weight, which does not change."""
        return w

    def merged_bias(self, b: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged bias, `[d_out]`."""
        if base.bias is None:
            return b
        return replaced(b, self.own.to(b.dtype), base.bias.to(b.dtype))

    def identity_values(self, base: BaseLayer) -> dict[str, Tensor]:
        """Return the values of the layer."""
        return {} if base.bias is None else {"own": base.bias}


# --- rows of a table of tokens ---


@config_class
class TokenRowsConfig(AdapterConfig):
    """The part of a config that `trainable_token_indices` adds, for one table.

    Attributes:
        table: name or end of the path of the embedding; None for the model's own token table.
        tokens: the token ids, in ascending order.
        dtype: dtype of the rows, by name; None for that of the table.
        init_weights: whether rows start as copies of the table's; False: standard normal.
    """

    architecture: ClassVar[str] = "token_rows"

    table: str | None = None
    tokens: tuple[int, ...] = ()
    dtype: str | None = None
    init_weights: bool = True

    def placements(self, anatomy: Anatomy) -> list[Placement]:
        """Return one placement for each module with the table.

        Raises:
            SiteError: there is no such table, or several, or it has fewer tokens.
        """
        name = None if self.table is None else (self.table,)
        found = tables_in(anatomy, name, "{'name of an embedding': [ids]}")
        if len(found) > 1:
            raise SiteError(
                f"trainable_token_indices={{{self.table!r}: …}}: this name belongs to embeddings "
                f"with different tables, {listing([group[0] for group in found])}. Write a path."
            )
        return self.at(found[0], anatomy)

    def at(self, group: Sequence[str], anatomy: Anatomy) -> list[Placement]:
        """Return one placement for each path of the embeddings that share a table.

        Raises:
            SiteError: the table has fewer tokens.
        """
        tables = {site.path: site for site in anatomy if site.kind == "embedding"}
        size = tables[group[0]].d_in
        if outside := [token for token in self.tokens if token >= size]:
            raise SiteError(
                f"there are no tokens {listing(outside)}: the table at {group[0]!r} has {size}. "
                f"Write model.resize_token_embeddings({max(outside) + 1}) first."
            )
        return [Placement(tables[path], self, ROWS) for path in group]

    def build(self, site: Site, device: torch.device, dtype: torch.dtype) -> TokenRows:
        """Return a fresh adapter for the site."""
        own = dtype_named(self.dtype, dtype)
        return TokenRows(self.tokens, site.d_out, device, own, self.init_weights)


class TokenRows(Copy):
    """The table, or the output layer tied to it, with the adapter's rows for some tokens.

    Attributes:
        rows: R `[tokens, d]`.
        tokens: the token ids, in ascending order.
    """

    container = "trainable_tokens_delta"
    noun: ClassVar[str] = "a row of a table"
    stands_alone: ClassVar[bool] = True
    tokens: Tensor

    def __init__(
        self,
        tokens: tuple[int, ...],
        width: int,
        device: torch.device,
        dtype: torch.dtype,
        are_copied: bool = True,
    ) -> None:
        """Make the rows.

        Args:
            tokens: the token ids, in ascending order.
            width: width of the table.
            device: device of the rows.
            dtype: dtype of the rows.
            are_copied: whether they start as copies of the table's; if not, they are drawn.
        """
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(len(tokens), width, device=device, dtype=dtype))
        self.ids = tokens
        self.are_copied = are_copied
        # the config has them, so files need not
        numbers = torch.tensor(tokens, device=device, dtype=torch.long)
        self.register_buffer("tokens", numbers, persistent=False)

    def init_from_layer(self, base: BaseLayer) -> None:
        """Copy the rows of the table, or draw them."""
        if self.are_copied:
            super().init_from_layer(base)
        else:
            nn.init.normal_(self.rows)

    def renumber(self) -> None:
        """Set the token ids again, after a model was created on the meta device."""
        self.tokens = torch.tensor(self.ids, device=self.rows.device, dtype=torch.long)

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the embeddings `[*batch, d]` of tokens `x` `[*batch]`.

        In an output layer, return the logits `[*batch, vocab]` of features `x` `[*batch, d]`.
        """
        y, plain = base(x), base.original(x)
        if x.is_floating_point():
            bias = None if base.bias is None else base.bias[self.tokens]  # [tokens]
            own = linear(x, self.rows.to(x.dtype), bias).to(y.dtype)  # [*batch, tokens]
            if y is not plain:
                own = own + (y - plain).index_select(-1, self.tokens)
            return y.index_copy(-1, self.tokens, own)
        ids = x.to(self.tokens.dtype).contiguous()
        at = torch.searchsorted(self.tokens, ids).clamp(max=len(self.tokens) - 1)  # [*batch]
        padding = base.padding_idx
        own = embedding(at, self.rows, self.ids.index(padding) if padding in self.ids else None)
        scale = base.scale
        if isinstance(scale, Tensor):
            # cast as the model families with such a scale do
            own = own * scale.to(own.dtype)
        elif scale != 1.0:
            own = own * scale
        own = own.to(y.dtype)  # [*batch, d]
        listed = (self.tokens[at] == ids).unsqueeze(-1)  # [*batch, 1]
        return torch.where(listed, own if y is plain else y + (own - plain), y)

    def in_slot(self, slot: Self) -> Mapping[str, Tensor]:
        """Return the rows for a slot with the same tokens.

        Raises:
            ConfigError: the slot has rows of other tokens.
        """
        if self.ids != slot.ids:
            raise ConfigError(
                f"the slot has rows of the tokens {listing(slot.ids)}, but the values are of "
                f"{listing(self.ids)}. Write hotswap=False, overwrite_ok=True."
            )
        return super().in_slot(slot)

    def merged_weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged weight, `[d, vocab_size]`."""
        own, plain = self.rows.to(w.dtype).mT, base.weight[:, self.tokens].to(w.dtype)
        return w.index_copy(1, self.tokens, replaced(w[:, self.tokens], own, plain))

    def identity_values(self, base: BaseLayer) -> dict[str, Tensor]:
        """Return the values of the table."""
        return {"rows": base.weight.mT[self.tokens]}


def tables_in(
    anatomy: Anatomy, names: str | tuple[str, ...] | None, hint: str
) -> list[tuple[str, ...]]:
    """Return the tables of a model, each as the paths of the embeddings that share it.

    Args:
        anatomy: the model's anatomy.
        names: names of embeddings, as in `target_modules`; None: the model's own token table.
        hint: how to name an embedding.

    Raises:
        SiteError: there is no such table.
    """
    tables = [site.path for site in anatomy if site.kind == "embedding"]
    if names is None:
        found = [path for path in tables if path == anatomy.own_table]
    else:
        found = [path for path in tables if matches(path, names)]
    parts = names if isinstance(names, tuple) else ()
    if not found or any(not any(matches(p, (name,)) for p in found) for name in parts):
        named = names if isinstance(names, str) else listing(parts)
        what = "table of tokens" if names is None else f"embedding {named}"
        raise SiteError(
            f"rows of embeddings are to be trained, and this model has no {what}; embeddings: "
            f"{listing(tables) or 'none'}. Write {hint}."
        )
    return list(dict.fromkeys(map(anatomy.sharing, found)))


# --- the fields of a config ---


def all_placements(config: AdapterConfig, anatomy: Anatomy) -> list[Placement]:
    """Return the placements of a config, and those of its copies.

    Args:
        config: a config without these fields has no such copies.
        anatomy: the model's anatomy.

    Raises:
        ConfigError: nothing is left to adapt.
        SiteError: a name matches nothing, or tokens are outside the table.
    """
    if isinstance(config, ConfigUnion):
        return [p for member in config.members for p in all_placements(member, anatomy)]
    own, names = config.placements(anatomy), config.get("modules_to_save")
    tied = tied_layers(config, anatomy)
    together = names is not None and any(_is_in(path, names) for path in tied)
    saved = SavedModulesConfig(names=names or (), tied=tied if together else ())
    copies = [] if names is None else saved.placements(anatomy)
    copied = {*(p.site.path for p in copies), *saved.tied}
    at_tied = together or any(p.site.path in tied for p in own)
    if config.get("ensure_weight_tying") and config.get("trainable_token_indices") is None:
        _check_tied(at_tied, tied, anatomy)
    if at_tied and not together:
        embeddings = [site for site in anatomy if site.kind == "embedding" and site.path in tied]
        own = [p for p in own if p.site.path not in tied]
        own += [Placement(site, config, TIED) for site in embeddings]
    gives_way = getattr(config, "gives_way", False)
    # elsewhere, a layer adapted in two ways is refused when it is built
    adapted = [p for p in own if not gives_way or p.site.path not in copied]
    if copied and not adapted:
        raise ConfigError(
            f"modules_to_save={names!r}: they hold all layers that the config would adapt. Write "
            f"fewer."
        )
    given, dtype = config.get("trainable_token_indices"), config.get("dtype")
    each = given if isinstance(given, Mapping) else {} if given is None else {None: given}
    tables = (TokenRowsConfig(table=n, tokens=tokens, dtype=dtype) for n, tokens in each.items())
    rows = [p for table in tables for p in table.placements(anatomy)]
    biases: list[Placement] = []
    if (kind := config.get("bias", "none")) != "none":
        layers = None if kind == "all" else tuple(dict.fromkeys(p.site.path for p in adapted))
        biases = BiasConfig(paths=layers).placements(anatomy)
    return [*adapted, *(p for p in biases if p.site.path not in copied), *copies, *rows]


def _check_tied(is_adapted: bool, tied: Sequence[str], anatomy: Anatomy) -> None:
    """Warn if there is nothing to tie."""
    why = "" if is_adapted else "neither the table of tokens nor a layer tied to it is adapted"
    if anatomy.output is not None and len(tied) < 2:
        why = "no layer is tied to the table of tokens"
    if why:
        warnings.warn(f"ensure_weight_tying=True: {why}. Leave it out.", stacklevel=3)


def tied_layers(config: AdapterConfig, anatomy: Anatomy) -> tuple[str, ...]:
    """Return the paths of the layers with the table's weight, if a config ties their adapters.

    Args:
        config: without the field `ensure_weight_tying` it ties none. Named heads may be tied to the
            table later.
        anatomy: the model's anatomy.
    """
    if not config.get("ensure_weight_tying") or anatomy.own_table is None:
        return ()
    return (*anatomy.sharing(anatomy.own_table), *anatomy.tied)


@config_class
class ConfigWithCopies(AdapterConfig):
    """Base of the configs whose adapters can have copies of parts of the base model.

    Attributes:
        modules_to_save: names of modules, or a regular expression: the adapter has its own copy of
            each layer in them.
        trainable_token_indices: ids of the tokens whose rows in the table the adapter has for
            itself, also in a tied output layer; or a dict from names of embeddings to such ids.
        gives_way: whether the method has no adapter at a copied layer, as in PEFT; if not, a
            layer of the method cannot be copied.
    """

    gives_way: ClassVar[bool] = False

    modules_to_save: str | tuple[str, ...] | None = field(None, Saved(), ours=True)
    trainable_token_indices: tuple[int, ...] | Mapping[str, tuple[int, ...]] | None = field(
        None, TokenIds(), ours=True
    )
