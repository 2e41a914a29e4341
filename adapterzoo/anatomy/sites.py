"""The anatomy of a model: its sites, sub-layers and blocks, and where its tokens enter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from adapterzoo.errors import SiteError


@dataclass(frozen=True, slots=True)
class TokenInput:
    """The part of a model that turns tokens into the input of the first block.

    Attributes:
        stack: path of the model whose forward takes the tokens.
        table: path of the token embedding; None if the model reads no tokens.
        table_width: number of its features.
        embeddings: path of the module that adds positions, norms and so on; None if no module
            returns the result.
        width: number of output features of that module.
        embeds_positions: whether that module takes token positions.
        positions: number of learned positions; None if positions are not learned.
        is_encoder: whether another stack attends to this one.
        looks_ahead: whether earlier tokens can attend to later ones everywhere.
        closed: why tokens cannot join the output of the embeddings; empty if they can.
    """

    stack: str
    table: str | None
    table_width: int
    embeddings: str | None
    width: int
    embeds_positions: bool
    positions: int | None
    is_encoder: bool
    looks_ahead: bool = False
    closed: str = ""


Role = Literal[
    "query",
    "key",
    "value",
    "qkv",
    "attention_out",
    "mixer_in",
    "mixer_out",
    "mlp_in",
    "mlp_gate",
    "mlp_out",
    "embedding",
    "lm_head",
    "other",
]
Kind = Literal[
    "linear", "embedding", "experts", "output", "norm", "block", "attention", "entry", "positions",
    "layer", "convolution",
]  # fmt: skip
SubLayerKind = Literal["attention", "mixer", "cross", "mlp"]

ATTENTION_ROLES: tuple[Role, ...] = ("query", "key", "value", "qkv", "attention_out")
MIXER_ROLES: tuple[Role, ...] = ("mixer_in", "mixer_out")
MLP_ROLES: tuple[Role, ...] = ("mlp_in", "mlp_gate", "mlp_out")
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True, slots=True)
class OutputSlice:
    """A part of a fused layer's output features.

    View `d_out` as `[groups, width]` and take `[:, start:stop]` of each group. GPT-2's query is
    `OutputSlice(1, 3 d, 0, d)`; GPT-NeoX interleaves per head:
    `OutputSlice(heads, 3 d_head, 0, d_head)`.

    Attributes:
        groups: number of equal groups, at least 1.
        width: number of features of one group; `groups * width` is the layer's `d_out`.
        start: first feature taken from each group.
        stop: one past the last feature taken from each group.
    """

    groups: int
    width: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of output features taken."""
        return self.groups * (self.stop - self.start)


@dataclass(frozen=True, slots=True)
class Mixture:
    """The module of a mixture of experts that still has the tokens in batch order.

    Attributes:
        path: path of the module that holds the experts or a router.
        around: path of the module whose first input is `[rows, tokens, …]`: `path`, or the module
            around it.
    """

    path: str
    around: str


