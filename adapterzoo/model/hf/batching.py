"""One adapter, or none, for each request in transformers' continuous batching.

A manager packs the tokens of all running requests into one sequence `[1, tokens]`. For adapters,
each token is a row, so that requests with different adapters share a step like the rows of a mixed
batch. What a request uses is fixed when it is admitted: a plan with its modules, the token from
which an adapter with an invocation acts, and the key of its blocks in the prefix cache.

All that the library knows about the internals of `transformers.generation.continuous_batching`, in
the versions of `TESTED`, is in this file:

- `ContinuousBatchingManager`: `add_request`, `warmup`, `_run_generation_loop`,
  `_create_batch_processor`, `_request_lock`, `_request_counter`, `distributed_helper`
- `ContinuousBatchProcessor`: `prepare_next_batch`, `update_batch`, `_generation_step`,
  `_handle_request_error`, `fail_all_requests`, `has_pending_requests`, `inputs_and_outputs`,
  `model_runner`, `scheduler`, `cache`
- `ContinuousBatchingIOs`: `requests_in_batch`, `num_q_tokens`, `_get_num_sequences`
- `ModelRunner`: `_get_forward_fn`, `_forward_process_and_sample`, `supports_logits_to_keep`
- `Scheduler`: `add_waiting_request`, `set_request_cancellation`, `active_requests`,
  `waiting_requests`
- `PagedAttentionCache`: `search_prefix_match`, `mark_complete_blocks`, `cache_allocators`
- the children of a request are called `<id>__child#<number>`
"""

from __future__ import annotations

import functools
import hashlib
import operator
import threading
import types
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import transformers
from packaging.version import Version
from torch import Tensor, nn

from adapterzoo.caches import values_kept
from adapterzoo.call import NEVER, Generation, PackedPrompts
from adapterzoo.composition import Child, Composition, Fuse, Node, Split, fusions_of
from adapterzoo.composition.rows import PackedRows, SlotRows
from adapterzoo.contracts import Adapter, AttentionAdapter, PositionAdapter, PromptAdapter
from adapterzoo.errors import AdapterZooError, ConfigError, StateError, listing, naming
from adapterzoo.formats.fit import digest, fingerprint
from adapterzoo.inject.adapted import Adapted, acting, below_wrappers
from adapterzoo.inject.layers import ExpertAdapters, FusedAdapters
from adapterzoo.model import batches
from adapterzoo.model.heads.copies import table_of
from adapterzoo.model.state import (
    DEFAULT_EMBEDDINGS,
    AdaptedModel,
    config_of,
    fusion_modules,
    layer_in,
    modules_of,
    named_tensors,
)
from adapterzoo.model.training import adapter_fingerprint
from adapterzoo.names import BASE
from adapterzoo.runtime import Plan

from .guards import MANAGERS

try:
    from transformers.generation.continuous_batching import continuous_api
    from transformers.generation.continuous_batching.cache import PagedAttentionCache
    from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingAsyncIOs
    from transformers.generation.continuous_batching.model_runner import (
        infer_max_single_request_tokens,
    )
except ImportError:
    # an older transformers, which is refused by name
    pass

TESTED = ("5.24",)
"""The versions of transformers whose continuous batching this file knows."""

ACTIVE: Any = object()
"""The adapter of a request that names none: what is active where it is added."""

_CHILD = "__child#"

_T = TypeVar("_T")


def is_tested() -> bool:
    """Return whether this transformers is one of the versions that the file knows."""
    return ".".join(map(str, Version(transformers.__version__).release[:2])) in TESTED


def refuse_untested() -> None:
    """Refuse continuous batching of a model with adapters by an unknown transformers.

    Raises:
        StateError: its version has not been tested.
    """
    if not is_tested():
        raise StateError(
            f"continuous batching with adapters is tested with transformers {listing(TESTED)}, and "
            f"this is {transformers.__version__}. Write generate(…), or install one of these."
        )


# --- what a request uses ---


@dataclass(frozen=True, eq=False, slots=True)
class Variant:
    """What acts on a request: a plan with the modules of its adapters.

    It does not change when the model loses these adapters or gets others with their names.

    Attributes:
        plan: for all tokens of a request.
        names: of the adapters and fusions.
        records: of these, when the variant was made.
        key: equal for equal variants.
        invocations: the sequences of tokens from which adapters act.
        begins: whether an adapter acts from the first token on.
        alone: why requests of no other variant may run in the same steps; empty if they may.
        pool: from whose slots each request takes its own adapter, or none; None: from no pool.
        member: that adapter.
    """

    plan: Plan
    names: frozenset[str] = frozenset()
    records: tuple[object, ...] = ()
    key: tuple[object, ...] = ()
    invocations: tuple[tuple[int, ...], ...] = ()
    begins: bool = False
    alone: str = ""
    pool: Any = None
    member: str | None = None


