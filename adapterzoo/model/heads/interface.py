"""The interface to a model's heads, and what passes through it.

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

from adapterzoo.composition import ActiveHeads, Composition, SiteStep
from adapterzoo.configs import AdapterConfig
from adapterzoo.errors import ConfigError, in_python
from adapterzoo.heads import PredictionHead, token_places

HeadNames: TypeAlias = "str | list[str] | Composition | None"


@dataclass(frozen=True, slots=True)
class HeadRecord:
    """A head as a checkpoint holds it: a document of JSON types, and tensors."""

    document: dict[str, Any]
    tensors: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """Arguments of `load_adapter`, `load_head` and `load_adapter_fusion`; see there."""

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
    loaders: Sequence[Any] = ()

    def __post_init__(self) -> None:
        """Check the dtype.

        Raises:
            ConfigError: it is not one.
        """
        if self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            raise ConfigError(
                f"dtype={self.dtype!r} is not a dtype{in_python('. Write dtype=torch.float32')}."
            )


class HeadStrategy:
    """How a model handles its heads; the defaults are those of a model without named heads."""

    is_named = False

    def __init__(self, model: Any) -> None:
        """Keep the model.

        Args:
            model: with adapters.
        """
        self.model = model

    # --- find and activate ---

    def names(self) -> tuple[str, ...]:
        """Return the names of the named heads."""
        return ()

    def saved_names(self) -> tuple[str, ...]:
        """Return the names under which heads can be saved."""
        return self.names()

    def for_setup(
        self, setup: Composition | None, wanted: HeadNames, active: ActiveHeads
    ) -> ActiveHeads:
        """Return the heads of a plan.

        Args:
            setup: the composition of adapters.
            wanted: heads that the user asks for; None: those with the names of the last adapters
                if there are any, else the active ones.
            active: the active heads.
        """
        return ActiveHeads()

    def for_rows(
        self, parts: tuple[Any, ...], one_head: bool
    ) -> tuple[ActiveHeads, tuple[str, ...]]:
        """Return the heads of a mixed batch, and their names if each has its own part, else ().

        Args:
            parts: the adapter or composition of each kind of row.
            one_head: whether the caller chooses one head for all rows.
        """
        return ActiveHeads(), ()

    def steps(self, parts: Sequence[Any]) -> Mapping[str, SiteStep]:
        """Return the step of each layer of the head.

        Args:
            parts: of a composition, one for each kind of row.
        """
        return {}

    def token_places(self) -> tuple[str, ...]:
        """Return the arguments of `forward` that are numbers of tokens in the sequence."""
        return token_places()

    def activated(self) -> None:
        """Update the model's config after the active heads have changed."""

    def active_heads(self, names: HeadNames = None) -> dict[str, PredictionHead]:
        """Return the named heads of these names; None: the active ones."""
        return {}

    def check_generation(self, given: Mapping[str, Any]) -> None:
        """Check that a head is active that can score the next token."""

    # --- adapters and fusions that are added, moved or removed ---

    def modules_with(self, name: str) -> Iterable[nn.Module]:
        """Return the modules that move with an adapter."""
        return ()

    def installed(self, name: str) -> None:
        """Update the heads after an adapter was added."""

    def without_head(self, config: AdapterConfig) -> tuple[AdapterConfig, bool]:
        """Return a new adapter's config without names of layers of the head.

        Returns:
            The config; and whether the adapter shall have the output layer for itself.
        """
        return config, False

    def output_tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors of a static head's output layer by their keys in the task class."""
        return {}

    def save_output(self, name: str) -> None:
        """Give an adapter the output layer for itself."""

    def removing(self, owner: str) -> None:
        """Update the heads before an adapter or a fusion is removed."""

    def ties(self) -> dict[str, str]:
        """Map keys of the heads' shared parameters to the keys of those that they share."""
        return {}

    # --- train, merge, average ---

    def check_training(self, setup: Composition) -> None:
        """Check that `train` will succeed; nothing changes."""

    @abstractmethod
    def train(self, train_embeddings: bool) -> None:
        """Train only the active heads."""

    @abstractmethod
    def missing_loss(self) -> str | None:
        """Return a hint if a forward with labels gives no loss; None if it does."""

    @abstractmethod
    def counted_labels(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Return the labels whose count divides a batch's loss, −100 for those that do not count.

        None if there is no single count: several heads that differ in it, or spans and trees.

        Args:
            batch: arguments of `forward`.
        """

    def check_merging(self, names: Sequence[str]) -> None:
        """Check that `merge` will succeed once these adapters are merged."""

    def merge(self) -> None:
        """Merge the heads of merged adapters."""

    def reset(self) -> None:
        """Undo `merge`."""

    def combined(self, names: Sequence[str], weights: Sequence[float]) -> Mapping[str, nn.Module]:
        """Return the head of an average of adapters, for `give`; empty without one."""
        return {}

    def give(self, name: str, head: Mapping[str, nn.Module]) -> None:
        """Give an adapter the head that `combined` made."""

    @abstractmethod
    def plain_class(self) -> type[nn.Module] | None:
        """Return the class of the model without adapters; None if it always has them."""

    @abstractmethod
    def unloaded(self, change: Callable[[Any], None], architecture: str | None) -> Any:
        """Return a plain model of transformers.

        Args:
            change: merges or resets the weights of the model that it is given.
            architecture: name of the class; None: one that has the active head.
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
        """Return a head as a checkpoint holds it; None if there is none.

        Args:
            name: of the head; None: the original static head.
            alone: whether it is saved without the adapter of its name.
            short: whether to leave out what a native file need not hold.
        """

    def completed(
        self, name: str, document: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Return the tensors of a file, with those that a short record left out."""
        return tensors

    @abstractmethod
    def fitting(
        self, record: HeadRecord, name: str | None, asked: LoadOptions
    ) -> Callable[[], None]:
        """Check a head of a checkpoint completely; return a function that puts it into the model.

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
