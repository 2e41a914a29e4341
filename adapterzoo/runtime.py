"""Which adapters act, for a model, a thread and an asyncio task.

One `ActiveState` per model is shared by all its adapted layers. The plan is the first of these that
exists: the override of the running call, which ends before any other task can run; the innermost
block (`AdapterSetup`) of the calling thread and task; the default of all threads.

The block is kept in a context variable: tasks never see each other's block, and a task or an
`asyncio.to_thread` that starts inside a block inherits it. `torch.compile` cannot trace a context
variable, so each thread also notes the last block entered or left and the coroutine that did so.
Compiled code uses the note only while that coroutine is running, and raises otherwise.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from .anatomy.tree import below
from .call import Generation, RecordedCall
from .composition import Composition, fusions_of
from .composition.compile import SiteStep
from .composition.prompts import Joined, Prompts
from .composition.rows import ActiveHeads, RowMap
from .contracts import Prefix, SharedKey
from .errors import CompositionError, StateError, listing
from .trunk import Trunk, resumed


@dataclass(frozen=True, slots=True)
class Division:
    """How the calls of a module of a mixture are divided, if rows take different adapters in it.

    Attributes:
        numbers: for each part of the rows, which of the plans it takes.
        plans: what acts in the module, on all rows that take it.
    """

    numbers: tuple[int, ...]
    plans: tuple[Plan, ...]

    def by_name(self) -> Division:
        """Return the division for a copy of the model."""
        return Division(self.numbers, tuple(plan.by_name() for plan in self.plans))


@dataclass(frozen=True, slots=True)
class Plan:
    """A composition compiled for a model: what each site does in a forward.

    Attributes:
        setup: the composition it was compiled from; None for the base model.
        heads: the heads that run; without names if the plan selects none.
        sites: path of a site → what it evaluates; those without active adapters are absent.
        captures: path of a module → the sites that read its input.
        skip_layers: numbers of the blocks without adapters.
        rows: which rows of a batch take which part of the composition; None if all take all.
        stacks: paths of the encoders and decoders whose calls are recorded.
        counted: those among them whose tokens are counted from the first real one of each row.
        exit: path of the entry whose step has an inverse, which acts before the logits; None if
            there is none.
        prompts: the tokens that are added to sequences; None if none are.
        mixtures: of adapted experts: path and `around`, see `anatomy.Mixture`.
        divisions: path of a module of a mixture → how its calls are divided.
        trunk: the blocks of the running call that compute equal rows once; None if none do.
        divides_batch: whether the next call of the model must divide its batch; false inside such a
            call. A field, not a property: calls without adapters read it too.
    """

    setup: Composition | None = None
    heads: ActiveHeads = field(default_factory=ActiveHeads)
    sites: Mapping[str, SiteStep] = field(default_factory=dict)
    captures: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    skip_layers: tuple[int, ...] = ()
    rows: RowMap | None = None
    stacks: frozenset[str] = frozenset()
    counted: frozenset[str] = frozenset()
    exit: str | None = None
    prompts: Prompts | None = None
    mixtures: Mapping[str, str] = field(default_factory=dict)
    divisions: Mapping[str, Division] = field(default_factory=dict)
    trunk: Trunk | None = None
    divides_batch: bool = field(init=False)

    def __post_init__(self) -> None:
        """See how the rows stand."""
        divides = self.rows is not None and not self.rows.entered
        object.__setattr__(self, "divides_batch", divides)

    def by_name(self) -> Plan:
        """Return the plan for a copy of the model, which has its own adapters."""
        return replace(
            self,
            sites={path: site.by_name() for path, site in self.sites.items()},
            divisions={path: division.by_name() for path, division in self.divisions.items()},
        )

    def divided(self, parts: int) -> Plan:
        """Return the plan with the divisions of its mixtures.

        Args:
            parts: number of parts of the rows.

        Raises:
            CompositionError: an adapter in a divided module reads the call, or the stream at a
                module in it for a layer outside.
        """
        divisions: dict[str, Division] = {}
        captures, sites = dict(self.captures), dict(self.sites)
        for path, around in self.mixtures.items():
            division = self._division(path, parts)
            if len(division.plans) < 2:
                continue
            divisions[path] = division
            captures[around] = (*captures.get(around, ()), tokens_key(path))
            # they do more than their adapter
            for each in {path, around} & sites.keys():
                sites[each] = replace(sites[each], only=None)
        return replace(self, sites=sites, captures=captures, divisions=divisions)

    def _division(self, root: str, parts: int) -> Division:
        inside = {path: site for path, site in self.sites.items() if below(path, root)}
        plans: list[Plan] = []
        numbers: list[int] = []
        captures = {
            source: tuple(r for r in readers if below(r.removeprefix("+"), root))
            for source, readers in self.captures.items()
            if source != root and below(source, root)
        }
        for part in range(parts):
            found = {path: site.of_part(part) for path, site in inside.items()}
            own = {path: site for path, site in found.items() if site is not None}
            plan = Plan(self.setup, sites=own, captures=captures)
            if plan not in plans:
                plans.append(plan)
            numbers.append(plans.index(plan))
        if len(plans) > 1:
            adapters = (a for site in inside.values() for a in site.adapters or ())
            modules = (module for adapter in adapters for module in adapter.modules())
            reads_call = any(getattr(module, "reads_call", False) for module in modules)
            if reads_call or any(captures[s] != self.captures[s] for s in captures):
                raise CompositionError(
                    f"{self.setup!r}: at {root!r}, which has experts, an adapter reads the call of "
                    "the model. Exclude its layers (exclude_modules=[…]), or activate one adapter."
                )
        return Division(tuple(numbers), tuple(plans))


def tokens_key(path: str) -> str:
    """Return the key in captures of the input of a mixture, `[rows, tokens, …]`.

    Args:
        path: of the module whose calls are divided.
    """
    return f"*{path}"


class Default:
    """The state that all threads share: the plan outside overrides and blocks."""

    def __init__(self, plan: Plan | None = None) -> None:
        """Start with a plan.

        Args:
            plan: None for that of the base model.
        """
        self.plan = Plan() if plan is None else plan
        # modules that layers of one adapter share, by its name; they are modules of the model
        self.shared: dict[str, nn.Module] = {}
        # the innermost block of the calling thread and task
        self.block: ContextVar[SetupBlock | None] = ContextVar("block", default=None)
        # every block that some context still holds, and whether there is one
        self.blocks: weakref.WeakSet[SetupBlock] = weakref.WeakSet()
        self.has_blocks = False
        # whether a task has entered one of them, so that contexts of one thread may differ
        self.by_tasks = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles keep the plan; blocks belong to their tasks."""
        return Default, (self.plan.by_name(),), {"shared": self.shared}