def asked_of(model: AdaptedModel, adapter_name: object = ACTIVE) -> Variant:
    """Return what acts on a request, which may be an adapter of the model's pool.

    With a pool, requests for the base model run in the steps of those for its adapters.

    Args:
        model: with adapters.
        adapter_name: see `variant_of`.

    Raises:
        AdapterZooError: see there.
    """
    pool = model._adapter_state.pool
    name = None if adapter_name == BASE else adapter_name
    if name is ACTIVE and model._active.plan.setup is None:
        name = None
    if pool is None or not (name is None or name in pool):
        return variant_of(model, adapter_name)
    pool.check()
    plan = replace(pool.plan, heads=model._active.heads)
    why = "adapters of a pool run in steps of their own"
    member = cast("str | None", name)
    return Variant(plan, key=("pool", pool, plan.heads), alone=why, pool=pool, member=member)


def variant_of(model: AdaptedModel, adapter_name: object = ACTIVE) -> Variant:
    """Return what acts on a request.

    Args:
        model: with adapters.
        adapter_name: a name or a composition, or None for the base model; by default what is active
            in the calling thread and task.

    Raises:
        CompositionError: it divides the batch or the sequence.
        StateError: it adds tokens, or reads the prompt otherwise than for an invocation.
        UnknownNameError: an adapter is unknown.
    """
    if adapter_name is ACTIVE:
        plan = model._active.plan
    else:
        plan = batches.plan_of_name(model, adapter_name)
    setup = plan.setup
    names = () if setup is None else setup.flatten()
    parts = [part for name in names for part in _parts_of(model, name)]
    _refuse_not_by_token(plan, parts)
    fusions = [fuse.name for fuse in fusions_of(setup)]
    sites = {path: _bound(model, path, site) for path, site in plan.sites.items()}
    plan = replace(plan, sites=sites)
    modules = tuple(id(module) for site in sites.values() for module in site.adapters)
    waiting = dict.fromkeys(part.invocation for part in parts)
    return Variant(
        plan,
        frozenset((*names, *fusions)),
        _records(model, setup),
        (setup, plan.heads, plan.skip_layers, modules),
        tuple(sequence for sequence in waiting if sequence is not None),
        None in waiting,
        _why_alone(model, plan, names),
    )


def _records(model: AdaptedModel, setup: Composition | None) -> tuple[object, ...]:
    """Return the records of a composition's adapters and fusions; None for those that are gone."""
    state = model._adapter_state
    names = () if setup is None else setup.flatten()
    adapters = (state.records.get(name) for name in names)
    return (*adapters, *(state.fusions.get(fuse.name) for fuse in fusions_of(setup)))


def _parts_of(model: AdaptedModel, name: str) -> list[Adapter]:
    """Return the adapters of a name at all layers; those of a fused layer are separate."""
    return [
        part
        for path, module in modules_of(model, name)
        for part in (module.modules() if path else ())
        if isinstance(part, Adapter) and not isinstance(part, (FusedAdapters, ExpertAdapters))
    ]


# adapters that add tokens, keys or positions to a sequence
_OF_SEQUENCES = AttentionAdapter, PositionAdapter, PromptAdapter


def _refuse_not_by_token(plan: Plan, parts: Iterable[Adapter]) -> None:
    """Refuse adapters that do not act on each token by itself.

    Raises:
        StateError: one does not.
    """
    setup = plan.setup
    splits = setup is not None and any(isinstance(node, Split) for node in setup.nodes())
    if plan.rows is not None or splits:
        raise StateError(
            f"continuous batching packs requests into one sequence, which {setup!r} would divide. "
            "Write generate_batch(…, adapter_names=[…]) with an adapter for each request."
        )
    reads = any(part.reads_prompt for part in parts)
    if reads or any(isinstance(part, _OF_SEQUENCES) for part in parts):
        raise StateError(
            f"continuous batching packs requests into one sequence: {setup!r}, which "
            f"{'reads the prompt of' if reads else 'adds to'} each, would be wrong. Write "
            "generate(…)."
        )


def _bound(model: AdaptedModel, path: str, site: Any) -> Any:
    """Return the step of a site with its adapters."""
    if site.adapters is not None:
        return site
    _, adapters = acting(below_wrappers(layer_in(model, path)), site)
    return replace(site, adapters=tuple(adapters))


def _why_alone(model: AdaptedModel, plan: Plan, names: Sequence[str]) -> str:
    """Return why no other adapters may act in the same step; empty if they may."""
    records, mixed = model._adapter_state.records, set[str]()
    for name in names:
        for path, placements in records[name].places.items():
            routed = [p.site.mixture for p in placements if p.site.is_routed]
            if path in plan.sites and None in routed:
                return f"{name!r} adapts {path!r}, where the request of a token is unknown"
            mixed |= {path} if routed else set()
    for path in plan.sites.keys() - mixed:
        layer = below_wrappers(layer_in(model, path))
        if isinstance(layer, Adapted) and (layer._read or layer._shown.names):
            return f"the model reads the weight of {path!r}, which {plan.setup!r} changes"
    return ""


