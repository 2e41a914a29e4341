"""What a program of the peer did with its adapters, watched from outside.

trained     the loss is finite, parameters of adapters changed, and no frozen parameter did
evaluated   the metrics are finite
saved       files were written
loaded      a copy of the model whose adapters, heads and fusions are deleted gets them back from
            these files: every tensor, and the outputs for the last batch

A fact that does not hold is a failure of the program, like an exception of its own.
"""

from __future__ import annotations

import copy
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

FACTS = ("trained", "evaluated", "saved", "loaded")
# of metrics, what says something else than how good the predictions are
_SPEED = ("runtime", "per_second", "samples", "epoch", "mem_", "_time")


class FactError(AssertionError):
    """A program ran on, but did not do what it says."""


class Facts:
    """What was seen in this process, and what of it did not hold."""

    def __init__(self) -> None:
        """Start with nothing seen."""
        self.seen: dict[str, list[Any]] = {fact: [] for fact in FACTS}
        self.scores: list[float] = []
        self.failures: list[FactError] = []
        self._batch: dict[str, Any] | None = None
        self._reloading = False

    def install(self) -> None:
        """Watch trainers and everything that saves."""
        import transformers

        from adapterzoo import AdapterModelMixin

        trainer: Any = transformers.Trainer
        trainer.train = self._around(trainer.train, self._train)
        # subclasses have an `evaluate` of their own
        trainer.__init__ = self._around(trainer.__init__, self._start)
        trainer.save_model = self._around(trainer.save_model, self._save_model)
        trainer._prepare_inputs = self._around(trainer._prepare_inputs, self._remember)
        mixin: Any = AdapterModelMixin
        for name in ("save_adapter", "save_head", "save_adapter_fusion"):
            setattr(mixin, name, self._around(getattr(mixin, name), self._save_one))
        mixin.save_all_adapters = self._around(mixin.save_all_adapters, self._save_all)
        mixin.load_adapter = self._around(mixin.load_adapter, self._load)

    def expect(self, wanted: tuple[str, ...]) -> None:
        """Say which facts are missing."""
        missing = [fact for fact in wanted if not self.seen[fact]]
        if missing and not self.failures:
            self.failures.append(FactError(f"not {', not '.join(missing)}"))

    def compare_scores(self, file: Path, again: bool) -> None:
        """Keep the scores of a first run in a file, or compare those of the second with them."""
        if not again:
            file.write_text(json.dumps(self.scores), encoding="utf-8")
            return
        first = json.loads(file.read_text(encoding="utf-8"))
        pairs = zip(first, self.scores, strict=False)
        holds = len(first) == len(self.scores) > 0
        holds &= all(math.isclose(a, b, rel_tol=1e-5) for a, b in pairs)
        self._check(holds, f"loaded: scores {self.scores[:4]}, in the first run {first[:4]}")
        self.seen["loaded"].append(f"by a second run: the same {len(first)} scores")

    def summary(self) -> dict[str, str]:
        """Each fact in a few words."""
        return {fact: "; ".join(dict.fromkeys(map(str, seen))) for fact, seen in self.seen.items()}

    def _around(self, function: Any, watch: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def watched(owner: Any, *given: Any, **options: Any) -> Any:
            return watch(functools.partial(function, owner), owner, *given, **options)

        return watched

    def _check(self, holds: bool, error: str) -> None:
        if not holds:
            self.failures.append(FactError(error))

    # --- trained and evaluated ---

    def _train(self, train: Any, trainer: Any, *given: Any, **options: Any) -> Any:
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        frozen = {name for name, p in trainer.model.named_parameters() if not p.requires_grad}
        result = train(*given, **options)
        after = dict(trainer.model.named_parameters())
        changed = {name for name, p in before.items() if not same(p, after[name])}
        adapters = changed & own_names(trainer.model)
        self._check(math.isfinite(result.training_loss), f"trained: loss {result.training_loss}")
        self._check(bool(adapters), "trained: no parameter of an adapter changed")
        self._check(not changed & frozen, f"trained: frozen, but changed: {changed & frozen}")
        self.seen["trained"].append(
            f"loss {result.training_loss:.3f}, {len(adapters)} tensors of adapters and "
            f"{len(changed - adapters)} others changed, {len(frozen)} are as before"
        )
        return result

    def _start(self, init: Any, trainer: Any, *given: Any, **options: Any) -> None:
        init(*given, **options)
        trainer.evaluate = functools.partial(self._evaluate, trainer.evaluate, trainer)

    def _evaluate(self, evaluate: Any, trainer: Any, *given: Any, **options: Any) -> Any:
        from transformers import set_seed

        # the masks of masked language modeling, and samples, are those of the second run
        set_seed(0)
        self.scores = []
        hook = trainer.model.register_forward_hook(self._score)
        metrics = evaluate(*given, **options)
        hook.remove()
        kept = {k: float(v) for k, v in metrics.items() if not any(each in k for each in _SPEED)}
        self._check(bool(kept), "evaluated: no metrics")
        self._check(all(map(math.isfinite, kept.values())), f"evaluated: {kept}")
        shown = sorted((name, value) for name, value in kept.items() if value)
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in shown)
        self.seen["evaluated"].append(f"{len(kept)} metrics: {numbers}")
        return metrics

    def _score(self, model: Any, inputs: Any, outputs: Any) -> None:
        self.scores += [float(t.abs().mean()) for t in floats(outputs)]

    def _remember(self, prepare: Any, trainer: Any, inputs: Any) -> Any:
        self._batch = prepared = prepare(inputs)
        return prepared

    # --- saved and loaded ---

    def _save_one(self, save: Any, model: Any, *given: Any, **options: Any) -> Any:
        result = save(*given, **options)
        self._reload(model, [_folder(given, options)])
        return result

    def _save_all(self, save: Any, model: Any, *given: Any, **options: Any) -> Any:
        result = save(*given, **options)
        folder = _folder(given, options)
        self._reload(model, [folder / name for name in model.adapters_config])
        return result

    def _save_model(self, save: Any, trainer: Any, *given: Any, **options: Any) -> Any:
        result = save(*given, **options)
        folder = Path(given[0] if given else trainer.args.output_dir)
        parts = [path for path in sorted(folder.iterdir()) if path.is_dir()]
        self._reload(trainer.model, parts, whole=True)
        return result

    def _load(self, load: Any, model: Any, *given: Any, **options: Any) -> Any:
        name = load(*given, **options)
        if not self._reloading:
            path = str(given[0] if given else "")
            known = "" if Path(path).is_dir() else "from the Hub: "
            self.seen["loaded"].append(f"{known}{name}")
        return name

    def _reload(self, model: Any, folders: list[Path], whole: bool = False) -> None:
        files = [file for folder in folders for file in folder.glob("*") if file.is_file()]
        self._check(bool(files), f"saved: no files in {folders}")
        self.seen["saved"].append(f"{len(files)} files")
        # a fusion by itself needs its adapters
        fresh = emptied(model, fusions_only=all(map(_is_fusion, folders)))
        self._reloading = True
        # fusions after their adapters
        for folder in sorted(folders, key=_is_fusion):
            load_any(fresh, folder)
        self._reloading = False
        theirs, tensors = dict(model.named_parameters()), dict(fresh.named_parameters())
        own = sorted(own_names(fresh) | {name for name in tensors if name.startswith("heads.")})
        # a head in an adapter's file has the adapter's name
        both = [name for name in own if name in theirs]
        wrong = [name for name in both if not same(tensors[name], theirs[name])]
        self._check(bool(own) and not wrong, f"loaded: {len(own)} tensors, not the same: {wrong}")
        # everything was saved, though the head of a fusion may have become the model's own
        comparable = (whole or set(theirs) == set(tensors)) and self._batch is not None
        comparable &= set(getattr(model, "heads", ())) == set(getattr(fresh, "heads", ()))
        if comparable:
            self._compare(model, fresh)
        outputs = " and the same outputs" if comparable else ""
        self.seen["loaded"].append(f"into a fresh model: {len(own)} equal tensors{outputs}")

    def _compare(self, model: Any, fresh: Any) -> None:
        import torch

        fresh.set_active_adapters(model.active_adapters)
        if getattr(model, "heads", None):
            fresh.active_head = model.active_head
        was_training, batch = model.training, dict(self._batch or {})
        model.eval(), fresh.eval()
        with torch.no_grad():
            pairs = zip(floats(model(**batch)), floats(fresh(**batch)), strict=True)
        self._check(all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs),
                    "loaded: the outputs are others")  # fmt: skip
        model.train(was_training)


