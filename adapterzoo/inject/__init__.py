"""Injection: the only room that changes a model. `put` and `take` undo each other.

`put` gives a layer *object* a subclass of its own class and adds the adapters as submodules; `take`
removes them and restores the class. There is no wrapper, so state-dict keys and `isinstance` stay
the same; no hook and no closure, so copies, pickles and replicas are independent. PyTorch's own
`fully_shard` changes classes in the same way.
"""

from __future__ import annotations

from .adapted import (
    Adapted,
    AdapterDict,
    adapters_of,
    base_of,
    below_wrappers,
    container_of,
    discard,
    plain_class,
    positions_of,
    set_class,
    shared_of,
)
from .layers import (
    ExpertAdapters,
    FusedAdapters,
    changed,
    is_additive,
    matrix,
    mergeable,
    put_slice,
    stores_transposed,
    take_slice,
)
from .put import (
    capture_input,
    changes,
    check_put,
    close_entry,
    combine,
    init_from_layer,
    leave,
    place_at,
    put,
    put_shared,
    record_calls,
    release_input,
    take,
    take_shared,
)
from .tokens import recorded

__all__ = [
    "Adapted",
    "AdapterDict",
    "ExpertAdapters",
    "FusedAdapters",
    "adapters_of",
    "base_of",
    "below_wrappers",
    "capture_input",
    "changed",
    "changes",
    "check_put",
    "close_entry",
    "combine",
    "container_of",
    "discard",
    "init_from_layer",
    "is_additive",
    "leave",
    "matrix",
    "mergeable",
    "place_at",
    "plain_class",
    "positions_of",
    "put",
    "put_shared",
    "put_slice",
    "record_calls",
    "recorded",
    "release_input",
    "set_class",
    "shared_of",
    "stores_transposed",
    "take",
    "take_shared",
    "take_slice",
]
