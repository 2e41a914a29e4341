"""Calls that are not legal: each raises an error of the library, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from world import ROWS, World, run

from adapterzoo import AdapterSetup, Average, BatchSplit, Fuse, Parallel, Split, Stack

_NOBODY = "nobody"
_ILLEGAL = ("", "a.b", "a/b", "keys", " a", "a:b", None, 3)

# what is wrong whatever the model holds
ALWAYS: dict[str, Callable[[Any, Any], Any]] = {
    "add_adapter, name": lambda m, w: m.add_adapter(w.illegal, "lora"),
    "add_adapter, method": lambda m, w: m.add_adapter("new", "no_such_method"),
    "add_adapter, field": lambda m, w: m.add_adapter("new", "lora[no_such_field=1]"),
    "add_adapter, rank": lambda m, w: m.add_adapter("new", "lora[r=0]"),
    "add_adapter, dropout": lambda m, w: m.add_adapter("new", "lora[dropout=1.5]"),
    "add_adapter, block size": lambda m, w: m.add_adapter("new", "boft[boft_block_size=5]"),
    "add_adapter, no site": lambda m, w: m.add_adapter(
        "new", {"architecture": "lora", "target_modules": ["no_such_layer"]}
    ),
    "add_adapter, config": lambda m, w: m.add_adapter("new", 3),
    "delete_adapter": lambda m, w: m.delete_adapter(_NOBODY),
    "set_active_adapters": lambda m, w: m.set_active_adapters(_NOBODY),
    "set_active_adapters, type": lambda m, w: m.set_active_adapters(3),
    "set_active_adapters, Stack": lambda m, w: m.set_active_adapters(Stack(_NOBODY)),
    "active_adapters =": lambda m, w: setattr(m, "active_adapters", [_NOBODY]),
    "skip_layers": lambda m, w: m.set_active_adapters(None, skip_layers=[99]),
    "skip_layers, type": lambda m, w: m.set_active_adapters(None, skip_layers=["0"]),
    "train_adapter": lambda m, w: m.train_adapter(_NOBODY),
    "train_adapter, none": lambda m, w: m.train_adapter(None),
    "train_adapter_fusion": lambda m, w: m.train_adapter_fusion(Fuse(_NOBODY, "other")),
    "train_adapter_fusion, no fusion": lambda m, w: m.train_adapter_fusion([_NOBODY]),
    "merge_adapter": lambda m, w: m.merge_adapter(_NOBODY),
    "merge_and_unload": lambda m, w: m.merge_and_unload([_NOBODY]),
    "average_adapter": lambda m, w: m.average_adapter("new", [_NOBODY]),
    "average_adapter, none": lambda m, w: m.average_adapter("new", []),
    "add_weighted_adapter": lambda m, w: m.add_weighted_adapter([_NOBODY], [1.0], "new"),
    "add_adapter_fusion": lambda m, w: m.add_adapter_fusion([_NOBODY, "other"]),
    "delete_adapter_fusion": lambda m, w: m.delete_adapter_fusion("x,y"),
    "save_adapter": lambda m, w: m.save_adapter(w.new_folder(), _NOBODY),
    "save_adapter_fusion": lambda m, w: m.save_adapter_fusion(w.new_folder(), "x,y"),
    "load_adapter": lambda m, w: m.load_adapter(str(w.new_folder()) + "/none/here/x"),
    "load_all_adapters": lambda m, w: m.load_all_adapters(w.new_folder()),
    "load_head": lambda m, w: m.load_head(w.new_folder()),
    "load_adapter_fusion": lambda m, w: m.load_adapter_fusion(w.new_folder()),
    "save_head": lambda m, w: m.save_head(w.new_folder(), _NOBODY),
    "delete_head": lambda m, w: m.delete_head(_NOBODY),
    "get_head": lambda m, w: m.get_head(_NOBODY),
    "get_labels": lambda m, w: m.get_labels(_NOBODY),
    "adapter_to": lambda m, w: m.adapter_to(_NOBODY, dtype=torch.float64),
    "adapter_fingerprint": lambda m, w: m.adapter_fingerprint(_NOBODY),
    "active_head =": lambda m, w: setattr(m, "active_head", _NOBODY),
    "active_head = list": lambda m, w: setattr(m, "active_head", [_NOBODY]),
    "add head, name": lambda m, w: m.add_tagging_head(w.illegal),
    "add head, labels": lambda m, w: m.add_tagging_head("new", num_labels=0),
    "add head, id2label": lambda m, w: m.add_tagging_head("new", num_labels=2, id2label={7: "x"}),
    "add head, activation": lambda m, w: m.add_tagging_head("new", 2, 2, "no_such_function"),
    "add head, pooling": lambda m, w: m.add_classification_head("new", pooling="no_such"),
    "add head, type": lambda m, w: m.add_custom_head("no_such_type", "new"),
    "add head, config": lambda m, w: m.add_prediction_head_from_config("new", {"num_labels": 2}),
    "add head, field": lambda m, w: m.add_prediction_head_from_config(
        "new", {"head_type": "tagging", "no_such_field": 1}
    ),
    "average_head": lambda m, w: m.average_head("new", [_NOBODY]),
    "register_custom_head": lambda m, w: m.register_custom_head("x", object),
    "forward, head": lambda m, w: run(m, **w.cast_inputs(), head=_NOBODY),
    "forward, adapter_names": lambda m, w: run(
        m, **w.cast_inputs(), adapter_names=[_NOBODY] * ROWS
    ),
    "forward, rows": lambda m, w: run(m, **w.cast_inputs(), adapter_names=[None] * (ROWS + 1)),
    "forward, no rows": lambda m, w: run(m, **w.cast_inputs(), adapter_names=[]),
    "forward, names a string": lambda m, w: run(m, **w.cast_inputs(), adapter_names="abc"),
    "AdapterSetup": lambda m, w: AdapterSetup(_NOBODY).__enter__(),
    "AdapterSetup, head": lambda m, w: AdapterSetup(None, head_setup=_NOBODY).__enter__(),
    "AdapterSetup, type": lambda m, w: AdapterSetup(3),
    "AdapterSetup, head type": lambda m, w: AdapterSetup(None, head_setup=3).__enter__(),
    "Stack, empty": lambda m, w: m.set_active_adapters(Stack()),
    "Stack, twice": lambda m, w: m.set_active_adapters(["a", "a"]),
    "Split, sizes": lambda m, w: m.set_active_adapters(Split("a", "b", splits=[0, 1])),
    "BatchSplit, sizes": lambda m, w: BatchSplit("a", "b", batch_sizes=[1]),
    "Average, weights": lambda m, w: Average("a", "b", weights=[1.0, -1.0]),
    "Parallel, nesting": lambda m, w: Parallel("a", Parallel("b", "c")),
}
# what is wrong with an adapter that is there
WITH_ADAPTER: dict[str, Callable[[Any, Any, str], Any]] = {
    "add_adapter, taken": lambda m, w, n: m.add_adapter(n, "lora"),
    "average_adapter, taken": lambda m, w, n: m.average_adapter(n, [n]),
    "average_adapter, weights": lambda m, w, n: m.average_adapter("new", [n], [1.0, 2.0]),
    "average_adapter, NaN": lambda m, w, n: m.average_adapter("new", [n], [float("nan")]),
    "average_adapter, strategy": lambda m, w, n: m.average_adapter("new", [n], None, "no_such"),
    "average_adapter, density": lambda m, w, n: m.average_adapter(
        "new", [n], None, "ties", density=2.0
    ),
    "average_adapter, name": lambda m, w, n: m.average_adapter(w.illegal, [n]),
    "save_adapter, format": lambda m, w, n: m.save_adapter(w.new_folder(), n, format="no_such"),
    "save_adapter, a file": lambda m, w, n: m.save_adapter(w.a_file(), n),
    "load_adapter, name": lambda m, w, n: m.load_adapter(w.saved_adapter(n), load_as=w.illegal),
    "load_adapter, taken": lambda m, w, n: m.load_adapter(w.saved_adapter(n), overwrite_ok=False),
    "load_adapter, leave_out": lambda m, w, n: m.load_adapter(
        w.saved_adapter(n), load_as="new", leave_out=[99]
    ),
    "load_adapter, damaged": lambda m, w, n: m.load_adapter(w.damaged_adapter(n), load_as="new"),
    "load_adapter, labels": lambda m, w, n: m.load_adapter(
        w.saved_adapter(n), load_as="new", with_head=False, id2label={0: "x"}
    ),
    "train_adapter, half unknown": lambda m, w, n: m.train_adapter([n, _NOBODY]),
    "set_active, half unknown": lambda m, w, n: m.set_active_adapters([n, _NOBODY]),
    "AdapterSetup, half unknown": lambda m, w, n: AdapterSetup([n, _NOBODY]).__enter__(),
    "fusion without layers": lambda m, w, n: m.set_active_adapters(Fuse(n, name="none")),
    "forward, half unknown": lambda m, w, n: run(
        m, **w.cast_inputs(), adapter_names=[n, None, _NOBODY]
    ),
    "delete in a context": lambda m, w, n: w.inside(n, lambda: m.delete_adapter(n)),
    "merge in a context": lambda m, w, n: w.inside(n, lambda: m.merge_adapter(n)),
    "overwrite in a context": lambda m, w, n: w.inside(
        n, lambda: m.add_adapter(n, "lora", overwrite_ok=True)
    ),
    "names in a context": lambda m, w, n: w.inside(
        n, lambda: run(m, **w.cast_inputs(), adapter_names=[n] * ROWS)
    ),
    "merge of NaN": lambda m, w, n: w.spoilt(n, lambda: m.merge_adapter(n)),
}


class BadCalls(World):
    """Rules that ask for what is not legal."""

    illegal: Any = ""

    @precondition(lambda self: self.started)
    @rule(what=st.sampled_from(sorted(ALWAYS)), illegal=st.sampled_from(_ILLEGAL))
    def bad_call(self, what: str, illegal: Any) -> None:
        self.illegal = illegal
        self.refused(what, lambda: ALWAYS[what](self.model, self))

    @precondition(lambda self: self.started and self.ledger.adapters)
    @rule(
        data=st.data(), what=st.sampled_from(sorted(WITH_ADAPTER)),
        illegal=st.sampled_from(_ILLEGAL[:-2]),
    )  # fmt: skip
    def bad_call_of_an_adapter(self, data: Any, what: str, illegal: Any) -> None:
        self.illegal = illegal
        name = data.draw(st.sampled_from(list(self.ledger.adapters)))
        self.refused(what, lambda: WITH_ADAPTER[what](self.model, self, name))

    # --- what bad calls need ---

    def a_file(self) -> Any:
        path = self.new_folder()
        path.write_text("in the way")
        return path

    def saved_adapter(self, name: str) -> Any:
        folder = self.new_folder()
        self.model.save_adapter(folder, name, with_head=False)
        return folder

    def damaged_adapter(self, name: str) -> Any:
        folder = self.saved_adapter(name)
        file = folder / "adapter.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(bytes(content))
        return folder

    def inside(self, name: str, call: Callable[[], Any]) -> None:
        with AdapterSetup(name):
            call()

    def spoilt(self, name: str, call: Callable[[], Any]) -> None:
        """A call while one value of the adapter is NaN."""
        _path, module = next(iter(self.model.adapter_modules(name)))
        first = next(p for p in module.parameters() if p.numel())
        kept = first.detach().clone()
        with torch.no_grad():
            first.fill_(float("nan"))
        try:
            call()
        finally:
            with torch.no_grad():
                first.copy_(kept)
