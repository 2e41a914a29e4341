"""`AdapterPool`: many adapters in files, of which the slots of a model hold a few.

Each row of a batch names an adapter or none. The pool brings the adapters of a batch into slots
(see `model/slots.py`), evicts the least recently used ones, and caches what it has read on the CPU,
up to a number of bytes. Batches that find no free slot wait in order of arrival.

Sources: Sheng et al. 2023 (S-LoRA), arXiv:2311.03285, §4; the terms are those of vLLM's
`max_loras` and `max_cpu_loras`, SGLang's pinned adapters and LoRAX's loading on request.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import torch

from adapterzoo import formats, hub
from adapterzoo.composition.rows import SlotRows
from adapterzoo.config import AdapterConfig
from adapterzoo.errors import (
    CompositionError,
    ConfigError,
    DuplicateNameError,
    StateError,
    listing,
    names_call,
    unknown_name,
)
from adapterzoo.formats.checkpoint import Checkpoint
from adapterzoo.kernels.ops import exactly
from adapterzoo.model import base, checkpointing
from adapterzoo.model import slots as _slots
from adapterzoo.model.hf.info import ModelInfo
from adapterzoo.model.state import AdaptedModel, LoadOptions
from adapterzoo.names import BASE, check_name
from adapterzoo.runtime import current_task

StrPath: TypeAlias = "str | Path"


class Lease(NamedTuple):
    """A slot that holds an adapter until it is released.

    Attributes:
        name: the adapter's name.
        shelf: number of its shelf.
        slot: number of the slot on that shelf.
    """

    name: str
    shelf: int
    slot: int


class Found(NamedTuple):
    """An adapter in files, without its values.

    Attributes:
        folder: the folder of its files.
        name: the name that the user gave, or that it was saved under.
        config: its config.
        fingerprint: its fingerprint.
    """

    folder: Path
    name: str
    config: AdapterConfig
    fingerprint: str


def find(
    model: AdaptedModel,
    reference: StrPath,
    name: str | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Found, Checkpoint]:
    """Find an adapter that can act in a slot; return it and the contents of its files.

    Args:
        model: the model that the adapter is for.
        reference: a folder or a name on the Hub; `@` and a fingerprint may follow.
        name: the adapter's name; None: the one it was saved under.
        dtype: see `AdapterPool`.

    Raises:
        CheckpointError: the files are damaged, do not fit the model, or have another fingerprint.
        ConfigError: the adapter cannot act in a slot.
    """
    path, expected = hub.pinned(reference)
    folder, hub_name = checkpointing.found(
        model, path, None, None, None, LoadOptions(dtype=dtype), {}
    )
    stored = formats.read(folder, "adapter", ModelInfo(model, False))
    checkpointing.check_fingerprint(model, stored, expected)
    own = checkpointing.name_in(name, stored, hub_name or folder)
    record = checkpointing.compared(model, stored, dtype=dtype).record
    _slots.check_batched(repr(own), record)
    return Found(folder, own, record.config, checkpointing.fingerprint_of(model, stored)), stored


@dataclass(eq=False)
class Member:
    """An adapter of a pool.

    Attributes:
        folder: the folder of its files.
        shelf: number of the shelf.
        fingerprint: its fingerprint when it was added.
        pinned: whether it keeps its slot.
        lease: lease of the slot that it keeps; None until it is loaded.
        was_loaded: whether its values have been read.
        claims: number of requests that will use it.
        leaves: whether it is being removed.
    """

    folder: Path
    shelf: int
    fingerprint: str
    pinned: bool = False
    lease: Lease | None = None
    was_loaded: bool = False
    claims: int = 0
    leaves: bool = False


@dataclass(eq=False)
class ShelfSlots:
    """The slots of a shelf.

    Attributes:
        names: the adapter in each slot.
        users: number of batches that use each slot.
        used: slot numbers, least recently used first.
    """

    names: list[str | None]
    users: list[int]
    used: OrderedDict[int, None]

    @classmethod
    def empty(cls, count: int) -> ShelfSlots:
        """Return empty slots."""
        return cls([None] * count, [0] * count, OrderedDict.fromkeys(range(count)))


@dataclass(eq=False)
class QueuedBatch:
    """A batch waiting for slots.

    Attributes:
        is_inner: whether a block of its thread or task already holds slots, so that it cannot wait.
        is_claimed: whether a claim keeps its adapters, so that it gets them even during removal.
        has_slots: whether it has its slots and is only reading adapters.
        given_up: whether its task was cancelled.
    """

    is_inner: bool = False
    is_claimed: bool = False
    has_slots: bool = False
    given_up: bool = False


class AdapterPool:
    """Adapters by name, for the rows of batches and for requests of continuous batching.

    ```python
    pool = AdapterPool(model, {"a": "runs/a", "b": "runs/b"}, slots=8, max_bytes=2**30)
    with pool.use(["a", None, "b"]):
        model.generate(**batch)
    model.generate_batch(prompts, adapter_names=["b", None, "a"])
    ```

    All methods may be called from any thread. A compiled model runs one graph for all adapters.
    """

    @names_call
    def __init__(
        self,
        model: Any,
        adapters: Mapping[str, StrPath] | Iterable[StrPath] = (),
        *,
        configs: Iterable[AdapterConfig | str] = (),
        slots: int = 8,
        max_bytes: int | None = None,
        pinned: Iterable[str] = (),
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make the slots; the adapters are loaded when they are first used.

        Args:
            model: on its device, from `init` or an `AutoAdapterModel`; inference only.
            adapters: folders or names on the Hub, by the name for requests or by their own; `@` and
                a fingerprint may follow each.
            configs: configs of the largest adapters to `add` later; those of `adapters`
                always have room.
            slots: number of adapters of one kind (one method with the same options) that
                can act at the same time.
            max_bytes: limit of the memory that the pool uses, on the device and the CPU, at least
                the slots and one adapter; None: no limit.
            pinned: adapters that never lose their slots; loaded immediately.
            dtype: dtype of the adapters; None: as in their files.

        Raises:
            CheckpointError: a folder holds no adapter for this model.
            ConfigError: an argument is wrong, or an adapter cannot act in a slot.
            StateError: the model already has a pool, is sharded, or has a merged adapter.
        """
        if type(slots) is not int or slots < 1:
            raise ConfigError(f"slots={slots!r} is not a positive integer. Write slots=8.")
        for argument, value in (("adapters", adapters), ("configs", configs), ("pinned", pinned)):
            # a text is a sequence of letters
            if isinstance(value, (str, Path)):
                raise ConfigError(f"{argument}={value!r} is not a list. Write [{str(value)!r}].")
        self.model: AdaptedModel = model
        self._dtype = dtype
        # base models that the files name; the comparison takes time
        self._bases: set[str] = set()
        named = self._named(adapters)
        wide = [AdapterConfig.load(config) for config in configs]
        own = [found.config for found in named.values()]
        if not own and not wide:
            raise ConfigError("no adapters given. Write adapters={…}, or configs=['lora'].")
        _slots.refuse_merged(self.model)
        self._shelves = _slots.make_shelves(self.model, [*wide, *own], slots, dtype)
        self._members = {name: self._member_of(found) for name, found in named.items()}
        largest = max(shelf.nbytes // slots for shelf in self._shelves)
        least = sum(shelf.nbytes for shelf in self._shelves) + largest
        if max_bytes is not None and max_bytes < least:
            raise ConfigError(
                f"max_bytes={max_bytes} is less than {slots} slots and one adapter of the largest "
                f"size need. Write max_bytes={least}, or fewer slots."
            )
        self._most = max_bytes
        self._cached: OrderedDict[Member, tuple[_slots.Stored, int]] = OrderedDict()
        self._cached_bytes = 0
        self._places = [ShelfSlots.empty(slots) for _ in self._shelves]
        self._changed = threading.Condition()
        self._queue: deque[QueuedBatch] = deque()
        # open blocks of `use`: where each was opened, and its adapters
        self._blocks: list[tuple[object, frozenset[str]]] = []
        self._counts: Counter[str] = Counter()
        self._waited = 0.0
        self._closed = False
        self.plan = _slots.put(model, self, self._shelves)
        try:
            for name in pinned:
                self.pin(name)
        except BaseException:
            self.close()
            raise

    def _named(self, adapters: Mapping[str, StrPath] | Iterable[StrPath]) -> dict[str, Found]:
        """Return the files of adapters by name.

        Raises:
            ConfigError: two adapters have the same name.
        """
        if isinstance(adapters, Mapping):
            return {name: self._found(each, check_name(name))[0] for name, each in adapters.items()}
        named: dict[str, Found] = {}
        for found in (self._found(each)[0] for each in adapters):
            if found.name in named:
                raise ConfigError(
                    f"{str(named[found.name].folder)!r} and {str(found.folder)!r} both hold "
                    f"{found.name!r}. Write adapters={{'name': folder, …}}."
                )
            named[found.name] = found
        return named

    def _found(self, reference: StrPath, name: str | None = None) -> tuple[Found, Checkpoint]:
        """Return `find`'s result; warn once per base model that differs from this one.

        Raises:
            CheckpointError: the adapter does not fit the model.
            ConfigError: the adapter cannot act in a slot.
        """
        found, stored = find(self.model, reference, name, self._dtype)
        said = repr(base.entries_in(stored.metadata))
        if said not in self._bases:
            self._bases.add(said)
            base.warn_of_another(self.model, stored.metadata, found.name)
        return found, stored

    def _member_of(self, found: Found) -> Member:
        """Return an adapter's entry in the pool.

        Raises:
            ConfigError: no shelf has its kind.
        """
        shelf = self._shelf_of(found.name, found.config)
        return Member(found.folder, shelf, found.fingerprint)

    def _shelf_of(self, name: str, config: AdapterConfig) -> int:
        """Return the shelf number for an adapter with this config.

        Raises:
            ConfigError: no shelf has its kind.
        """
        kind = _slots.kind_of(config)
        for number, shelf in enumerate(self._shelves):
            if shelf.kind == kind:
                return number
        raise ConfigError(
            f"the pool has no slots of the kind of {name!r}, {config!r}. Write AdapterPool(model, "
            "configs=[…]) with this config."
        )

    # --- the adapters ---

    def __contains__(self, name: object) -> bool:
        """Return whether the pool has an adapter of this name."""
        return name in self._members

    def __iter__(self) -> Iterator[str]:
        """Yield the adapters' names."""
        return iter([*self._members])

    def __len__(self) -> int:
        """Return the number of adapters."""
        return len(self._members)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise StateError("the pool is closed. Create a new one.")

    def _member(self, name: object, is_claimed: bool = False) -> Member:
        """Return an adapter.

        Args:
            name: the adapter's name.
            is_claimed: whether a claim keeps it, even if it is being removed.

        Raises:
            StateError: the adapter is being removed, or the pool is closed.
            UnknownNameError: no adapter has this name.
        """
        self._refuse_closed()
        if not isinstance(name, str) or name not in self._members:
            raise unknown_name("", "adapter", name, self._members)
        member = self._members[name]
        if member.leaves and not is_claimed:
            raise StateError(f"{name!r} is being removed. Write pool.add({name!r}, …) afterwards.")
        return member

    @names_call
    def add(
        self, name: str, folder: StrPath, *, pinned: bool = False, overwrite_ok: bool = False
    ) -> None:
        """Add an adapter, or replace one once it is unused; read it now, while others run.

        Args:
            name: the name that `use` and requests give.
            folder: the folder of its files, which must stay there; or a name on the Hub. `@` and a
                fingerprint may follow.
            pinned: whether it keeps a slot permanently.
            overwrite_ok: whether it may replace an adapter of this name.

        Raises:
            CheckpointError: the folder holds no adapter for this model.
            ConfigError: the adapter fits no slot.
            DuplicateNameError: the name is taken.
            StateError: its predecessor is being removed, or used by a block that is open here.
        """
        check_name(name)
        self._refuse_taken(name, overwrite_ok)
        found, stored = self._found(folder, name)
        member = self._member_of(found)
        with self._changed:
            if pinned:
                self._refuse_last(name, member.shelf)
        self._stored(name, member, stored)
        try:
            with self._changed:
                # another thread may have been first
                self._refuse_taken(name, overwrite_ok)
                if name in self._members:
                    self._leave(name)
                self._refuse_closed()
                self._members[name] = member
                self._counts["added"] += 1
        except BaseException:
            with self._changed:
                self._drop(member)
            raise
        if pinned:
            self.pin(name)

    def _refuse_taken(self, name: str, overwrite_ok: bool) -> None:
        """Refuse to add an adapter whose name is taken.

        Raises:
            DuplicateNameError: the name is taken.
            StateError: that adapter is being removed, or the pool is closed.
        """
        self._refuse_closed()
        if name not in self._members:
            return
        if not overwrite_ok:
            raise DuplicateNameError(
                f"{name!r} is already in the pool. Write overwrite_ok=True, or another name."
            )
        self._member(name)

    @names_call
    def remove(self, name: str) -> None:
        """Remove an adapter once it is unused; its files stay.

        Raises:
            StateError: the adapter is being removed, or used by a block that is open here.
            UnknownNameError: no adapter has this name.
        """
        with self._changed:
            self._member(name)
            self._leave(name)

    def _leave(self, name: str) -> None:
        """Wait until an adapter is unused, then forget it.

        Raises:
            StateError: it would wait for a block that is open here.
        """
        member = self._members[name]
        if any(name in names for names in self._blocks_here()):
            raise StateError(f"use([{name!r}]) is open here. Write this after its block.")
        member.leaves = True
        try:
            self._unpin(name)
            self._changed.wait_for(lambda: not member.claims and not self._users(name))
        except BaseException:
            member.leaves = False
            raise
        places = self._places[member.shelf]
        places.names = [None if each == name else each for each in places.names]
        self._drop(member)
        del self._members[name]
        self._changed.notify_all()

    def _blocks_here(self) -> list[frozenset[str]]:
        """Return the adapters of each block of `use` that is open in this thread and task."""
        here = _here()
        return [names for place, names in self._blocks if place == here and names]

    @names_call
    def pin(self, name: str) -> None:
        """Load an adapter into a slot permanently.

        Raises:
            ConfigError: no slot would be left for others.
        """
        with self._changed:
            member = self._member(name)
            if member.pinned:
                return
            self._refuse_last(name, member.shelf)
            member.pinned = True
        try:
            (lease,) = cast("list[Lease]", self._acquire([name], self._queued_batch()))
        except BaseException:
            member.pinned = False
            raise
        with self._changed:
            if member.pinned and member.lease is None:
                member.lease = lease
            else:
                # unpinned in the meantime
                self.release(lease)

    def _refuse_last(self, name: str, shelf: int) -> None:
        """Refuse to pin an adapter in the last unpinned slot.

        Raises:
            ConfigError: it would take the last unpinned slot.
        """
        others = (m for n, m in self._members.items() if n != name and m.shelf == shelf)
        kept = sum(member.pinned for member in others)
        if kept + 1 >= len(self._places[shelf].names):
            raise ConfigError(
                f"{name!r} would take the last unpinned slot of its kind. Write "
                f"AdapterPool(…, slots={kept + 2})."
            )

    @names_call
    def unpin(self, name: str) -> None:
        """Allow an adapter to lose its slot again."""
        with self._changed:
            self._member(name)
            self._unpin(name)

    def _unpin(self, name: str) -> None:
        member = self._members[name]
        member.pinned = False
        if member.lease is not None:
            self.release(member.lease)
            member.lease = None

    # --- the cache on the CPU ---

    @property
    def nbytes(self) -> int:
        """The bytes that the pool holds, in slots and in its cache."""
        return sum(shelf.nbytes for shelf in self._shelves) + self._cached_bytes

    def _load(
        self, name: str, member: Member, read: Checkpoint | None
    ) -> tuple[_slots.Stored, int]:
        """Return the values of an adapter on the CPU, and their size in bytes.

        Args:
            name: the adapter's name.
            member: the adapter.
            read: the contents of its files; None: they are read now.

        Raises:
            CheckpointError: its files are damaged.
            ConfigError: the adapter fits no slot.
            StateError: its files have changed.
        """
        stored = read or formats.read(member.folder, "adapter", ModelInfo(self.model, False))
        if checkpointing.fingerprint_of(self.model, stored) != member.fingerprint:
            raise StateError(
                f"the files of {name!r} in {str(member.folder)!r} have changed. Write "
                f"pool.add({name!r}, …, overwrite_ok=True)."
            )
        record = checkpointing.filled(self.model, stored, (), self._dtype)
        values = _slots.values_of(self.model, record)
        found = _slots.to_host(values, self.model.device.type == "cuda")
        self._shelves[member.shelf].check(name, found)
        return found, sum(map(_slots.nbytes, found.values()))

    def _drop(self, member: Member) -> None:
        _, size = self._cached.pop(member, (None, 0))
        self._cached_bytes -= size

    def _make_room(self, size: int) -> None:
        """Evict the least recently used from the cache until `size` bytes are free."""
        while self._cached and self._most is not None and self.nbytes + size > self._most:
            self._drop(next(iter(self._cached)))
            self._counts["evicted_from_cpu"] += 1

    def _stored(self, name: str, member: Member, read: Checkpoint | None = None) -> _slots.Stored:
        """Return the values of an adapter, from its files if they are not in the cache.

        Args:
            name: the adapter's name.
            member: the adapter.
            read: the contents of its files, if they have just been read.

        Raises:
            StateError: its files have changed.
        """
        # one at a time, so that memory stays within the limit and nothing is read twice
        with _LOADING:
            with self._changed:
                if (found := self._cached.get(member)) is not None:
                    self._cached.move_to_end(member)
                    self._counts["cpu_hits"] += 1
                    return found[0]
                self._make_room(self._shelves[member.shelf].nbytes // len(self._places[0].names))
            with torch.inference_mode(False), exactly(self.model.device):
                stored, size = self._load(name, member, read)
            with self._changed:
                self._refuse_closed()
                self._counts["loads"] += 1
                member.was_loaded = True
                self._make_room(size)
                self._cached[member] = stored, size
                self._cached_bytes += size
        return stored

    # --- slots ---

    def _users(self, name: str) -> int:
        places = self._places[self._members[name].shelf]
        return sum(u for own, u in zip(places.names, places.users, strict=True) if own == name)

    def _find(
        self, names: Sequence[str], is_claimed: bool = False
    ) -> list[tuple[Lease, bool]] | None:
        """Return each adapter's slot, and whether it is loaded there; None if too few are free."""
        found: list[tuple[Lease, bool]] = []
        for name in names:
            shelf = self._member(name, is_claimed).shelf
            places = self._places[shelf]
            there = places.names.index(name) if name in places.names else None
            found.append((Lease(name, shelf, -1 if there is None else there), there is not None))
        taken = {(lease.shelf, lease.slot) for lease, is_there in found if is_there}
        for number, (lease, is_there) in enumerate(found):
            if is_there:
                continue
            places = self._places[lease.shelf]
            free = [
                slot
                for slot in places.used
                if not places.users[slot] and (lease.shelf, slot) not in taken
            ]
            if not free:
                return None
            # an empty slot first
            slot = next((slot for slot in free if places.names[slot] is None), free[0])
            taken.add((lease.shelf, slot))
            found[number] = lease._replace(slot=slot), False
        return found

    def _refuse_more_than_slots(self, names: Sequence[str], is_claimed: bool = False) -> None:
        """Refuse a batch for which there can never be enough slots.

        Raises:
            ConfigError: the batch needs more slots than there are.
        """
        for number, places in enumerate(self._places):
            own = [n for n in names if self._member(n, is_claimed).shelf == number]
            pinned = [n for n, m in self._members.items() if m.pinned and m.shelf == number]
            if len({*own, *pinned}) > len(places.names):
                raise ConfigError(
                    f"a batch names {len(own)} adapters of a kind with {len(places.names)} slots, "
                    f"{len(pinned)} of them pinned. Write AdapterPool(…, "
                    f"slots={len({*own, *pinned})}), or smaller batches."
                )

    def _queued_batch(self) -> QueuedBatch:
        """Return a batch of this thread and task."""
        with self._changed:
            return QueuedBatch(is_inner=bool(self._blocks_here()))

    def _acquire(
        self, names: Iterable[str], own: QueuedBatch, blocks: bool = True
    ) -> list[Lease] | None:
        """Return slots that hold the adapters.

        Args:
            names: names of the adapters.
            own: the batch, which waits for its turn and for enough slots.
            blocks: False: return None instead of waiting.

        Raises:
            AdapterZooError: an adapter is unknown, cannot be loaded, or there are too many of them.
        """
        names, start = tuple(dict.fromkeys(names)), time.monotonic()
        if not names:
            return []
        with self._changed:
            self._refuse_more_than_slots(names, own.is_claimed)
            if not blocks and (self._queue or self._find(names, own.is_claimed) is None):
                return None
            self._queue.append(own)
        leases: list[Lease] = []
        empty: set[Lease] = set()
        try:
            with self._changed:
                if (found := self._awaited(names, own)) is None:
                    return None
                for lease, is_there in found:
                    places = self._places[lease.shelf]
                    places.users[lease.slot] += 1
                    places.used.move_to_end(lease.slot)
                    if not is_there:
                        self._counts["evicted"] += places.names[lease.slot] is not None
                        # counted from now on, so that it is not removed while it is read
                        places.names[lease.slot] = lease.name
                        empty.add(lease)
                    leases.append(lease)
                    self._counts["hits" if is_there else "misses"] += 1
                own.has_slots = True
                self._waited += time.monotonic() - start
            for lease in tuple(empty):
                self._fill(lease)
                empty.discard(lease)
        except BaseException:
            with self._changed:
                for lease in leases:
                    if lease in empty:
                        self._places[lease.shelf].names[lease.slot] = None
                    self.release(lease)
            raise
        finally:
            with self._changed:
                self._queue.remove(own)
                self._changed.notify_all()
        return leases

    def _awaited(self, names: Sequence[str], own: QueuedBatch) -> list[tuple[Lease, bool]] | None:
        """Return `_find`'s result once it is the batch's turn; None if its task was cancelled.

        Raises:
            StateError: the pool is closed; or the batch would wait for slots that it holds itself.
        """
        while not own.given_up:
            self._refuse_closed()
            if self._queue[0] is own:
                # in the meantime one may have been pinned, or replaced by one of another kind
                self._refuse_more_than_slots(names, own.is_claimed)
                if (found := self._find(names, own.is_claimed)) is not None:
                    return found
            if own.is_inner and not self._queue[0].has_slots:
                raise StateError(
                    f"use({[*names]!r}) waits for slots in a block of use(…), which keeps its own. "
                    "Write one use([…]) with the adapters of both, or more slots."
                )
            self._changed.wait()
        return None

    def _fill(self, lease: Lease) -> None:
        """Write an adapter into its slot."""
        shelf = self._shelves[lease.shelf]
        # until they are written, the values stay in the cache, where their size is counted
        with _LOADING, torch.inference_mode(False), torch.no_grad():
            shelf.write(lease.slot, self._stored(lease.name, self._members[lease.name]))
        if self.model.device.type == "cuda":
            # continuous batching computes on its own streams
            torch.cuda.current_stream(self.model.device).synchronize()

    def release(self, lease: Lease) -> None:
        """Release a slot; the adapter stays in it until another one needs the slot."""
        with self._changed:
            self._places[lease.shelf].users[lease.slot] -= 1
            self._changed.notify_all()

    # --- batches ---

    @contextmanager
    def use(self, adapter_names: Sequence[str | None]) -> Iterator[None]:
        """Assign an adapter to each row of the calls in a block, in this thread or task.

        Waits for slots if others use them all. All beams and returned sequences of a row use its
        adapter. The head is the model's active one.

        Args:
            adapter_names: an adapter for each row of the batch; None for the base model.

        Raises:
            CheckpointError: an adapter's files are damaged.
            ConfigError: there are more adapters than slots.
            StateError: an adapter is merged or being removed, or its files have changed.
            UnknownNameError: an adapter is unknown.
        """
        names = self._checked(adapter_names)
        wanted = [name for name in names if name is not None]
        with self._opened(names, self._acquire(wanted, self._queued_batch()) or []):
            yield

    @asynccontextmanager
    async def use_async(self, adapter_names: Sequence[str | None]) -> AsyncIterator[None]:
        """Like `use`, but do not block the event loop while waiting for slots.

        Args:
            adapter_names: as in `use`.

        Raises:
            AdapterZooError: as in `use`.
        """
        names, waiting = self._checked(adapter_names), self._queued_batch()
        wanted = [name for name in names if name is not None]
        found: Future[list[Lease] | None] = Future()
        # the task can be cancelled, but the thread cannot
        found.set_running_or_notify_cancel()

        def acquire() -> None:
            try:
                found.set_result(self._acquire(wanted, waiting))
            except BaseException as error:  # noqa: BLE001  raised in the task
                found.set_exception(error)

        # `asyncio.to_thread`'s threads could all wait here while the running batches need one
        threading.Thread(target=acquire, daemon=True).start()
        try:
            leases = await asyncio.wrap_future(found) or []
        except BaseException:
            with self._changed:
                waiting.given_up = True
                self._changed.notify_all()
            found.add_done_callback(self._release_all)
            raise
        with self._opened(names, leases):
            yield

    def _release_all(self, found: Future[list[Lease] | None]) -> None:
        """Release the slots of a batch whose task was cancelled."""
        if found.exception() is None:
            for lease in found.result() or ():
                self.release(lease)

    @contextmanager
    def _opened(self, names: Sequence[str | None], leases: Sequence[Lease]) -> Iterator[None]:
        """Open the block of `use`, and release its slots at the end."""
        block = _here(), frozenset(lease.name for lease in leases)
        with self._changed:
            self._blocks.append(block)
        try:
            with self.model._active.entered(self._planned(names, leases)):
                yield
        finally:
            with self._changed:
                self._blocks.remove(block)
                for lease in leases:
                    self.release(lease)

    def _checked(self, adapter_names: Sequence[str | None]) -> list[str | None]:
        """Return the names of rows, None for the base model.

        Raises:
            CompositionError: they are not a list of names.
        """
        if isinstance(adapter_names, str) or not isinstance(adapter_names, Sequence):
            raise CompositionError(
                f"use({adapter_names!r}): write a list with a name, or None, for each row."
            )
        self.check()
        names = [None if name == BASE else name for name in adapter_names]
        for name in names:
            if name is not None:
                self._member(name)
        if not names:
            raise CompositionError("use([]): the batch has no rows. Write use(['a', None]).")
        return names

    def _planned(self, names: Sequence[str | None], leases: Sequence[Lease]) -> Any:
        by_name = {lease.name: lease for lease in leases}
        rows = self.rows([by_name.get(name or "") for name in names], [1] * len(names))
        return replace(self.plan, rows=rows, heads=self.model._active.heads)

    def check(self) -> None:
        """Check that batches can use the pool now.

        Raises:
            StateError: it is closed, or the model has merged adapters or is in training mode.
        """
        self._refuse_closed()
        _slots.refuse_merged(self.model)
        if self.model.training:
            raise StateError(
                "the model is in training mode, and the adapters of a pool cannot be trained. "
                "Write model.eval()."
            )

    def rows(
        self, leases: Sequence[Lease | None], counts: Sequence[int], is_packed: bool = False
    ) -> SlotRows:
        """Return the rows of a batch.

        Args:
            leases: the slot of each run of consecutive rows; None for the base model.
            counts: the number of rows in each run.
            is_packed: see `SlotRows`.
        """
        size = len(self._shelves), len(leases)
        index = torch.full(size, -1, dtype=torch.int64, device="cpu")
        for row, lease in enumerate(leases):
            if lease is not None:
                index[lease.shelf, row] = lease.slot
        times = torch.tensor([*counts], dtype=torch.int64, device="cpu")
        host = index.repeat_interleave(times, 1)
        return SlotRows.placed(host, self.model.device, is_packed)

    # --- requests of continuous batching ---

    def claim(self, name: str) -> bytes:
        """Keep an adapter until `disclaim`, and return its fingerprint and dtype.

        Raises:
            AdapterZooError: it cannot be loaded, or is being removed.
        """
        with self._changed:
            member = self._member(name)
            self._refuse_more_than_slots([name])
            member.claims += 1
        try:
            if not member.was_loaded:
                self._stored(name, member)
        except BaseException:
            self.disclaim(name)
            raise
        return f"{member.fingerprint} {self._dtype}".encode()

    @names_call
    def prefetch(self, name: str) -> None:
        """Read an adapter now, unless it is in a slot or cached, so that no request waits for it.

        Raises:
            CheckpointError: the adapter's files are damaged.
            StateError: its files have changed, or it is being removed.
            UnknownNameError: no adapter has this name.
        """
        with self._changed:
            member = self._member(name)
            if name in self._places[member.shelf].names or member in self._cached:
                return
            member.claims += 1
        try:
            self._stored(name, member)
        finally:
            self.disclaim(name)

    def disclaim(self, name: str) -> None:
        """Undo `claim`."""
        with self._changed:
            self._members[name].claims -= 1
            self._changed.notify_all()

    def lease(self, name: str) -> Lease | None:
        """Return a slot with a claimed adapter, for `release`; None if none is free now."""
        found = self._acquire([name], QueuedBatch(is_claimed=True), blocks=False)
        return None if found is None else found[0]

    # --- metrics ---

    def metrics(self) -> dict[str, float]:
        """Return counts since the pool was made, and its current state.

        `hits` and `misses` count the batches' adapters that were in a slot or not, `loads` those
        read from files, `evicted` those that lost a slot, `evicted_from_cpu` those dropped from the
        cache; `waited_seconds` is the total time that batches waited.
        """
        with self._changed:
            device = sum(shelf.nbytes for shelf in self._shelves)
            users = [u for places in self._places for u in places.users]
            return {
                **{name: self._counts[name] for name in _COUNTED},
                "waited_seconds": self._waited,
                "waiting": sum(not each.given_up for each in self._queue),
                "adapters": len(self._members),
                "pinned": sum(member.pinned for member in self._members.values()),
                "slots": len(users),
                "slots_in_use": sum(u > 0 for u in users),
                "slot_bytes": device,
                "cpu_bytes": self._cached_bytes,
            }

    def prometheus(self) -> str:
        """Return `metrics` in the text format of Prometheus."""
        lines = []
        for name, value in self.metrics().items():
            is_count = name in (*_COUNTED, "waited_seconds")
            shown = f"adapterzoo_pool_{name}{'_total' if is_count else ''}"
            kind = "counter" if is_count else "gauge"
            lines += [f"# TYPE {shown} {kind}", f"{shown} {value:g}"]
        return "\n".join(lines) + "\n"

    def close(self) -> None:
        """Take the slots out of the model, once they are unused; the files stay.

        Batches that wait for slots fail.

        Raises:
            StateError: a block of `use` is open here.
        """
        with self._changed:
            if self._closed:
                return
            if self._blocks_here():
                raise StateError("use(…) is open here. Write close() after its block.")
            for name in self._members:
                self._unpin(name)
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not any(u for p in self._places for u in p.users))
            _slots.take(self.model, self._shelves)
            self._cached.clear()
            self._cached_bytes = 0

    def __enter__(self) -> AdapterPool:
        """Return the pool."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def __repr__(self) -> str:
        """Return the numbers of adapters and slots."""
        count = len(self._places[0].names)
        kinds = listing(kind[0][0] for kind in (s.kind for s in self._shelves))  # type: ignore[index]
        return f"AdapterPool({len(self)} adapters, {count} slots each for {kinds})"


def _here() -> object:
    """Return the calling thread and task."""
    return threading.get_ident(), current_task()


# for all pools, since torch's random numbers belong to the process
_LOADING = threading.RLock()
_COUNTED = "hits", "misses", "loads", "cpu_hits", "evicted", "evicted_from_cpu", "added"