def _folder(given: Any, options: Any) -> Path:
    return Path(given[0] if given else options["save_directory"])


def same(first: Any, second: Any) -> bool:
    """Whether two tensors have the same bits, NaN included."""
    import torch

    second = second.detach()
    return first.shape == second.shape and bool(torch.allclose(first.detach(), second, 0, 0, True))


def own_names(model: Any) -> set[str]:
    """The names of all parameters of adapters and fusions."""
    from adapterzoo.model.state import own_parameters_of

    own = {id(parameter) for parameter in own_parameters_of(model)}
    return {name for name, parameter in model.named_parameters() if id(parameter) in own}


def floats(outputs: Any) -> list[Any]:
    """The tensors of outputs that are scores or losses."""
    values = outputs.values() if hasattr(outputs, "values") else outputs
    return [v for v in values if hasattr(v, "is_floating_point") and v.is_floating_point()]


def emptied(model: Any, fusions_only: bool) -> Any:
    """A copy of a model without its fusions, and without its adapters and named heads."""
    fresh = copy.deepcopy(model)
    fresh.set_active_adapters(None)
    for name in list(fresh.adapters_config.fusions):
        fresh.delete_adapter_fusion(name)
    if fusions_only:
        return fresh
    for name in list(fresh.adapters_config):
        fresh.delete_adapter(name)
    for name in list(getattr(fresh, "heads", ())):
        fresh.delete_head(name)
    return fresh


def _is_fusion(folder: Path) -> bool:
    return any(folder.glob("adapter_fusion*"))


def load_any(model: Any, folder: Path) -> None:
    """Load the adapter, fusion or head that a folder holds."""
    names = {file.name for file in folder.iterdir()}
    if _is_fusion(folder):
        model.load_adapter_fusion(folder, with_head=True)
    elif any("adapter" in name for name in names):
        model.load_adapter(folder)
    elif any("head" in name for name in names):
        model.load_head(folder)