@dataclass(slots=True)
class Pinned:
    """What a request in flight uses.

    Attributes:
        variant: what acts on it.
        starts: sequence of an invocation → the first token on which its adapters act.
        salt: numbers that are combined with its tokens before blocks are hashed.
        first: the first token whose keys or values differ from the base model's.
        is_running: whether the worker has taken it.
        member: the adapter of a pool that it has claimed.
        lease: its slot, once it has one.
    """

    variant: Variant
    starts: Mapping[tuple[int, ...], int] = field(default_factory=dict)
    salt: tuple[int, ...] = ()
    first: int = 0
    is_running: bool = False
    member: str | None = None
    lease: Any = None

    def hashed(self, tokens: Sequence[int], block: int) -> list[int]:
        """Return what is hashed in place of a request's tokens.

        Blocks before the first token on which an adapter acts are those of the base model; others
        are shared only by requests whose adapters have the same content.

        Args:
            tokens: of the request, from the first one on.
            block: number of tokens in a block.
        """
        first = self.first // block * block if self.salt else len(tokens)
        salted = (
            token ^ self.salt[place % len(self.salt)]
            for place, token in enumerate(tokens[first:], first)
        )
        return [*tokens[:first], *salted]


def pinned(variant: Variant, input_ids: Sequence[int], content: bytes, base: bytes) -> Pinned:
    """Return what a request uses.

    Args:
        variant: what acts on it.
        input_ids: its prompt.
        content: digest of all that keys and values depend on; empty for the base model.
        base: the same without adapters; empty unless the base model has been changed.
    """
    starts = {sequence: _last(input_ids, sequence) for sequence in variant.invocations}
    first = 0 if variant.begins or base else min(starts.values(), default=0)
    if not content or first == NEVER:
        return Pinned(variant, starts)
    # all that the keys and values of a block depend on, except its tokens and those before
    document = repr((content, sorted(starts.items()))).encode()
    numbers = hashlib.shake_256(document).digest(4 * 64)
    salt = (int.from_bytes(numbers[i : i + 4], "little") >> 1 for i in range(0, len(numbers), 4))
    return Pinned(variant, starts, tuple(salt), first)


def _last(tokens: Sequence[int], sequence: tuple[int, ...]) -> int:
    """Return where the last occurrence of a sequence begins; beyond all tokens if there is none."""
    size = len(sequence)
    places = range(len(tokens) - size, -1, -1)
    return next((i for i in places if tuple(tokens[i : i + size]) == sequence), NEVER)


class Contents:
    """Digests of adapters, recomputed only when a tensor has changed."""

    def __init__(self) -> None:
        """Start without any."""
        self._known: dict[str, tuple[list[object], str]] = {}

    def of(self, model: AdaptedModel, variant: Variant) -> bytes:
        """Return the digest of all that keys and values depend on; empty for the base model.

        Args:
            model: with adapters.
            variant: what acts, with names that the model knows.
        """
        state, setup = model._adapter_state, variant.plan.setup
        known = {*state.records, *(f"fusion {name}" for name in state.fusions), _TABLE}
        self._known = {name: found for name, found in self._known.items() if name in known}
        base = [self._adapter(model, name) for name in state.merged]
        if state.embeddings != DEFAULT_EMBEDDINGS:
            weight = cast("Any", model).get_input_embeddings().weight
            base.append(self._digest(_TABLE, None, [weight], lambda: digest(weight)))
        if not variant.names and not base:
            return b""
        acts = [name for name in variant.names if name in state.records]
        facts = [base, "" if not acts else self._described(model, setup), variant.plan.skip_layers]
        return hashlib.sha256(repr(facts).encode()).digest()

    def _described(self, model: AdaptedModel, child: Child) -> str:
        """Return a composition with digests in place of names."""
        if not isinstance(child, Node):
            return "" if child is None else self._adapter(model, child)
        inside = [self._described(model, each) for each in child.children]
        options = {name: value for name, value in child.options.items() if name != "name"}
        fusion = self._fusion(model, child.name) if isinstance(child, Fuse) else ""
        return repr([type(child).__name__, inside, options, fusion])

    def _adapter(self, model: AdaptedModel, name: str) -> str:
        record = model._adapter_state.find(name)
        tensors = named_tensors(dict(modules_of(model, name)), keep_vars=True).values()
        return self._digest(name, record, tensors, lambda: adapter_fingerprint(model, name))

    def _fusion(self, model: AdaptedModel, name: str) -> str:
        record = model._adapter_state.find_fusion(name)
        tensors = named_tensors(dict(fusion_modules(model, name)), keep_vars=True)
        config = {"config": repr(record.config)}
        return self._digest(
            f"fusion {name}", record, tensors.values(), lambda: fingerprint(config, tensors)
        )

    def _digest(self, name: str, record: object, tensors: Iterable[Tensor], compute: Any) -> str:
        marks: list[object] = [record]
        for tensor in tensors:
            version = 0 if tensor.is_inference() else tensor._version
            marks += [id(tensor), version, tensor.data_ptr()]
        found = self._known.get(name)
        if found is None or found[0] != marks:
            found = self._known[name] = marks, compute()
        return found[1]