@dataclass(frozen=True, slots=True)
class Site:
    """One place in a model for adapters.

    Attributes:
        path: dotted path of the module below the model that was searched.
        role: what the layer does in its block.
        layer: number of the block, counted over all stacks in model order; −1 outside blocks.
        stack: path of the container of blocks, empty outside blocks.
        kind: what is adapted: a layer with a 2-D weight, an embedding, a fused parameter that
            holds all experts, or (stream sites) a module's output, a norm, a block; "entry": the
            input of the first block, with as many tokens as the model's input; "positions": a
            module that takes position numbers; "layer": another layer with parameters;
            "convolution": a layer whose weight `[d_out, d_in]` has the inputs of one position.
        d_in: input features.
        d_out: output features; of the part, when `output_slice` is set.
        cross: whether it belongs to cross-attention.
        output_slice: the part of a fused layer; None for a whole layer.
        parameter: name of a fused parameter on the module at `path`, for layers that keep
            their weight there: experts `[experts, d_out, d_in]`, or an attention's input
            projection `[3 d, d]`.
        transposed: whether the weight is stored `[d_in, d_out]` (Conv1D, some experts).
        source: stream sites only: path of the module whose first input is the residual stream
            before the sub-layer.
        is_placed: stream sites only: whether a config declares the site; only then `also`, `norm`,
            `factor`, `is_swapped` and `is_language` are set.
        also: path of a module whose first input is added to that of `source`.
        norm: path of a norm that the adapter applies.
        factor: path of a parameter by which the model multiplies the output.
        is_swapped: whether output and stream are swapped.
        is_language: whether this is the place of the block's language adapters.
        overwritten: whether the model writes into the layer's output in place.
        experts: number of weights in the parameter; 0 without an experts dimension.
        says_transposed: whether the module states that its parameters are transposed.
        heads: attention sites only: number of heads of keys and values.
        head_widths: attention sites only: widths of a key and a value in one head.
        read: names of the layer's parameters that the model reads outside the layer's calls.
        is_called: whether the model calls the layer, as a function of its first input.
        kernel: convolutions only: the sizes of the kernel; `d_in` is a multiple of their product.
        groups: convolutions only: number of parts of the channels that do not mix.
        special: convolutions only: "dilation" and "padding_mode" if they are not torch's defaults,
            and "kernel_size", "stride" and "padding" if they differ between the dimensions.
        mixture: routed sites only: where the rows of its tokens are known; None if they are not.
    """

    path: str
    role: Role
    layer: int
    stack: str
    kind: Kind
    d_in: int
    d_out: int
    cross: bool = False
    output_slice: OutputSlice | None = None
    parameter: str | None = None
    transposed: bool = False
    source: str | None = None
    is_placed: bool = False
    also: str | None = None
    norm: str | None = None
    factor: str | None = None
    is_swapped: bool = False
    is_language: bool = False
    overwritten: bool = False
    experts: int = 0
    says_transposed: bool = False
    heads: int = 0
    head_widths: tuple[int, int] = (0, 0)
    read: tuple[str, ...] = ()
    is_called: bool = True
    kernel: tuple[int, ...] = ()
    groups: int = 1
    special: tuple[str, ...] = ()
    mixture: Mixture | None = None

    @property
    def name(self) -> str:
        """Path of the layer, or of the parameter that is adapted."""
        return self.path if self.parameter is None else f"{self.path}.{self.parameter}"

    @property
    def is_used(self) -> bool:
        """Whether the model calls the layer or reads its parameters."""
        return self.is_called or bool(self.read)

    @property
    def is_only_read(self) -> bool:
        """Whether the model computes with the weight, and an adapter gets no input."""
        return self.parameter is not None or not self.is_called

    @property
    def is_of_attention(self) -> bool:
        """Whether it belongs to an `nn.MultiheadAttention`, which the module's name selects."""
        return self.parameter in ("in_proj_weight", "out_proj.weight")

    @property
    def channels(self) -> int:
        """The number of input features; of a convolution, its channels in all groups."""
        return self.d_in * self.groups // math.prod(self.kernel)

    @property
    def lead(self) -> tuple[int, ...]:
        """The leading dimensions of a weight, the number of experts if any."""
        return (self.experts,) if self.experts else ()

    @property
    def is_routed(self) -> bool:
        """Whether the layer belongs to experts or is a parameter, so it gets no batch."""
        return self.parameter is not None or "experts" in self.path.split(".")