@dataclass(slots=True)
class BlockState:
    """The plan of an `AdapterSetup` block.

    Attributes:
        plan: the active plan.
        broken: why the plan no longer gives what the block was entered for; None if it does.
    """

    plan: Plan
    broken: str | None = None


# reentrant: also taken when a block is freed, which may happen at any allocation
_blocks_lock = threading.RLock()


class SetupBlock:
    """A plan that is active in the calling thread and task until the block ends."""

    def __init__(self, default: Default, plan: Plan, owner: object) -> None:
        """Describe the block; it takes effect once the context variable holds it.

        Args:
            default: of the model.
            plan: the plan to activate.
            owner: coroutine of the task that enters it; None outside of tasks.
        """
        self.state = BlockState(plan)
        self.outer = default.block.get()
        self.owner = owner
        self.thread = threading.get_ident()
        self.is_open = True
        self._default = default
        with _blocks_lock:
            default.blocks.add(self)
            default.has_blocks = True
            default.by_tasks = default.by_tasks or owner is not None

    def __del__(self) -> None:
        """Update the flags: without blocks of tasks, all contexts of a thread see the same plan."""
        with _blocks_lock:
            others = [b for b in self._default.blocks if b is not self]
            self._default.has_blocks = bool(others)
            self._default.by_tasks = any(b.owner is not None for b in others)