_TABLE = "embeddings"


# --- the requests of a manager ---


class Batch:
    """The requests of a manager that have not ended, and the plan of a step for their variants.

    Attributes:
        changed: guards the others, and is notified when requests have ended.
        pins: id of a request → what it uses.
        leaving: name of an adapter → how many threads are about to remove it.
        own: what was active when the manager was made; its steps may run as captured graphs.
        variants: of which the plan of a mixed step consists.
        mixed: that plan; None for fewer than two variants.
    """

    def __init__(self, own: Variant) -> None:
        """Start without requests.

        Args:
            own: see the class.
        """
        self.changed = threading.Condition()
        self.pins: dict[str, Pinned] = {}
        self.leaving: Counter[str] = Counter()
        self.own = own
        self.variants: tuple[Variant, ...] = ()
        self.mixed: Plan | None = None
        self._contents = Contents()

    def admit(
        self,
        model: AdaptedModel,
        key: str,
        variant: Variant,
        input_ids: Sequence[int],
        by_content: bool = True,
    ) -> None:
        """Fix what a new request uses.

        Args:
            model: of the manager.
            key: id of the request.
            variant: what acts on it.
            input_ids: its prompt.
            by_content: whether the content of adapters is part of a block's hash. It is not under
                tensor parallelism, where all requests have the same adapters and every process
                must compute the same hashes.

        Raises:
            CompositionError: it cannot share a step with the requests in flight.
            StateError: it has to run alone, its id is taken, or an adapter is being removed.
        """
        with self.changed:
            if self.pin(key) is not None:
                raise StateError(f"a request {key!r} is in flight. Write another request_id.")
            if going := sorted(name for name in variant.names if self.leaving[name] > 0):
                raise StateError(
                    f"{going[0]!r} is being deleted or replaced. Add the request again later."
                )
            now = () if variant.pool is not None else _records(model, variant.plan.setup)
            if any(one is not other for one, other in zip(variant.records, now, strict=True)):
                # by another thread, since the variant was made
                raise StateError(
                    f"{variant.plan.setup!r} has been deleted or replaced. Add the request again."
                )
            member, variant = variant.member, self._include(variant)
            if member is None and not by_content:
                self.pins[key] = Pinned(variant)
                return
            base = self._contents.of(model, Variant(Plan()))
            if member is None:
                content = self._contents.of(model, variant)
            else:
                content = cast("Any", variant.pool).claim(member) + base
            self.pins[key] = replace(pinned(variant, input_ids, content, base), member=member)

    def _include(self, variant: Variant) -> Variant:
        """Add a variant to those of a step, and return it, or the equal one that was there."""
        running = {id(pin.variant) for pin in self.pins.values()}
        known = next((v for v in self.variants if v.key == variant.key), None)
        variant = known or variant
        others = [v for v in self.variants if id(v) in running and v is not known]
        refuse_together([variant, *others])
        if known is None:
            variants = (*others, variant)
            self.mixed, self.variants = join(variants), variants
        return variant

    def pin(self, key: str) -> Pinned | None:
        """Return what a request, or the one that it was forked from, uses; None: it is unknown."""
        found = self.pins.get(key)
        if found is None and _CHILD in key:
            found = self.pins.get(key.rpartition(_CHILD)[0])
        return found

    def using(self, names: Collection[str]) -> list[str]:
        """Return the ids of the requests that use one of the adapters or fusions."""
        return [key for key, pin in self.pins.items() if not pin.variant.names.isdisjoint(names)]

    def start(self, key: str) -> None:
        """Note that the worker has taken a request."""
        if (pin := self.pin(key)) is not None:
            pin.is_running = True

    def release(self, *keys: str) -> None:
        """Forget requests."""
        with self.changed:
            for key in keys:
                pin = self.pins.pop(key, None)
                if pin is not None and pin.member is not None:
                    pool = pin.variant.pool
                    if pin.lease is not None:
                        pool.release(pin.lease)
                    pool.disclaim(pin.member)
            self.changed.notify_all()

    def has_slot(self, key: str) -> bool:
        """Return whether a request has the slot that it needs, which it gets if one is free."""
        pin = self.pin(key)
        if pin is None or pin.member is None:
            return True
        if pin.lease is None:
            pin.lease = pin.variant.pool.lease(pin.member)
        return pin.lease is not None

    def settle(self, alive: Collection[str]) -> None:
        """Forget the requests that the worker has finished.

        Args:
            alive: ids of those that it still has.
        """
        with self.changed:
            roots = {key if key in self.pins else key.rpartition(_CHILD)[0] for key in alive}
            running = [key for key, pin in self.pins.items() if pin.is_running]
            self.release(*(key for key in running if key not in roots))

    def forget(self, names: Collection[str]) -> None:
        """Drop variants with adapters that leave the model; no request uses them."""
        with self.changed:
            kept = tuple(v for v in self.variants if v.names.isdisjoint(names))
            if len(kept) < len(self.variants):
                self.mixed, self.variants = join(kept), kept


