"""`AdapterSetup`: a context with other active adapters and heads, for one thread and task."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from adapterzoo.composition import Composition, fusions_of, parse, parse_heads
from adapterzoo.errors import ConfigError, StateError, UnknownNameError, naming, unknown_name
from adapterzoo.runtime import current_task

from .activation import check_layers, make_plan
from .heads.interface import HeadNames
from .state import AdaptedModel

# every model with adapters, so that a setup finds those that have its adapters
_models: weakref.WeakSet[Any] = weakref.WeakSet()
_models_lock = threading.Lock()


def announce(model: AdaptedModel) -> None:
    """Let setups find the model for as long as it lives."""
    with _models_lock:
        _models.add(model)


def withdraw(model: AdaptedModel) -> None:
    """Undo `announce`: the model no longer has adapters."""
    with _models_lock:
        _models.discard(model)


class AdapterSetup:
    """A context in which other adapters are active, in the calling thread and task only.

    ```python
    with AdapterSetup(Stack("language", "task"), head_setup="task"):
        output = model(**batch)
    ```

    It applies to every model that has all of its adapters. Asyncio tasks and `asyncio.to_thread`
    started inside inherit it, and so do the threads of DataParallel; other threads and tasks do
    not.
    """

    def __init__(
        self,
        adapter_setup: object,
        head_setup: HeadNames = None,
        ignore_empty: bool = False,
        skip_layers: Iterable[int] | None = None,
    ) -> None:
        """Keep the setup; it becomes active when the block is entered.

        Args:
            adapter_setup: a name, a list of names, a composition, or None for the base model.
            head_setup: head, heads or composition of heads to use; None: those named like the
                adapters if there are any, else the active ones.
            ignore_empty: whether a setup that fits no model is accepted.
            skip_layers: numbers of blocks in which no adapter acts (AdapterDrop); they replace
                those of `set_active_adapters`.

        Raises:
            CompositionError: the setup is not a composition, or `head_setup` is one that heads
                cannot have.
            ConfigError: `head_setup` is neither a name nor several.
        """
        with naming(lambda: "AdapterSetup(head_setup=…)"):
            heads = parse_heads(head_setup)
        kinds = (str, list, tuple, Composition, type(None))
        if not isinstance(head_setup, kinds) or not all(isinstance(n, str) for n in heads.names):
            raise ConfigError(
                f"AdapterSetup(head_setup={head_setup!r}): it is the name of a head, several "
                f"names, or None. Write head_setup='my_task'."
            )
        self.adapter_setup: Composition | None = parse(adapter_setup)
        self.head_setup = head_setup
        self._heads = heads.names
        self.ignore_empty = ignore_empty
        # validated where the number of blocks is known
        self.skip_layers = tuple(skip_layers) if isinstance(skip_layers, Iterable) else skip_layers
        # the contexts to exit, each with the thread and task that entered it
        self._entered: list[tuple[tuple[int, object], ExitStack]] = []

    def __enter__(self) -> Self:
        """Activate the setup.

        Raises:
            ConfigError: a model has no block of a number in `skip_layers`.
            UnknownNameError: no model has all of the named adapters and heads.
        """
        with naming(lambda: repr(self)):
            self._entered.append((_here(), self._entered_models()))
        return self

    def _entered_models(self) -> ExitStack:
        """Activate the setup in every model that has all of its names."""
        names = self.adapter_setup.flatten() if self.adapter_setup is not None else ()
        # layers of a fusion belong to one model, like the adapters that they fuse
        fusions = {fuse.name for fuse in fusions_of(self.adapter_setup)}
        heads = self._heads
        known: set[str] = set()
        found = False
        with _models_lock:
            models = list(_models)
        with ExitStack() as stack:
            for model in models:
                adapters, own_heads = model._adapter_state.records, {*model.known_heads()}
                known |= {*adapters, *own_heads}
                if not fusions <= {*model._adapter_state.fusions}:
                    continue
                if {*names} <= {*adapters} and {*heads} <= own_heads:
                    skipped = check_layers(self.skip_layers, len(model.anatomy.blocks))
                    plan = make_plan(model, self.adapter_setup, self.head_setup, skipped)
                    stack.enter_context(model._active.entered(plan))
                    found = True
            if not found and not self.ignore_empty:
                raise self._error([*names, *heads], known)
            return stack.pop_all()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore the previous setup.

        Raises:
            StateError: another thread or task entered the block.
        """
        here = _here()
        mine = [i for i, (where, _) in enumerate(self._entered) if where == here]
        if not mine:
            raise StateError(
                f"{self!r}: the block was entered in another thread or asyncio task than it is "
                f"left in. Write 'with AdapterSetup(…)' in the function that calls the model."
            )
        _, stack = self._entered.pop(mine[-1])
        stack.close()

    def __repr__(self) -> str:
        """Show the call, without the arguments that were left out."""
        call = repr(self.adapter_setup)
        if self.head_setup is not None:
            call += f", head_setup={self.head_setup!r}"
        if self.skip_layers is not None:
            skipped = self.skip_layers
            call += f", skip_layers={list(skipped) if isinstance(skipped, tuple) else skipped!r}"
        return f"AdapterSetup({call})"

    def _error(self, names: list[str], known: set[str]) -> UnknownNameError | StateError:
        for name in names:
            if name not in known:
                return unknown_name("", "adapter or head", name, known)
        return StateError(
            "no single model has all of these. Call add_adapter or load_adapter first (and "
            "add_adapter_fusion where there is a Fuse), or write "
            "AdapterSetup(…, ignore_empty=True)."
        )


def _here() -> tuple[int, object]:
    return threading.get_ident(), current_task()
