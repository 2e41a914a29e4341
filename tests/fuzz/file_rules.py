"""Save and load adapters under other names, in every format, here and in a fresh model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from world import NAMES, World, adapter_values, fusion_values, head_values, near, run, same

from adapterzoo import AdapterSetup, AdapterZooError

FORMATS = ("native", "native", "adapterhub", "peft")


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


class FileRules(World):
    """Rules about checkpoints."""

    @precondition(lambda self: self.started and self.ledger.adapters)
    @rule(
        data=st.data(), into=st.sampled_from((*NAMES, "loaded")), form=st.sampled_from(FORMATS),
        with_head=st.booleans(), keep=st.booleans(),
    )  # fmt: skip
    def save_and_load(self, data: Any, into: str, form: str, with_head: bool, keep: bool) -> None:
        book, model = self.ledger, self.model
        name = data.draw(st.sampled_from(list(book.adapters)))
        folder = self.new_folder()
        if not self.attempt(
            f"save_adapter {form}", lambda: model.save_adapter(folder, name, with_head, format=form)
        ):
            found = contents(folder) if folder.exists() else {}
            assert not found, f"a refused save left {sorted(found)}"
            return
        self._same_file_again(folder, name, with_head, form)
        head = into if with_head and self._head_in(name) else None
        if into in book.adapters or (head and into in book.heads):
            self.refused(
                f"load_adapter {form} over another",
                lambda: model.load_adapter(
                    folder, load_as=into, with_head=with_head, overwrite_ok=False
                ),
            )
            return
        if not self.attempt(
            f"load_adapter {form}",
            lambda: model.load_adapter(folder, load_as=into, with_head=with_head, dtype=None),
        ):
            assert form != "native" or book.merged, "what was saved cannot be loaded"
            return
        book.adapters[into] = model.adapters_config[into]
        book.values[into] = adapter_values(model, into)
        if into in model.known_heads() and into not in book.heads:
            book.heads[into] = model.get_head(into).config.to_dict()
            book.head_values[into] = head_values(model, into)
            if form == "native" and head:
                source = self._head_in(name)
                assert book.head_values[into] == book.head_values[str(source)], "head values"
                assert book.heads[into] == book.heads[str(source)], "head config"
        else:
            assert not head or form != "native", "the head of a checkpoint was not loaded"
        if form == "native":
            assert book.adapters[into] == book.adapters[name], "config of a loaded adapter"
            assert book.values[into] == book.values[name], "values of a loaded adapter"
        if not book.merged:
            compare = same if form == "native" else near
            compare(self.alone(into), self.alone(name), f"{form}: {book.adapters[name]!r}")
        if not keep:
            self._drop(into)

    def _head_in(self, name: str) -> str | None:
        """The head that goes with an adapter into its file."""
        if name in self.ledger.heads:
            return name
        return self.ledger.answering[0] if len(self.ledger.answering) == 1 else None

    def _same_file_again(self, folder: Path, name: str, with_head: bool, form: str) -> None:
        again = self.new_folder()
        self.model.save_adapter(again, name, with_head, format=form)
        first, second = contents(folder), contents(again)
        pickled = (".bin", ".json")
        assert sorted(first) == sorted(second), "files of two saves"
        for file in first:
            if not file.endswith(pickled):
                assert first[file] == second[file], f"two saves differ in {file}"

    def _drop(self, name: str) -> None:
        book, model = self.ledger, self.model
        self.must("delete_adapter", lambda: model.delete_adapter(name))
        del book.adapters[name], book.values[name]
        if name in book.heads:
            self.must("delete_head", lambda: model.delete_head(name))
            book.forget_head(name)

    @precondition(lambda self: self.started and self.ledger.adapters and not self.ledger.merged)
    @rule(data=st.data(), with_embeddings=st.booleans())
    def into_a_fresh_model(self, data: Any, with_embeddings: bool) -> None:
        """All adapters, loaded into a model that never saw them, answer with the same bits."""
        book, model = self.ledger, self.model
        folder = self.new_folder()
        self.must("save_all_adapters", lambda: model.save_all_adapters(folder, with_head=False))
        fresh = self.fresh()
        drawn = torch.random.get_rng_state()
        names = self.must("load_all_adapters", lambda: fresh.load_all_adapters(folder))
        assert torch.equal(drawn, torch.random.get_rng_state()), "loading drew random numbers"
        assert sorted(names) == sorted(book.adapters), f"loaded {names}"
        name = data.draw(st.sampled_from(list(book.adapters)))
        assert adapter_values(fresh, name) == book.values[name], f"values of {name!r}"
        same(self.alone(name, fresh), self.alone(name), "in a fresh model")
        if book.fusions and name in next(iter(book.fusions.values())):
            self._fusion_into(fresh)

    def _fusion_into(self, fresh: Any) -> None:
        key = next(iter(self.ledger.fusions))
        folder = self.new_folder()
        self.must("save_adapter_fusion", lambda: self.model.save_adapter_fusion(folder, key))
        self.must("load_adapter_fusion", lambda: fresh.load_adapter_fusion(folder))
        assert fusion_values(fresh, key) == self.ledger.fusion_values[key], "fusion"

    @precondition(lambda self: self.started and self.ledger.adapters)
    @rule(data=st.data())
    def train_embeddings_and_save(self, data: Any) -> None:
        """`save_adapter` saves what `train_adapter` trains, or raises."""
        book = self.ledger
        if self.family == "vit" or book.merged or book.dtype is torch.float16:
            return
        name = data.draw(st.sampled_from(list(book.adapters)))
        twin, folder = copy.deepcopy(self.model), self.new_folder()
        try:
            # refused where a fusion has the adapter, or the adapter sits at the embeddings
            twin.train_adapter(name, train_embeddings=True)
            twin.eval()
            with torch.no_grad():
                for p in twin.parameters():
                    if p.requires_grad:
                        p.add_(0.125)
            twin.save_adapter(folder, name)
        except AdapterZooError:
            self.count("train_embeddings refused")
            return
        fresh = self.fresh()
        fresh.load_adapter(folder, set_active=True)
        same(self.alone(name, fresh), self.alone(name, twin), "trained embeddings")
        self.count("train_embeddings")

    @precondition(lambda self: self.started and self.ledger.adapters)
    @rule(data=st.data(), skipped=st.sampled_from([[0], [1], [0, 1]]))
    def leave_out(self, data: Any, skipped: list[int]) -> None:
        """An adapter loaded without some blocks is one that skips them."""
        book, model = self.ledger, self.model
        name = data.draw(st.sampled_from(list(book.adapters)))
        if "left out" in book.adapters or book.merged:
            return
        folder = self.new_folder()
        self.must("save_adapter native", lambda: model.save_adapter(folder, name, with_head=False))
        if not self.attempt(
            "load_adapter leave_out",
            lambda: model.load_adapter(folder, load_as="left out", leave_out=skipped),
        ):
            # nothing may be left of it
            return
        with AdapterSetup(name, skip_layers=skipped):
            expected = run(model.base_model, **self.cast_inputs())
        same(self.alone("left out"), expected, f"leave_out={skipped}")
        model.delete_adapter("left out")
