"""What changes weights or the whole model: train, merge, reset, cast, copy, pickle, round trips."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
from head_rules import LANGUAGE, add
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from snapshots import bits, of_adapter
from torch import Tensor
from world import (
    World,
    adapter_values,
    copy_buffers,
    fusion_values,
    head_values,
    heads_of,
    near,
    run,
    same,
)

from adapterzoo import AutoAdapterModel, Stack
from adapterzoo.composition import Composition

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _plain_stack(setup: Composition | None) -> bool:
    return setup is None or (isinstance(setup, Stack) and all(isinstance(c, str) for c in setup))


def storages(model: Any) -> dict[int, str]:
    return {
        t.untyped_storage().data_ptr(): key
        for key, t in model.state_dict(keep_vars=True).items()
        if t.numel()
    }


class WeightRules(World):
    """Rules about values."""

    # --- train ---

    @precondition(lambda self: self.started and self.ledger.adapters)
    @rule(data=st.data(), steps=st.integers(1, 2))
    def train(self, data: Any, steps: int) -> None:
        book, model = self.ledger, self.model
        names = st.sampled_from(list(book.adapters))
        some = data.draw(st.lists(names, min_size=1, max_size=2, unique=True))
        if any(name in book.merged for name in some):
            self.refused("train_adapter of a merged one", lambda: model.train_adapter(some))
            return
        if book.dtype is torch.float16:
            return
        if not self.attempt("train_adapter", lambda: self._start_training(some)):
            return
        book.activate(Stack(*some))
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
        heads = tuple(f"heads.{name}." for name in book.answering)
        for key in trained:
            own = any(of_adapter(key, name) for name in some) or key.startswith(heads)
            assert own, f"train_adapter({some}): {key} is trained"
        for key, p in model.named_parameters():
            if any(of_adapter(key, name) for name in some):
                assert p.requires_grad, f"train_adapter({some}): {key} is not trained"
        for name in book.answering:
            if book.heads[name]["head_type"] in LANGUAGE:
                layer = model.get_head(name).output_embeddings
                assert not layer.weight.requires_grad, f"output matrix of {name!r}"
        self._steps(steps)
        for name in some:
            book.values[name] = adapter_values(model, name)
        for name in book.answering:
            book.head_values[name] = head_values(model, name)

    def _start_training(self, some: list[str]) -> None:
        try:
            self.model.train_adapter(some)
        finally:
            # a refusal changes nothing, and what is compared is the model as it answers
            self.model.eval()

    def _steps(self, steps: int) -> None:
        model = self.model
        trained = [p for p in model.parameters() if p.requires_grad]
        frozen = {n: bits(p) for n, p in model.named_parameters() if not p.requires_grad}
        moved = False
        model.train()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            for _ in range(steps):
                loss = sum(t.double().square().mean() for t in self._answers())
                loss.backward()
                for p in model.parameters():
                    assert p.requires_grad or p.grad is None, "a gradient of what is frozen"
                with torch.no_grad():
                    for p in trained:
                        if p.grad is not None:
                            assert bool(p.grad.isfinite().all()), "a gradient is not finite"
                            moved = moved or bool(p.grad.any())
                            p -= 0.01 * p.grad / p.grad.norm().clamp_min(1.0)
                model.zero_grad()
        model.eval()
        for name, p in model.named_parameters():
            assert p.requires_grad or frozen[name] == bits(p), f"{name} is frozen and changed"
        assert moved, "no gradient of what is trained"

    def _answers(self) -> list[Tensor]:
        from world import answers

        return list(answers(self.model(**self.cast_inputs())))

    # --- merge ---

    @precondition(lambda self: self.started and self.ledger.adapters)
    @rule(data=st.data())
    def merge(self, data: Any) -> None:
        book, model = self.ledger, self.model
        name = data.draw(st.sampled_from(list(book.adapters)))
        stack = Stack(*book.merged, name) if name not in book.merged else None
        expected = None
        if stack is not None and not book.originals_lost and not book.skipped:
            expected = self._unmerged(stack)
        if self.attempt("merge_adapter", lambda: model.merge_adapter(name)):
            assert name not in book.merged, "merged twice"
            book.merged = (*book.merged, name)
            if expected is not None:
                near(self.alone(None), expected, f"merged {book.merged}")

    def _unmerged(self, stack: Composition) -> list[Tensor] | None:
        """What the adapters of a stack make of the inputs, in a copy where nothing is merged."""
        twin = copy.deepcopy(self.model)
        twin.set_active_adapters(None)
        twin.reset_adapter()
        twin.set_active_adapters(stack)
        # an AdapterSetup would hold for the merged model, too
        return run(twin.base_model, **self.cast_inputs())

    @precondition(lambda self: self.started)
    @rule()
    def reset(self) -> None:
        book = self.ledger
        if book.originals_lost and book.merged:
            self.refused("reset_adapter of a saved model", lambda: self.model.reset_adapter())
            return
        self.must("reset_adapter", lambda: self.model.reset_adapter())
        # the invariants compare the base weights with those of plain transformers
        book.merged = ()

    @precondition(lambda self: self.started and self.ledger.adapters)
    @rule(data=st.data())
    def merge_and_unload(self, data: Any) -> None:
        """A plain model comes out, with the same outputs; this one stays."""
        book, model = self.ledger, self.model
        name = data.draw(st.sampled_from(list(book.adapters)))
        heads = heads_of(model)
        plain: list[Any] = []

        def call() -> None:
            model.active_head = None
            try:
                plain.append(model.merge_and_unload([name]))
            finally:
                model.active_head = list(heads) or None

        stack = Stack(*book.merged, name) if name not in book.merged else None
        if not self.attempt("merge_and_unload", call):
            return
        assert not hasattr(plain[0], "adapters_config"), "merge_and_unload leaves adapters"
        assert list(plain[0].state_dict()) == list(self.pristine.state_dict()), "state dict"
        if stack is not None and not book.originals_lost:
            near(self.run(plain[0]), self._unmerged(stack), "merge_and_unload")

    # --- cast, copy ---

    @precondition(lambda self: self.started and not self.ledger.merged)
    @rule(dtype=st.sampled_from(DTYPES))
    def cast(self, dtype: torch.dtype) -> None:
        book = self.ledger
        self.model.to(dtype)
        self.pristine = copy.deepcopy(self.pristine).to(dtype)
        book.dtype, self._base = dtype, None
        self._read_values()
        for key, tensor in self.model.state_dict().items():
            if of_adapter(key) or key.startswith("heads."):
                assert tensor.dtype in (dtype, torch.float32), (
                    f"{key} is {tensor.dtype} after .to({dtype})"
                )
        self.count(f"to {dtype}")

    def _read_values(self) -> None:
        book, model = self.ledger, self.model
        book.values = {n: adapter_values(model, n) for n in book.adapters}
        book.head_values = {n: head_values(model, n) for n in book.heads}
        book.fusion_values = {n: fusion_values(model, n) for n in book.fusions}

    @precondition(lambda self: self.started)
    @rule(how=st.sampled_from(("deepcopy", "pickle", "torch.save")), keep=st.booleans())
    def copy_whole(self, how: str, keep: bool) -> None:
        """The copy is the model and shares nothing with it."""
        twin = COPIES[how](self.model)
        both = storages(self.model).keys() & storages(twin).keys()
        assert not both, f"{how}: shares {[storages(twin)[p] for p in both][:5]}"
        assert twin.config is not self.model.config, f"{how}: shares the config"
        before = self.run()
        same(self.run(twin), before, how)
        used, spare = (twin, self.model) if keep else (self.model, twin)
        with torch.no_grad():
            for p in spare.parameters():
                p.fill_(float("nan"))
        spare.set_active_adapters(None)
        for name in list(spare.known_heads()):
            spare.delete_head(name)
        spare.config.id2label = {0: "spoilt"}
        self.model = used
        same(self.run(), before, f"after the {how}'s twin was spoilt")
        assert self.model.config.id2label != {0: "spoilt"}, f"{how}: the config is shared"
        self.count(how)

    # --- whole models ---

    @precondition(
        lambda self: (
            self.started
            and not (
                # transformers keeps some layers of T5 in float32 when it loads it in half precision
                self.family == "t5" and self.ledger.dtype in (torch.float16, torch.bfloat16)
            )
        )
    )
    @rule()
    def round_trip(self) -> None:
        book, model = self.ledger, self.model
        before, labels = self.run(), (model.config.id2label, model.config.problem_type)
        start = model.config.to_dict().get("decoder_start_token_id")
        folder = self.new_folder()
        self.must("save_pretrained", lambda: model.save_pretrained(folder))
        same(self.run(), before, "after save_pretrained")
        loaded = self.must(
            "from_pretrained", lambda: AutoAdapterModel.from_pretrained(folder, dtype=book.dtype)
        )
        assert loaded.config.to_dict().get("decoder_start_token_id") == start, "start token"
        mine, theirs = model.state_dict(), loaded.state_dict()
        # fusions come after the adapters, whichever was there first
        ordered = sorted if book.fusions else list
        assert ordered(mine) == ordered(theirs), "round trip: keys or their order"
        for key in mine:
            assert mine[key].dtype == theirs[key].dtype, f"round trip: dtype of {key}"
            assert bits(mine[key]) == bits(theirs[key]), f"round trip: {key}"
        # memory of a file begins anywhere, where some processors add up in another order
        self.model = loaded = copy.deepcopy(loaded.eval())
        theirs = dict(self.pristine.named_buffers())
        mine = dict(loaded.base_model.named_buffers())
        rounded = [name for name in theirs if not torch.equal(theirs[name], mine[name])]
        if not rounded:
            same(self.run(), before, "from_pretrained")
        # transformers computes anew what no file has, and what a cast has rounded
        copy_buffers(loaded.base_model, self.pristine)
        self._base = None
        book.originals_lost = bool(book.merged)
        now = loaded.config.id2label, loaded.config.problem_type
        assert now == labels, f"round trip: labels {now}, not {labels}"

    @precondition(lambda self: self.started and not self.ledger.originals_lost)
    @rule()
    def built_anew(self) -> None:
        """A model is what it holds: how it came to hold it leaves no trace."""
        book, model = self.ledger, self.model
        fresh = self.fresh()
        for name, config in book.adapters.items():
            fresh.add_adapter(name, config)
        for name, config in book.heads.items():
            fresh.add_prediction_head_from_config(name, config)
        for adapters in book.fusions.values():
            fresh.add_adapter_fusion(list(adapters))
        twin = copy.deepcopy(model)
        if book.merged:
            twin.set_active_adapters(None)
            twin.reset_adapter()
        mine = twin.state_dict()
        assert set(fresh.state_dict()) == set(mine), "built anew: keys"
        fresh.load_state_dict(mine)
        for name in book.merged:
            fresh.merge_adapter(name)
        fresh.set_active_adapters(book.active, skip_layers=book.skipped)
        fresh.active_head = list(book.answering) or None
        same(self.run(fresh), self.run(), "built anew")
        self.count("built anew")

    @precondition(lambda self: self.started)
    @rule()
    def one_config_for_two(self) -> None:
        """Two models of one config object do not see each other's heads."""
        from families import tiny_config

        config = tiny_config(self.family)
        first, second = (AutoAdapterModel.from_config(config) for _ in range(2))
        add(first, "image" if self.family == "vit" else "tagging", "a")
        assert not second.known_heads(), "heads of another model"
        for each, what in ((second.config, "shared config"), (config, "the caller's config")):
            assert not getattr(each, "prediction_heads", {}), what
        self.count("one config for two")

    def _unused(self) -> bool:
        return _plain_stack(self.ledger.active)


def through_torch(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": through_torch,
}