def refuse_together(variants: Sequence[Variant]) -> None:
    """Refuse variants whose requests cannot run in the same steps.

    Raises:
        StateError: one of several must run alone.
    """
    alone = next((v for v in variants if v.alone), None)
    if alone is not None and len(variants) > 1:
        other = next(v for v in variants if v is not alone)
        raise StateError(
            f"{alone.alone}, so that its requests cannot run with those of "
            f"{other.plan.setup or 'the base model'!r}. Add them when these have ended."
        )


def join(variants: Sequence[Variant]) -> Plan | None:
    """Return the plan of steps with requests of several variants; None for fewer than two.

    Raises:
        CompositionError: they cannot act in one step.
    """
    return batches.join_plans([v.plan for v in variants]) if len(variants) > 1 else None


class RequestPrompt(list[int]):
    """The tokens of a request, together with its adapter.

    Attributes:
        variant: what acts on the request.
        errors: of the same call's requests that could not be added.
    """

    def __init__(self, tokens: Iterable[int], variant: Variant, errors: list[Exception]) -> None:
        """Take the tokens."""
        super().__init__(tokens)
        self.variant, self.errors = variant, errors


def prompts_of(
    model: AdaptedModel, inputs: Sequence[Sequence[int]], adapter_names: object, new_tokens: object
) -> list[RequestPrompt]:
    """Return the prompts of a call, each with its adapter.

    Args:
        model: with adapters.
        inputs: the prompts.
        adapter_names: one for each; None: what is active acts on all of them.
        new_tokens: the most tokens that each request generates; None: not limited.

    Raises:
        CompositionError: adapters cannot act in one step.
        ConfigError: there are not as many names as prompts, or the model cannot read a prompt.
        StateError: an adapter does not act on each token by itself.
        UnknownNameError: an adapter is unknown.
    """
    if adapter_names is None:
        variants = [asked_of(model)] * len(inputs)
    else:
        listed = isinstance(adapter_names, Sequence) and not isinstance(adapter_names, str)
        names = list(cast("Sequence[Any]", adapter_names)) if listed else [adapter_names]
        if not listed or len(names) != len(inputs):
            raise ConfigError(
                f"{len(names)} names for {len(inputs)} requests. Write a list with a name, or "
                "None, for each."
            )
        distinct = {_hashable(name): asked_of(model, name) for name in names}
        variants = [distinct[_hashable(name)] for name in names]
    errors: list[Exception] = []
    found = []
    for number, (tokens, variant) in enumerate(zip(inputs, variants, strict=True)):
        try:
            found.append(
                RequestPrompt(checked(model, tokens, new_tokens, variant), variant, errors)
            )
        except ConfigError as error:
            raise ConfigError(f"request {number}: {error}") from error
    every = list({variant.key: variant for variant in variants}.values())
    refuse_together(every)
    join(every)
    return found


def _hashable(name: Any) -> Any:
    return tuple(map(_hashable, name)) if isinstance(name, list) else name


def checked(model: AdaptedModel, input_ids: Any, new_tokens: object, variant: Variant) -> list[int]:
    """Return the tokens of a prompt that the model can read.

    An unknown token, or too many of them, would end all requests.

    Raises:
        ConfigError: it cannot read one.
    """
    tokens = list(input_ids.tolist() if isinstance(input_ids, Tensor) else input_ids)
    if not tokens:
        raise ConfigError("the prompt is empty. Write at least one token.")
    if set(map(type, tokens)) - {int}:
        try:
            # integers of NumPy, for example
            tokens = [operator.index(token) for token in tokens]
        except TypeError:
            kinds = listing(sorted({type(token).__name__ for token in tokens} - {"int"}))
            raise ConfigError(f"the prompt has {kinds}, not integers. Write [5, 6, 7].") from None
    table = cast("Any", model).get_input_embeddings()
    tables = [getattr(table, "weight", None), *(table_of(model, name) for name in variant.names)]
    known = max((len(weight) for weight in tables if weight is not None), default=1 << 31)
    if min(tokens) < 0 or max(tokens) >= known:
        wrong = next(token for token in tokens if not 0 <= token < known)
        raise ConfigError(f"there is no token {wrong}. Write numbers from 0 to {known - 1}.")
    positions = positions_of(model)
    new = new_tokens if isinstance(new_tokens, int) else 1
    if positions is not None and len(tokens) + new > positions:
        raise ConfigError(
            f"the prompt has {len(tokens)} tokens, {new} follow, and the model has {positions} "
            f"positions. Write max_new_tokens={max(positions - len(tokens), 1)}, or a prompt of "
            f"{max(positions - new, 1)} tokens."
        )
    return tokens


def refuse_too_long(tokens: int, new_tokens: int | None, longest: int) -> None:
    """Refuse a request that the cache can never hold, which would make all others fail.

    Args:
        tokens: number of tokens in its prompt.
        new_tokens: the most that it generates; None: not limited.
        longest: the most tokens that the cache holds for one request.

    Raises:
        ConfigError: it is too long.
    """
    new = 1 if new_tokens is None else new_tokens
    if tokens + new > longest:
        raise ConfigError(
            f"the prompt has {tokens} tokens, up to {new} follow, and the cache holds {longest}. "
            "Write a larger num_blocks, or a smaller max_new_tokens."
        )


