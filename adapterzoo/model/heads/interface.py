"""What the rest of the model asks of its heads: one interface, two strategies.

A model of `AutoAdapterModel` has named heads (`named`); one of `init` keeps the static head of its
class, of which each adapter may have a copy (`static`). A strategy has no state of its own: it
works on the model that it is made for.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from adapterzoo.composition import Composition, Step
from adapterzoo.heads import PredictionHead, token_places

HeadNames: TypeAlias = "str | list[str] | None"


@dataclass(frozen=True, slots=True)
class HeadRecord:
    """A head as a checkpoint holds it: a document of JSON types, and tensors."""

    document: dict[str, Any]
    tensors: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """What a user asks of `load_adapter`, `load_head` and `load_adapter_fusion`; see there."""

    load_as: str | None = None
    with_head: bool = True
    leave_out: Iterable[int] | None = None
    id2label: Mapping[int, str] | None = None
    set_active: bool = False
    overwrite_ok: bool | None = False
    dtype: torch.dtype | None = None
    config: Any = None
    model_name: str | None = None
    loading_info: dict[str, Any] | None = None


class HeadStrategy:
    """What a model does with its heads; the defaults are those of a model without named heads."""

    is_named = False

    def __init__(self, model: Any) -> None:
        """Work on a model.

        Args:
            model: with adapters.
        """
        self.model = model

    # --- which there are, and which answer ---

    def names(self) -> tuple[str, ...]:
        """Return the names of the named heads."""
        return ()

    def saved_names(self) -> tuple[str, ...]:
        """Return the names under which heads can be saved."""
        return self.names()

    def for_setup(
        self, setup: Composition | None, wanted: HeadNames, active: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Return the heads of a plan.

        Args:
            setup: what acts.
            wanted: which heads the user wants; None: those named like the adapters that act last
                where there are any, else the active ones.
            active: the active ones.
        """
        return ()

    def for_rows(
        self, parts: tuple[Any, ...], one_head: bool
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the heads of a mixed batch, and again those that answer a part each.

        Args:
            parts: what each kind of row takes.
            one_head: whether the caller chooses one head for all rows.
        """
        return (), ()

    def steps(self, parts: Sequence[Any]) -> Mapping[str, Step]:
        """Return what each layer of the head does.

        Args:
            parts: of a composition, one for each kind of row.
        """
        return {}

    def token_places(self) -> tuple[str, ...]:
        """Return the arguments of `forward` that are numbers of tokens in the sequence."""
        return token_places()

    def activated(self) -> None:
        """Follow a change of the active heads."""

    def answering(self, names: HeadNames = None) -> dict[str, PredictionHead]:
        """Return the named heads that answer; None for the active ones."""
        return {}

    def check_generation(self, given: Mapping[str, Any]) -> None:
        """Check that `generate` has something that scores the next token."""

    # --- what an adapter or a fusion brings ---

    def modules_with(self, name: str) -> Iterable[nn.Module]:
        """Return what moves with an adapter."""
        return ()

    def installed(self, name: str) -> None:
        """Follow an adapter that has come."""

    def removing(self, owner: str) -> None:
        """Prepare for an adapter or a fusion that goes."""

    def ties(self) -> dict[str, str]:
        """Return the keys of the heads' parameters that are others', to the keys of those."""
        return {}

    # --- train, merge, average ---

    def check_training(self, setup: Composition) -> None:
        """Check that `train` will succeed; nothing changes."""

    @abstractmethod
    def train(self, train_embeddings: bool) -> None:
        """Train only the active heads."""

    @abstractmethod
    def missing_loss(self) -> str | None:
        """Return what to say where a forward with labels gives no loss; None where it does."""

    @abstractmethod
    def counted_labels(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Return the labels by whose number a batch's loss is divided, −100 for the others.

        None where that is not one number: several heads that differ in it, or spans and trees.

        Args:
            batch: arguments of `forward`.
        """

    def merge(self) -> None:
        """Follow adapters that were merged."""

    def reset(self) -> None:
        """Undo `merge`."""

    def combined(self, names: Sequence[str], weights: Sequence[float]) -> Mapping[str, nn.Module]:
        """Return the head of an average of adapters, for `give`; empty without one."""
        return {}

    def give(self, name: str, head: Mapping[str, nn.Module]) -> None:
        """Give an adapter the head that `combined` made."""

    @abstractmethod
    def plain_class(self) -> type[nn.Module] | None:
        """Return the class of the model without adapters; None where it always has them."""

    @abstractmethod
    def unloaded(self, change: Callable[[Any], None], architecture: str | None) -> Any:
        """Return a plain model of transformers.

        Args:
            change: merges or resets the weights of the model that it is given.
            architecture: name of the class; None: found.
        """

    # --- files ---

    @abstractmethod
    def name_with(self, adapter: str) -> str | None:
        """Return the name of the head that is saved with an adapter."""

    @abstractmethod
    def active_name(self) -> str | None:
        """Return the name of the only active head."""

    @abstractmethod
    def record(
        self, name: str | None, alone: bool = False, short: bool = False
    ) -> HeadRecord | None:
        """Return a head as a checkpoint holds it, None without one.

        Args:
            name: of the head; None: the original static head.
            alone: whether it is saved without the adapter of its name.
            short: whether to leave out what a native file need not hold.
        """

    def lengthened(
        self, name: str, document: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Return the tensors of a file with what a short record left out, of the same head."""
        return tensors

    @abstractmethod
    def fitting(
        self, record: HeadRecord, name: str | None, asked: LoadOptions
    ) -> Callable[[], None]:
        """Check a head of a checkpoint in every way; what is returned enters it.

        Args:
            record: of the checkpoint.
            name: of the head; of a static head its owner, None for the original.
            asked: what the user asks for.
        """

    def restore(self, owners: Iterable[str]) -> None:
        """Make the copies of a static head that a saved model lists."""

    @abstractmethod
    def all_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of all heads, named for messages."""
