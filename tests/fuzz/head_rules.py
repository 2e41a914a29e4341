"""Add, delete, choose, average, save and load heads."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from world import NAMES, World, head_values, same

from adapterzoo import AdapterSetup, Split

_TEXT = ("classification", "multilabel", "regression", "tagging", "qa")
KINDS = {
    "bert": (*_TEXT, "masked_lm", "mean"),
    "gpt2": (*_TEXT, "causal_lm"),
    "llama": (*_TEXT, "causal_lm"),
    "t5": ("seq2seq_lm", "tagging"),
    "vit": ("image", "mean"),
}
LANGUAGE = ("masked_lm", "causal_lm", "seq2seq_lm")


def add(model: Any, kind: str, name: str, **options: Any) -> None:
    """Add a head of a kind, with options of its own."""
    calls: dict[str, Any] = {
        "classification": lambda: model.add_classification_head(
            name, num_labels=3, id2label={0: "x", 1: "y", 2: "z"}, **options
        ),
        "multilabel": lambda: model.add_classification_head(
            name, num_labels=4, multilabel=True, layers=1, **options
        ),
        "regression": lambda: model.add_classification_head(name, num_labels=1, **options),
        "mean": lambda: model.add_classification_head(
            name, num_labels=2, layers=1, pooling="mean" if not _sees(model) else "cls", **options
        ),
        "tagging": lambda: model.add_tagging_head(name, num_labels=3, **options),
        "qa": lambda: model.add_qa_head(name, **options),
        "image": lambda: model.add_image_classification_head(name, num_labels=3, **options),
        "masked_lm": lambda: model.add_masked_lm_head(name, **options),
        "causal_lm": lambda: model.add_causal_lm_head(name, layers=1, **options),
        "seq2seq_lm": lambda: model.add_seq2seq_lm_head(name, **options),
    }
    calls[kind]()


def _sees(model: Any) -> bool:
    return model.main_input_name == "pixel_values"


class HeadRules(World):
    """Rules about heads by name."""

    @precondition(lambda self: self.started)
    @rule(data=st.data(), name=st.sampled_from(NAMES), overwrite=st.booleans())
    def add_head(self, data: Any, name: str, overwrite: bool) -> None:
        book, model = self.ledger, self.model
        kind = data.draw(st.sampled_from(KINDS[self.family]), label="kind")

        def call() -> None:
            add(model, kind, name, overwrite_ok=overwrite)

        if name in book.heads and not overwrite:
            self.refused("add_head of a name that is taken", call)
            return
        self.must(f"add_head {kind}", call)
        self.head_entered(name)
        if name not in book.adapters and kind == "classification":
            assert model.get_labels(name) == ["x", "y", "z"], "labels"
            assert model.config.id2label == {0: "x", 1: "y", 2: "z"}, "config.id2label"

    def head_entered(self, name: str, active: bool = True) -> None:
        book, model = self.ledger, self.model
        book.heads[name] = model.get_head(name).config.to_dict()
        book.head_values[name] = head_values(model, name)
        if active:
            book.answering = (name,)

    @precondition(lambda self: self.started and self.ledger.heads)
    @rule(data=st.data())
    def delete_head(self, data: Any) -> None:
        name = data.draw(st.sampled_from(list(self.ledger.heads)))
        self.must("delete_head", lambda: self.model.delete_head(name))
        self.ledger.forget_head(name)

    @precondition(lambda self: self.started and self.ledger.heads)
    @rule(data=st.data())
    def choose_head(self, data: Any) -> None:
        heads = list(self.ledger.heads)
        some = data.draw(st.lists(st.sampled_from(heads), max_size=2, unique=True))
        chosen = some[0] if len(some) == 1 else some or None

        def call() -> None:
            self.model.active_head = chosen

        self.must("active_head =", call)
        self.ledger.answering = tuple(some)

    @precondition(lambda self: self.started and self.ledger.heads)
    @rule(data=st.data())
    def choose_a_composition(self, data: Any) -> None:
        """Compositions of heads divide a batch; what combines outputs is for adapters alone."""
        name = data.draw(st.sampled_from(list(self.ledger.heads)))
        setup = Split(name, name, splits=[1, 2])
        self.refused("active_head = Split", lambda: setattr(self.model, "active_head", setup))

    @precondition(lambda self: self.started and self.ledger.heads)
    @rule(data=st.data())
    def head_for_a_call(self, data: Any) -> None:
        """`head=` of a call, and of a context, chooses for that call alone."""
        name = data.draw(st.sampled_from(list(self.ledger.heads)))
        before = self.run()
        called = self.run(**self.cast_inputs(), head=name)
        with AdapterSetup(self.ledger.active, head_setup=name):
            if "BatchSplit" not in repr(self.ledger.active):
                inside = self.run()
                if self.ledger.skipped == () and "Parallel" not in repr(self.ledger.active):
                    same(inside, called, "head= and head_setup=")
        same(self.run(), before, "after head=")
        self.count("head=")

    @precondition(lambda self: self.started and self.ledger.heads)
    @rule(
        data=st.data(), into=st.sampled_from(NAMES), form=st.sampled_from(("native", "adapterhub"))
    )
    def save_and_load_head(self, data: Any, into: str, form: str) -> None:
        book, model = self.ledger, self.model
        name = data.draw(st.sampled_from(list(book.heads)))
        folder = self.new_folder()
        if not self.attempt(f"save_head {form}", lambda: model.save_head(folder, name, form)):
            return
        values, config = book.head_values[name], book.heads[name]
        if into in book.heads:
            self.refused(
                "load_head over another", lambda: model.load_head(folder, into, overwrite_ok=False)
            )
            return
        self.must(f"load_head {form}", lambda: model.load_head(folder, into))
        self.head_entered(into)
        if form == "native":
            assert book.heads[into] == config, "config of a loaded head"
        assert book.head_values[into] == values, "values of a loaded head"

    @precondition(lambda self: self.started and self.ledger.heads)
    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def average_head(self, data: Any, name: str) -> None:
        book, model = self.ledger, self.model
        heads = st.sampled_from(list(book.heads))
        some = data.draw(st.lists(heads, min_size=1, max_size=2, unique=True))
        if self.attempt("average_head", lambda: model.average_head(name, some)):
            self.head_entered(name, active=False)

    @precondition(lambda self: self.started and self.ledger.answering)
    @rule()
    def loss(self) -> None:
        """Labels give a finite loss, and the answers stay what they were."""
        before = self.run()
        if len(self.ledger.answering) > 1 or "Parallel" in repr(self.ledger.active):
            return
        if "BatchSplit" in repr(self.ledger.active):
            return
        labels = self.labels(self.ledger.answering[0])
        with torch.no_grad():
            loss = self.model(**self.cast_inputs(), **labels).loss
        assert loss.dim() == 0, "loss"
        assert bool(loss.isfinite()), "loss is not finite"
        same(self.run(), before, "after a loss")
        self.count("loss")

    def labels(self, head: str) -> dict[str, torch.Tensor]:
        """Labels that the head takes."""
        kind = self.ledger.heads[head]["head_type"]
        rows, tokens = next(iter(self.inputs.values())).shape[:2]
        count = self.ledger.heads[head].get("num_labels", 2)
        if kind == "question_answering":
            positions = torch.arange(rows) % tokens
            return {"start_positions": positions, "end_positions": positions}
        if kind == "multilabel_classification" or self.ledger.heads[head].get("multilabel"):
            return {"labels": torch.ones(rows, count, dtype=self.ledger.dtype)}
        if kind in LANGUAGE or kind == "tagging":
            length = 5 if self.family == "t5" else tokens
            top = 90 if kind in LANGUAGE else count
            return {"labels": torch.arange(rows * length).reshape(rows, length) % top}
        if count == 1:
            return {"labels": torch.ones(rows, dtype=self.ledger.dtype)}
        return {"labels": torch.arange(rows) % count}