def positions_of(model: AdaptedModel) -> int | None:
    """Return how many positions a sequence can have; None if that is not limited."""
    found = getattr(config_of(model).get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


# --- transformers' classes, with requests that have adapters ---


def adapt(model: AdaptedModel, manager: Any) -> None:
    """Let the requests of a manager have adapters.

    Args:
        model: of the manager.
        manager: made by transformers, now or for an earlier call.
    """
    if isinstance(manager, BatchingManager):
        return
    try:
        own = variant_of(model)
    except AdapterZooError:
        own = Variant(Plan(heads=model._active.plan.heads))
    manager.__class__ = BatchingManager
    manager.requests = Batch(own)
    MANAGERS.add(manager)


if is_tested():

    class BatchingManager(continuous_api.ContinuousBatchingManager):
        """A manager whose requests have adapters.

        Attributes:
            requests: those in flight.
        """

        requests: Batch

        @property
        def longest(self) -> int | None:
            """The most tokens of a request that the cache can hold; None before there is one."""
            return getattr(self.batch_processor, "longest", None)

        def add_request(
            self,
            input_ids: Sequence[int],
            request_id: str | None = None,
            max_new_tokens: int | None = None,
            streaming: bool = False,
            record_timestamps: bool = False,
            eos_token_id: int | list[int] | None = None,
            *,
            adapter_name: object = ACTIVE,
            **logit_processor_kwargs: Any,
        ) -> str | None:
            """Add a request, as transformers does, with an adapter or none.

            What it uses is fixed here: adapters that are activated, replaced or deleted later do
            not change it.

            Args:
                input_ids: the prompt.
                request_id: None: a new one.
                max_new_tokens: None: that of the manager.
                streaming: whether each token is delivered as soon as it is generated.
                record_timestamps: whether the time of each token is recorded.
                eos_token_id: tokens that end the request; None: those of the manager.
                adapter_name: a name or a composition, or None for the base model; by default what
                    is active in the calling thread and task, including an `AdapterSetup`.
                **logit_processor_kwargs: as transformers takes them.

            Returns:
                The id of the request; None if the manager accepts none, or in a process that does
                not drive its group.

            Raises:
                CompositionError: the adapter cannot act in a step with those in flight.
                ConfigError: the prompt is empty or too long, or has unknown tokens.
                StateError: the adapter is not one for single tokens, is merged or being deleted;
                    or the id is taken.
                UnknownNameError: an adapter is unknown.
            """
            if not self.is_tp_driver:
                return None
            if request_id is None:
                with self._request_lock:
                    request_id = f"req_{self._request_counter}"
                    self._request_counter += 1
            if max_new_tokens is None:
                max_new_tokens = self.generation_config.max_new_tokens
            try:
                with naming("add_request()"):
                    input_ids = self._admit(input_ids, request_id, max_new_tokens, adapter_name)
            except Exception as error:
                if isinstance(input_ids, RequestPrompt):
                    # transformers logs what goes wrong in `generate_batch`, and no more
                    input_ids.errors.append(error)
                raise
            added = None
            try:
                added = super().add_request(
                    input_ids, request_id, max_new_tokens, streaming, record_timestamps,
                    eos_token_id, **logit_processor_kwargs,
                )  # fmt: skip
            finally:
                if added is None:
                    self.requests.release(request_id)
            return added

        def _admit(
            self, input_ids: Any, request_id: str, new_tokens: int | None, adapter_name: object
        ) -> list[int]:
            model = cast("AdaptedModel", self.model)
            if adapter_name is ACTIVE and isinstance(input_ids, RequestPrompt):
                variant = input_ids.variant
            else:
                variant = asked_of(model, adapter_name)
            tokens = checked(model, input_ids, new_tokens, variant)
            if self.longest is not None:
                refuse_too_long(len(tokens), new_tokens, self.longest)
            is_alone = self.distributed_helper.tp_size == 1
            if not is_alone and (variant.invocations or variant.key != self.requests.own.key):
                raise StateError(
                    "the other processes of tensor parallelism do not know the adapter of a "
                    "request. Activate an adapter without an invocation in all of them before the "
                    "manager is made."
                )
            self.requests.admit(model, request_id, variant, tokens, is_alone)
            return tokens

        def add_requests(
            self,
            inputs: Sequence[Sequence[int]],
            max_new_tokens: int | None = None,
            *args: Any,
            adapter_names: Any = None,
            **kwargs: Any,
        ) -> list[str]:
            """Add several requests, as transformers does; all or none.

            Args:
                inputs: the prompts.
                max_new_tokens: of each; None: that of the manager.
                *args: as transformers takes them.
                adapter_names: a name, a composition or None for each; None: what is active acts on
                    all.
                **kwargs: as transformers takes them.

            Returns:
                The ids of the requests.

            Raises:
                AdapterZooError: as for `add_request`.
            """
            if adapter_names is not None or not all(
                isinstance(each, RequestPrompt) for each in inputs
            ):
                own = self.generation_config.max_new_tokens
                most = own if max_new_tokens is None else max_new_tokens
                with naming("add_requests()"):
                    model = cast("AdaptedModel", self.model)
                    inputs = prompts_of(model, inputs, adapter_names, most)
            return super().add_requests(cast("Any", inputs), max_new_tokens, *args, **kwargs)

        def warmup(self) -> None:
            """Warm up with the adapters that were active when the manager was made."""
            model, own = cast("AdaptedModel", self.model), self.requests.own
            # with an invocation, only steps of the base model may be captured
            plan = Plan(heads=own.plan.heads) if own.invocations else own.plan
            with model._active.overridden(plan):
                super().warmup()

        def _run_generation_loop(self, *args: Any, **kwargs: Any) -> None:
            try:
                with values_kept():
                    super()._run_generation_loop(*args, **kwargs)
            finally:
                self.requests.release(*self.requests.pins)

        def _create_batch_processor(self) -> Any:
            processor: Any = super()._create_batch_processor()
            if not isinstance(processor, _Processor):
                processor.__class__ = _Processor
                processor.requests = processor.cache.requests = self.requests
                processor.parked = deque()
                processor.cache.__class__ = _Cache
                processor.longest = infer_max_single_request_tokens(processor.cache)
                # instead of the scheduler's own, whose class the user chooses
                processor.scheduler.add_waiting_request = functools.partial(
                    processor.add_waiting_request, processor.scheduler.add_waiting_request
                )
                processor.scheduler.set_request_cancellation = functools.partial(
                    processor.cancel, processor.scheduler.set_request_cancellation
                )
            return processor

    class _Processor(continuous_api.ContinuousBatchProcessor):
        """Runs each step with the adapters of its requests.

        Attributes:
            requests: of the manager.
            longest: the most tokens of a request that the cache can hold.
            parked: requests that wait for a slot of the pool, in the order in which they came,
                each with the method that schedules it.
        """

        requests: Batch
        longest: int
        parked: deque[tuple[Any, Any]]

        def add_waiting_request(self, add: Any, state: Any) -> None:
            """Schedule a request.

            Args:
                add: the method of the scheduler.
                state: of the request.

            Raises:
                ConfigError: the cache can never hold it, which would make all requests fail.
            """
            self.requests.start(state.request_id)
            size = len(state.initial_tokens)
            refuse_too_long(size, state.max_new_tokens, self.longest)
            if state.max_new_tokens is None:
                state.max_new_tokens = state._new_tokens_limit = self.longest - size
            self.parked.append((add, state))
            self._schedule()

        def _schedule(self) -> None:
            """Schedule the requests whose adapters have slots, up to the first that has none."""
            while self.parked:
                add, state = self.parked[0]
                try:
                    if not self.requests.has_slot(state.request_id):
                        return
                    self.parked.popleft()
                    add(state)
                except Exception as error:  # noqa: BLE001  fails this request alone
                    if self.parked and self.parked[0][1] is state:
                        self.parked.popleft()
                    self._handle_request_error(error, state)

        def has_pending_requests(self) -> bool:
            """Return whether any request has not ended."""
            return bool(self.parked) or bool(super().has_pending_requests())

        def fail_all_requests(self, error: Exception) -> None:
            """Fail all requests that have not ended."""
            super().fail_all_requests(error)
            while self.parked:
                self._handle_request_error(error, self.parked.popleft()[1])

        def _handle_request_error(self, error: Exception, state: Any) -> None:
            self.requests.start(state.request_id)
            super()._handle_request_error(error, state)

        def prepare_next_batch(self) -> bool:
            """Return whether there is a step to run."""
            self._schedule()
            found = super().prepare_next_batch()
            self._settle()
            return bool(found)

        def cancel(self, cancel: Any, request_id: str) -> None:
            """Cancel a request, which the scheduler may not know yet.

            Args:
                cancel: the method of the scheduler.
                request_id: of the request.
            """
            kept = [each for each in self.parked if each[1].request_id != request_id]
            self.parked = deque(kept)
            cancel(request_id)

        def update_batch(self) -> None:
            """Take the tokens of a step."""
            super().update_batch()
            self._settle()

        def _settle(self) -> None:
            scheduler = self.scheduler
            parked = (state.request_id for _, state in self.parked)
            running = *scheduler.active_requests, *scheduler.waiting_requests
            self.requests.settle([*running, *parked])

        def _generation_step(self, model: nn.Module) -> None:
            batch = self.inputs_and_outputs
            if isinstance(batch, ContinuousBatchingAsyncIOs):
                batch = batch.io_pairs[batch.current_pair].host_io
            own = Pinned(self.requests.own)
            pins = [
                self.requests.pin(each.state.request_id) or own for each in batch.requests_in_batch
            ]
            plan, is_own = self._plan(model, batch, pins)
            with (
                cast("Any", model)._active.overridden(plan),
                _prompts(cast("Any", model), plan, batch, pins),
                _eagerly(self.model_runner, not is_own),
            ):
                super()._generation_step(model)

        def _plan(self, model: nn.Module, batch: Any, pins: Sequence[Pinned]) -> tuple[Plan, bool]:
            """Return the plan of a step, and whether captured graphs may run it."""
            variants = {id(pin.variant): pin.variant for pin in pins}
            if len(variants) == 1:
                (only,) = variants.values()
                if only.pool is not None:
                    rows = self._rows_of_slots(only.pool, model, batch, pins)
                    return replace(only.plan, rows=rows), False
                is_own = only.key == self.requests.own.key and not only.invocations
                return only.plan, is_own
            with self.requests.changed:
                mixed, known = self.requests.mixed, self.requests.variants
            numbers = {id(variant): number for number, variant in enumerate(known)}
            parts = [numbers[id(pin.variant)] for pin in pins]
            values, counts, outputs = self._layout(model, batch, parts)
            segments = tuple(zip(values, counts, strict=True))
            packed = PackedRows(segments=segments, outputs=outputs, known=len(known))
            return replace(cast("Plan", mixed), rows=packed), False

        def _rows_of_slots(
            self, pool: Any, model: nn.Module, batch: Any, pins: Sequence[Pinned]
        ) -> SlotRows:
            """Return the slot of each token of a step."""
            leases, counts, outputs = self._layout(model, batch, [pin.lease for pin in pins])
            rows: SlotRows = pool.rows(leases, counts, True)
            if outputs is not None:
                rows.outputs = pool.rows(outputs, [1] * len(outputs), True)
                rows.outputs.entered = True
            rows.entered = True
            return rows

        def _layout(
            self, model: nn.Module, batch: Any, values: Sequence[_T]
        ) -> tuple[list[_T], list[int], tuple[_T, ...] | None]:
            """Return a value of each request for the tokens of a step.

            Args:
                model: that runs.
                batch: of the step.
                values: one for each request.

            Returns:
                The values, how many tokens in a row have each, and the value of each token whose
                logits are computed; None for all.
            """
            listed, requests = [*values], batch.requests_in_batch
            counts = [each.query_length for each in requests]
            # graphs have sequences of fixed lengths
            if more := batch.num_q_tokens - sum(counts):
                listed.append(values[-1])
                counts.append(more)
            if not self.model_runner.supports_logits_to_keep(model):
                return listed, counts, None
            count = batch._get_num_sequences(use_padding=self.model_runner.pad_inputs)
            own = [v for v, each in zip(values, requests, strict=True) if each.has_new_token]
            # the others are the first token of the sequence, whose logits are not read
            return listed, counts, (*own, *[values[0]] * (count - len(own)))

    class _Cache(PagedAttentionCache):
        """Shares blocks among requests whose adapters have the same content.

        Attributes:
            requests: of the manager.
        """

        requests: Batch

        def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
            """Return how many tokens of a prompt the cache has."""
            return int(
                super().search_prefix_match(request_id, self._hashed(request_id, prompt_ids))
            )

        def mark_complete_blocks(self, state: Any, complete_blocks: dict[str, int]) -> None:
            """Let other requests share the blocks that a request has filled."""
            if complete_blocks:
                tokens = self._hashed(
                    state.request_id, state.initial_tokens + state.generated_tokens
                )
                state = types.SimpleNamespace(
                    request_id=state.request_id, status=state.status, initial_tokens=tokens,
                    generated_tokens=[],
                )  # fmt: skip
            super().mark_complete_blocks(state, complete_blocks)

        def _hashed(self, request_id: str, tokens: list[int]) -> list[int]:
            pin = self.requests.pin(request_id)
            if pin is None or not pin.salt:
                return tokens
            block = min(each.tokens_per_page for each in self.cache_allocators.values())
            return pin.hashed(tokens, block)


@contextmanager
def _prompts(model: AdaptedModel, plan: Plan, batch: Any, pins: Sequence[Pinned]) -> Iterator[None]:
    """Tell adapters where in the sequences of a step they act."""
    sequences = dict.fromkeys(s for pin in pins for s in pin.variant.invocations)
    if not sequences:
        yield
        return
    lengths = tuple(each.query_length for each in batch.requests_in_batch)
    starts = {s: tuple(pin.starts.get(s, NEVER) for pin in pins) for s in sequences}
    context = model._active.call
    outer = context.generation
    context.generation = Generation(plan.stacks, packed=PackedPrompts(lengths, starts))
    try:
        yield
    finally:
        context.generation = outer


@contextmanager
def _eagerly(runner: Any, is_eager: bool) -> Iterator[None]:
    """Run no captured graph and no compiled code, which contain the adapters of another step."""
    if is_eager:
        forward = runner._forward_process_and_sample
        runner._get_forward_fn = lambda use_block_table: (forward, False)
    try:
        yield
    finally:
        if is_eager:
            del runner._get_forward_fn