class CallContext:
    """The state of the running calls of one thread; an entry ends with the call that made it.

    Attributes:
        captures: path of a site → the residual stream, captured for it and not yet read.
        reads: running calls of modules that read changed parameters, innermost last, each with
            the parameters that it has built.
        running: layers whose own forward runs, if others read their parameters too.
        stacks: running calls of encoders and decoders, innermost last.
        has_joined: whether a module of the running call has got the tokens that adapters add.
        generation: of the running `generate`.
        prefixes: of running attentions, innermost last.
        trunk: of the last call.
    """

    def __init__(self, default: Default) -> None:
        """Start between two calls.

        Args:
            default: of the model.
        """
        self._default = default
        self.stacks: list[Frame] = []
        self.has_joined = False
        self.generation: Generation | None = None
        self.prefixes: list[tuple[nn.Module, Prefix]] = []
        self.captures: dict[str, Tensor] = {}
        self.reads: list[tuple[object, dict[tuple[object, ...], Tensor]]] = []
        self.running: list[object] = []
        self.trunk: Trunk | None = None

    @property
    def stack(self) -> RecordedCall:
        """The innermost running call of an encoder or decoder.

        Raises:
            StateError: none is running.
        """
        if not self.stacks:
            raise StateError("an active adapter reads the model's call. Call the whole model.")
        return self.stacks[-1].call

    @property
    def joined(self) -> Joined | None:
        """The sequences of the running call, with the tokens that adapters add."""
        return self.stacks[-1].joined if self.stacks else None

    def shared(self, key: SharedKey) -> nn.Module:
        """Return the module that the layers of an adapter share, on this replica."""
        # a replica has its own modules, which only the modules around the layer hold
        around = (f.shared() for f in reversed(self.stacks) if f.shared is not None)
        return shared_by(next(filter(None, around), self._default.shared), key)

    def part(self, path: str) -> Any:
        """Return a module or parameter of the running model, of this replica.

        Args:
            path: below the base model.

        Raises:
            StateError: no call of the model, or of a part that has it, is running.
        """
        for frame in reversed(self.stacks):
            above = f"{frame.call.path}." if frame.call.path else ""
            if path.startswith(above):
                # the whole model may be one with a head around the base model
                found = getattr(frame.module, "base_model", frame.module)
                return functools.reduce(getattr, path.removeprefix(above).split("."), found)
        raise StateError(f"an active adapter reads {path!r}, and the model around it is not called")


def shared_by(modules: Mapping[str, nn.Module], key: SharedKey) -> nn.Module:
    """Return the module that the layers of an adapter share.

    Args:
        modules: the shared modules of all adapters, by name.
        key: of the adapter.
    """
    own: Any = modules[key.name]
    return cast("nn.Module", own if key.number is None else own._modules[str(key.number)])


class Frame(NamedTuple):
    """A running call of an encoder or decoder.

    Attributes:
        call: its recorded arguments.
        shared: returns the shared modules of all adapters by name; None if others hold them.
        module: the encoder or decoder.
        joined: its sequences with the tokens that adapters add; None if none are added.
    """

    call: RecordedCall
    shared: Callable[[], Mapping[str, nn.Module]] | None
    module: nn.Module
    joined: Joined | None = None


