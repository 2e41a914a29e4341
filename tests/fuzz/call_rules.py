"""Calls that change nothing: mixed rows, generation, contexts, threads, asyncio tasks."""

from __future__ import annotations

import asyncio
import copy
import threading
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from snapshots import changes
from torch import Tensor
from world import ROWS, World, near, run, same

from adapterzoo import AdapterSetup, Stack

_GENERATES = {"gpt2": "causal_lm", "llama": "causal_lm", "t5": "seq2seq_lm"}


class StopError(Exception):
    """Leaves a context."""


class CallRules(World):
    """Rules about calls; the invariants and a snapshot say that nothing has changed."""

    def names(self) -> st.SearchStrategy[Any]:
        return st.sampled_from([None, *self.ledger.adapters])

    def row(self, number: int) -> dict[str, Tensor]:
        return {k: v[number : number + 1] for k, v in self.cast_inputs().items()}

    @precondition(lambda self: self.started and self.ledger.adapters)
    @rule(data=st.data())
    def mixed_rows(self, data: Any) -> None:
        """Each row of a mixed batch is that row alone."""
        book, model = self.ledger, self.model
        name = st.one_of(self.names(), st.lists(self.names(), min_size=2, max_size=2))
        rows = [data.draw(name) for _ in range(ROWS)]
        rows = [r if not isinstance(r, list) else _stack(r) for r in rows]
        head = data.draw(st.sampled_from([*book.heads])) if book.heads else None
        options = {"head": head} if head else {}

        def mixed() -> list[Tensor]:
            return run(model, **self.cast_inputs(), adapter_names=rows, **options)

        if book.merged:
            self.refused("adapter_names of a merged model", mixed)
            return
        found: list[list[Tensor]] = []
        if not self.attempt("adapter_names", lambda: found.append(mixed())):
            return
        for i, setup in enumerate(rows):
            with AdapterSetup(setup, head_setup=head, skip_layers=[]):
                alone = run(model if head else model.base_model, **self.row(i), **options)
            if head or not book.answering:
                near([t[i : i + 1] for t in found[0]], alone, f"row {i} of {rows}")

    @precondition(lambda self: self.started and self.ledger.adapters)
    @rule(data=st.data(), fails=st.booleans())
    def context(self, data: Any, fails: bool) -> None:
        """In a context others act; when it ends, however it does, everything is as before."""
        name = data.draw(self.names())
        inner = data.draw(self.names())
        before = self.snapshot()
        found: list[list[Tensor]] = []

        def call() -> None:
            with AdapterSetup(name):
                outer = run(self.model.base_model, **self.cast_inputs())
                with AdapterSetup(inner, skip_layers=[0]):
                    run(self.model.base_model, **self.cast_inputs())
                found.append(outer)
                found.append(run(self.model.base_model, **self.cast_inputs()))
                if fails:
                    raise StopError

        try:
            if self.attempt("AdapterSetup", call):
                same(found[1], found[0], "after an inner context")
        except StopError:
            self.count("AdapterSetup left by an exception")
        self.unchanged(before, "AdapterSetup")
        if found:
            same(found[0], self.alone(name), "AdapterSetup without skip_layers")

    @precondition(lambda self: self.started and self.ledger.adapters)
    @rule(data=st.data())
    def threads(self, data: Any) -> None:
        """A context holds for its thread; two threads do not see each other's."""
        names = [data.draw(self.names()) for _ in range(2)]
        alone: list[Any] = []
        if not self.attempt("alone", lambda: alone.extend(self.alone(n) for n in names)):
            return
        default, found, errors = self.run(), {}, []
        barrier = threading.Barrier(3, timeout=60)

        def work(number: int) -> None:
            try:
                if number == 2:
                    barrier.wait()
                    found[2] = self.run()
                    return
                with AdapterSetup(names[number], skip_layers=[]):
                    barrier.wait()
                    found[number] = run(self.model.base_model, **self.cast_inputs())
            except BaseException as error:  # noqa: BLE001  it belongs to the thread that asked
                errors.append(error)
                barrier.abort()

        # the random state belongs to the process: dropout is off, so nothing draws
        workers = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert not errors, f"in a thread: {errors[0]!r}"
        for i in range(2):
            same(found[i], alone[i], f"thread {i} with {names[i]!r}")
        same(found[2], default, "a thread without a context")
        self.count("threads")

    @precondition(lambda self: self.started and self.ledger.adapters)
    @rule(data=st.data())
    def tasks(self, data: Any) -> None:
        """Two asyncio tasks of one thread do not see each other's contexts."""
        names = [data.draw(self.names()) for _ in range(2)]
        alone: list[Any] = []
        if not self.attempt("alone", lambda: alone.extend(self.alone(n) for n in names)):
            return

        async def work(name: str | None) -> list[Tensor]:
            with AdapterSetup(name, skip_layers=[]):
                await asyncio.sleep(0)
                found = run(self.model.base_model, **self.cast_inputs())
                await asyncio.sleep(0)
                return found

        async def both() -> list[list[Tensor]]:
            return await asyncio.gather(*(work(n) for n in names))

        for i, found in enumerate(asyncio.run(both())):
            same(found, alone[i], f"task {i} with {names[i]!r}")
        self.count("asyncio tasks")

    # --- generation ---

    @precondition(
        lambda self: (
            self.started
            and self.family in _GENERATES
            and self.ledger.adapters
            and not self.ledger.merged
        )
    )
    @rule(data=st.data(), beams=st.sampled_from((1, 1, 2)))
    def generate(self, data: Any, beams: int) -> None:
        """Cached is uncached, and a row of a mixed batch is that row alone; in float64."""
        book = self.ledger
        kind = _GENERATES[self.family]
        heads = [n for n, c in book.heads.items() if c["head_type"] == kind]
        twin = copy.deepcopy(self.model).double()
        if not heads:
            getattr(twin, f"add_{kind}_head")("speaks")
        head = data.draw(st.sampled_from(heads)) if heads else "speaks"
        rows = [data.draw(self.names()) for _ in range(2)]
        for name in (*rows, *[n for n in twin.known_heads() if n != head]):
            # a row is answered by the head of its adapter's name where there is one
            if name in twin.known_heads() and name != head:
                twin.delete_head(name)
        twin.set_active_adapters(None)
        twin.active_head = head
        before = {k: v for k, v in self.snapshot(twin).items() if not k.startswith("identity")}
        prompt = torch.arange(3, 11).reshape(2, 4)
        given = {
            "attention_mask": torch.ones_like(prompt), "max_new_tokens": 4, "min_new_tokens": 4,
            "num_beams": beams, "do_sample": False, "pad_token_id": 0,
        }  # fmt: skip
        found = []
        for cached in (True, False):
            found.append(
                twin.generate(input_ids=prompt, adapter_names=rows, use_cache=cached, **given)
            )
        assert torch.equal(*found), f"cached {found[0].tolist()}, uncached {found[1].tolist()}"
        for i, name in enumerate(rows):
            alone = {**given, "attention_mask": given["attention_mask"][i : i + 1]}
            with AdapterSetup(name, head_setup=head):
                row = twin.generate(input_ids=prompt[i : i + 1], **alone)
            assert torch.equal(row[0], found[0][i, : row.shape[1]]), f"row {i} of {rows}"
        after = {k: v for k, v in self.snapshot(twin).items() if not k.startswith("identity")}
        assert not changes(before, after), f"generate changed {changes(before, after)[:5]}"
        self.count("generate" if beams == 1 else "generate with beams")

    # --- looking at the model ---

    @precondition(lambda self: self.started)
    @rule()
    def look(self) -> None:
        """What only looks changes nothing, and names what is there."""
        book, model = self.ledger, self.model
        before = self.snapshot()
        text, table = model.adapter_summary(), model.adapter_summary(as_dict=True)
        assert isinstance(text, str), "adapter_summary"
        listed = [row["name"] for row in table]
        assert [n for n in listed if n in book.adapters] == list(book.adapters), listed
        for name in book.adapters:
            modules = model.get_adapter(name)
            assert modules or not book.values[name], f"get_adapter({name!r})"
            prints = [model.adapter_fingerprint(name) for _ in range(2)]
            assert prints[0] == prints[1], "fingerprint"
        for name in book.heads:
            model.get_labels(name)
        repr(model)
        self.unchanged(before, "looking")
        self.count("look")


def _stack(names: list[Any]) -> Any:
    kept = list(dict.fromkeys(n for n in names if n is not None))
    return Stack(*kept) if kept else None