@dataclass(frozen=True, slots=True)
class SubLayer:
    """Attention, mixer or feed-forward part of a block, and where it joins the residual stream.

    With `inp` the first input of `source` and `h` the output of `out`, the stream becomes
    `inp + h`, or `inp + c h` if the architecture scales the branch by a constant.

    Attributes:
        kind: self-attention (also its linear relatives), the state-space model, recurrence or
            convolution that a block has instead, cross-attention or feed-forward.
        out: path of the module whose output is added to the residual stream.
        source: path of the module whose first input is the residual stream before the
            sub-layer: the norm before it, or its first layer in post-LN blocks.
        norm: post-LN only: path of the norm whose input is `inp + h`; None in pre-LN.
    """

    kind: SubLayerKind
    out: str
    source: str
    norm: str | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """One transformer block.

    Attributes:
        path: dotted path of the block.
        layer: number over all stacks, in model order (an encoder before its decoder).
        stack: path of the container that holds it.
        d_model: width of the residual stream.
        sites: every layer of the block with a weight matrix, whole, each with its role.
        parts: the parts of the fused layers among them.
        sublayers: attention or mixer, cross-attention and feed-forward parts, in the block's
            order.
        post_norm: whether norms follow the residual additions (post-LN).
        absent: roles that the block lacks because the values come from elsewhere, such as keys
            and values that several blocks share.
        mixed: sub-layers whose source reads more than the stream.
        apart: sub-layers whose output is not simply added to the stream.
        states: what the block's output is, if not one state for each token of each row.
        note: explains `mixed` and `apart`, or missing stream sites; empty for almost all models.
        languages: path of the module whose method `lang_adapter` applies the adapters of the rows'
            languages to the stream (X-MOD); empty for almost all models.
    """

    path: str
    layer: int
    stack: str
    d_model: int
    sites: tuple[Site, ...]
    parts: tuple[Site, ...]
    sublayers: tuple[SubLayer, ...]
    post_norm: bool
    absent: frozenset[Role] = frozenset()
    mixed: frozenset[SubLayerKind] = frozenset()
    apart: frozenset[SubLayerKind] = frozenset()
    states: str = ""
    note: str = ""
    languages: str = ""

    @property
    def output(self) -> str | None:
        """Path of the module that returns the block's output; None without one.

        XLM keeps the layers of all blocks in parallel lists; a norm comes last in each block.
        """
        if self.path.startswith(f"{self.stack}."):
            return self.path
        return self.sublayers[-1].norm if self.sublayers else None

    def named(self, role: Role, cross: bool | None = None) -> tuple[Site, ...]:
        """Return the block's sites of a role: whole layers, and parts of fused ones.

        A fused layer with a part of the role is not included itself.

        Args:
            role: role of the sites.
            cross: only (True) or without (False) cross-attention; None: both.
        """
        parts = [site for site in self.parts if site.role == role]
        fused = {site.name for site in parts}
        whole = [site for site in self.sites if site.role == role and site.name not in fused]
        return tuple(s for s in (*whole, *parts) if cross is None or s.cross == cross)

    def has(self, role: Role, cross: bool | None = None) -> bool:
        """Return whether the block has the kind of sub-layer that the role belongs to.

        A Mamba layer among attention layers needs no query.
        """
        families = ATTENTION_ROLES, MIXER_ROLES, MLP_ROLES
        family = next((each for each in families if role in each), ())
        crossing = cross if role in ATTENTION_ROLES else None
        return role not in self.absent and any(self.named(each, crossing) for each in family)

    def instead(self) -> tuple[Site, ...]:
        """Return the projections of the block's substitute for attention.

        These lead into and out of its mixer or, without one, its feed-forward part. Routed experts
        are excluded if every token also goes to a shared expert.
        """
        if any(self.has(role) for role in ATTENTION_ROLES):
            return ()
        pairs: tuple[tuple[Role, ...], ...] = MIXER_ROLES, ("mlp_in", "mlp_out")
        for pair in pairs:
            if found := tuple(site for role in pair for site in self.named(role)):
                return tuple(site for site in found if not site.is_routed) or found
        return ()


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The sites for adapters in one model.

    Attributes:
        blocks: the transformer blocks, stack after stack in model order.
        outside: embeddings and linear layers outside the blocks.
        reason: why there are no blocks; empty if there are.
        attentions: the attention modules that accept additional keys and values.
        unreachable: why some block's attention does not; empty if all do.
        entry: the site at the input of the first block after the embeddings; `d_in` and `d_out` are
            the width there. None without one.
        no_entry: why there is no entry.
        positions: the modules that take position numbers.
        unmovable: stacks whose positions cannot be changed → the reason.
        rotary: stacks whose positions rotate queries and keys, so that only distances count.
        tokens: where tokens are embedded; None if that is unknown.
        others: modules with their own parameters but without a weight matrix, such as norms.
        parameters: the matrices among these parameters, such as the weight of a router.
        convolutions: the convolutions that the model only calls.
        biases: layers whose output is a sum with their bias.
        odd_biases: paths of other modules with a bias.
        shared_tables: paths of embeddings that share one weight.
        own_table: path of the model's own token table; None without one.
        fused: paths of torch's encoders and their layers, which may call none of their modules.
        output: the layer onto the vocabulary, if it belongs to a head outside the base model.
        tied: paths of the linear layers that share the weight of the model's own table.
    """

    blocks: tuple[Block, ...]
    outside: tuple[Site, ...]
    reason: str = ""
    attentions: tuple[Site, ...] = ()
    unreachable: str = ""
    entry: Site | None = None
    no_entry: str = ""
    positions: tuple[Site, ...] = ()
    unmovable: Mapping[str, str] = field(default_factory=dict)
    rotary: frozenset[str] = frozenset()
    tokens: TokenInput | None = None
    others: tuple[Site, ...] = ()
    parameters: tuple[Site, ...] = ()
    convolutions: tuple[Site, ...] = ()
    biases: tuple[Site, ...] = ()
    odd_biases: tuple[str, ...] = ()
    shared_tables: tuple[tuple[str, ...], ...] = ()
    own_table: str | None = None
    fused: tuple[str, ...] = ()
    output: Site | None = None
    tied: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Site]:
        """Yield every whole site: those of the blocks, then those outside."""
        for block in self.blocks:
            yield from block.sites
        yield from self.outside

    @property
    def stacks(self) -> tuple[str, ...]:
        """Paths of the containers of blocks, in model order."""
        return tuple(dict.fromkeys(block.stack for block in self.blocks))

    @property
    def named(self) -> tuple[Site, ...]:
        """Convolutions and the output layer, which are selected by name, not by role."""
        return self.convolutions if self.output is None else (*self.convolutions, self.output)

    def sharing(self, table: str) -> tuple[str, ...]:
        """Return the paths of all embeddings with the weight of the one at a path."""
        return next((group for group in self.shared_tables if table in group), (table,))

    def linears(self) -> tuple[Site, ...]:
        """Return every whole linear layer that is a module, in blocks and outside."""
        return tuple(s for s in self if s.kind == "linear" and s.parameter is None)

    def weights(self) -> dict[str, Site]:
        """Return the whole sites of all weight matrices, by the names of their parameters."""
        sites = {s.name if s.parameter else f"{s.path}.weight": s for s in self}
        return sites | {s.name: s for s in self.parameters}

    def select(
        self, *roles: Role, cross: bool | None = False, layers: Iterable[int] | None = None
    ) -> tuple[Site, ...]:
        """Return the sites of the roles, block after block.

        These are whole layers if the role has its own layer, else parts of a fused layer.

        Args:
            roles: the roles to adapt.
            cross: only (True) or without (False) cross-attention; None: both. Does not affect
                feed-forward roles.
            layers: numbers of blocks; None: all.

        Raises:
            SiteError: a block has attention (or a feed-forward part) but not the role, or no
                block has it.
        """
        call = f"select({', '.join(map(repr, roles))})"
        if unknown := [role for role in roles if role not in ROLES]:
            raise SiteError(
                f"{call}: {unknown[0]!r} is not a role. Legal roles: {', '.join(ROLES)}. Write one."
            )
        wanted = None if layers is None else frozenset(layers)
        blocks = [b for b in self.blocks if wanted is None or b.layer in wanted]
        chosen: list[Site] = []
        for block in blocks:
            # a repeated role gets its sites only once
            for role in dict.fromkeys(roles):
                filtered = cross if role in ATTENTION_ROLES else None
                found = block.named(role, filtered)
                if not found and block.has(role, filtered):
                    raise SiteError(f"{call}: {self._missing(block, role)}")
                chosen += found
        chosen += [site for site in self.outside if site.role in roles and wanted is None]
        missing = [role for role in roles if not any(site.role == role for site in chosen)]
        if missing:
            known = {site.role for block in blocks for site in (*block.sites, *block.parts)}
            reason = f": {self.reason}" if self.reason else ""
            raise SiteError(
                f"{call}: no layer with the role {missing[0]!r}{reason}. "
                f"Roles that are there: {', '.join(sorted(known)) or 'none'}. Write one of these."
            )
        return tuple(chosen)

    @staticmethod
    def _missing(block: Block, role: Role) -> str:
        lines = "\n".join(
            f"  {site.path.removeprefix(block.path + '.')} [{site.d_out}, {site.d_in}] {site.role}"
            for site in block.sites
        )
        return (
            f"the block at {block.path!r} has no layer with the role {role!r}. Its layers:\n"
            f"{lines}\nIf one of them has it, add an entry such as\n"
            f"  ARCHITECTURES['<config.model_type>'] = Row(roles={{r'<layer>': {role!r}}})\n"
            "in adapterzoo/anatomy/patterns.py."
        )


def part_names(sites: Sequence[Site]) -> list[str]:
    """Return names for the adapters of several sites at one layer, also used in checkpoints.

    Args:
        sites: sites of one layer, in order.

    Returns:
        The role of each, with a number if another has the same role.
    """
    roles = [str(site.role) for site in sites]
    return [r if roles.count(r) == 1 else f"{r}_{i}" for i, r in enumerate(roles)]