class ActiveState(threading.local):
    """What is active in the calling thread and task."""

    def __init__(self, default: Default) -> None:
        """Start with a default plan; runs again, with the same argument, in each thread.

        Args:
            default: shared by all threads. A default value would be made anew in each thread.
        """
        self.default = default
        # of the running call
        self.override: Plan | None = None
        # for compiled code: the block that code outside of tasks has entered, the one that a task
        # has entered or resumed last, and the coroutine of that task
        self.noted: BlockState | None = None
        self.noted_of_task: BlockState | None = None
        self.owner: Any = None
        # of the running calls of this thread
        self.call = CallContext(default)
        self._pinned: tuple[Plan, ActiveState] | None = None

    @property
    def plan(self) -> Plan:
        """The active plan of the calling thread and task."""
        # runs at every layer: the usual case comes first
        default = self.default
        if self.override is None and not default.has_blocks:
            return default.plan
        local = self.local_plan
        return default.plan if local is None else local

    @property
    def local_plan(self) -> Plan | None:
        """The plan of the running call or of the innermost block; None if the default is active.

        Raises:
            StateError: an adapter of the block was deleted, or weights merged in another thread;
                or compiled code cannot determine which block the running task is in.
        """
        if self.override is not None:
            return self.override
        if (state := self._block_state()) is None:
            return None
        plan, why = state.plan, state.broken
        if why is not None:
            raise StateError(f"AdapterSetup({plan.setup!r}): {why}. Leave the block.")
        return plan

    @property
    def heads(self) -> ActiveHeads:
        """The active heads, even if the block's plan is broken."""
        state = self._block_state() if self.override is None else None
        return self.plan.heads if state is None else state.plan.heads

    def _block_state(self) -> BlockState | None:
        """Return the state of the innermost block."""
        if not torch.compiler.is_dynamo_compiling():
            block = self.default.block.get()
            return None if block is None else block.state
        # compiled code cannot read the context variable
        if not self.default.by_tasks:
            return self.noted
        if self.owner is not None:
            if self.owner.cr_running:
                return self.noted_of_task
        elif self.noted is not None:
            return self.noted
        raise StateError(
            "compiled forward(): another asyncio task is inside an AdapterSetup. Write the call "
            "in a 'with AdapterSetup(…)' block of its own, without an await before it."
        )

    @contextmanager
    def overridden(self, plan: Plan) -> Iterator[None]:
        """Activate the plan in the calling thread until the context ends.

        Use it for one call only: do not await inside.
        """
        outer, self.override = self.override, plan
        try:
            yield
        finally:
            self.override = outer
            self.call.captures.clear()

    def resumable(self) -> Callable[[], AbstractContextManager[None]] | None:
        """Return a function that recreates the current active state in a later call, in any thread.

        Gradient checkpointing computes a block again in the backward pass, before which the default
        plan may change.

        Returns:
            A function that returns a context to run in; None in compiled code if only the default
            plan is active.
        """
        plan, stacks = self.local_plan, list(self.call.stacks)
        # compiled code recomputes within its own graph, for which the default plan stays
        if plan is None and not stacks and torch.compiler.is_compiling():
            return None
        plan = self.plan
        has_ended = plan.trunk is not None and plan.trunk.has_ended
        return functools.partial(self._resumed, plan, stacks, has_ended)

    @contextmanager
    def _resumed(self, plan: Plan, stacks: list[Frame], has_ended: bool) -> Iterator[None]:
        outer, self.call.stacks = self.call.stacks, stacks
        try:
            with self.overridden(plan), resumed(plan.trunk, has_ended):
                yield
        finally:
            self.call.stacks = outer

    @contextmanager
    def entered(self, plan: Plan) -> Iterator[None]:
        """Activate the plan in the calling thread and task until the context ends."""
        default, task = self.default, current_task()
        owner = None if task is None else task.get_coro()
        block = SetupBlock(default, plan, owner)
        default.block.set(block)
        before = self.noted, self.owner
        if task is None:
            self.noted, self.owner = block.state, None
        else:
            self.noted_of_task, self.owner = block.state, owner
        try:
            yield
        finally:
            block.is_open = False
            default.block.set(block.outer)
            if task is None:
                self.noted, self.owner = before
            else:
                self.noted_of_task = None if block.outer is None else block.outer.state
                self.owner = owner
            self.call.captures.clear()

    @property
    def overrides(self) -> list[Plan]:
        """The override of the running call, and the plans of all open blocks of this thread."""
        plans = [block.state.plan for block in self._open_blocks()]
        return plans if self.override is None else [*plans, self.override]

    def change_overrides(self, change: Callable[[Plan], Plan]) -> None:
        """Replace each of the calling thread's overrides."""
        for block in self._open_blocks():
            block.state.plan = change(block.state.plan)
        self.override = self.override and change(self.override)

    def forget(self, name: str, is_fusion: bool = False) -> None:
        """Mark blocks that use a deleted adapter or fusion: they must not run without it."""
        with _blocks_lock:
            for block in self.default.blocks:
                setup = block.state.plan.setup
                names = () if setup is None else setup.flatten()
                if name in ([f.name for f in fusions_of(setup)] if is_fusion else names):
                    block.state.broken = f"{name!r} was deleted"

    def change_weights(self, names: Sequence[str], how: str) -> None:
        """Mark blocks other than the open ones of this thread: the base weights have changed.

        Args:
            names: of the adapters in them; none: nothing has changed.
            how: "merged" or "unmerged".
        """
        with _blocks_lock:
            for block in {*self.default.blocks} - {*self._open_blocks()} if names else ():
                block.state.broken = f"{listing(names)} was {how}"

    def _open_blocks(self) -> list[SetupBlock]:
        thread = threading.get_ident()
        with _blocks_lock:
            return [b for b in self.default.blocks if b.is_open and b.thread == thread]

    def pinned(self) -> ActiveState:
        """Return an active state that gives every thread the calling thread's current plan.

        It is the same object until the plan changes: the layers of a replica pass captured inputs
        on through it.
        """
        plan = self.plan
        if self._pinned is None or self._pinned[0] is not plan:
            self._pinned = plan, ActiveState(Default(plan.by_name()))
        state = self._pinned[1]
        state.default.shared = self.default.shared
        return state

    def __reduce__(self) -> tuple[type[ActiveState], tuple[Default]]:
        """Copies and pickles keep the default; an override belongs to its thread."""
        return ActiveState, (self.default,)

    def __deepcopy__(self, memo: dict[int, Any]) -> ActiveState:
        """Return a state that shares only immutable plans with this one."""
        copied = ActiveState(Default(self.default.plan.by_name()))
        memo[id(self)] = copied
        copied.default.shared = copy.deepcopy(self.default.shared, memo)
        return copied


def current_task() -> asyncio.Task[Any] | None:
    """Return the asyncio task that runs in the calling thread; None outside tasks."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
