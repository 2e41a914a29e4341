"""The machine's base: the model, what it should hold, and the invariants that hold after each step.

The truth is never asked from the model: the plain model of transformers gives the base outputs, the
`Ledger` the state, and a model built anew from the ledger the outputs with adapters.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from families import tiny_config, tiny_inputs
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant
from ledger import Bits, Ledger
from snapshots import bits, changes, of_adapter, state
from torch import Tensor, nn
from transformers import AutoModel
from transformers.utils import logging

from adapterzoo import AdapterSetup, AdapterZooError, AutoAdapterModel
from adapterzoo.model import activation

FAMILIES = ("bert", "gpt2", "llama", "t5", "vit")
# some contain each other, some are parts of module paths, some have characters that lists use
NAMES = ("a", "ab", "lora", "weight", "query", "default", "a,b", "x[0]", "it's")
ROWS = 3
OPERATIONS: Counter[str] = Counter()
"""How often each operation ran, and how often it was refused, over all machines."""

# of the largest value; sums may be taken in another order
TOLERANCE = {
    torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 5e-2, torch.bfloat16: 0.25,
}  # fmt: skip
logging.disable_progress_bar()
_MADE: dict[str, tuple[nn.Module, Any]] = {}


class World(RuleBasedStateMachine):
    """One model of one family; subclasses add the rules."""

    families = FAMILIES
    model: Any
    pristine: Any

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.folder = Path(tempfile.mkdtemp(prefix="fuzz"))
        self.saved = 0
        self._base: tuple[Any, list[Tensor]] | None = None
        # its reports of loading would hide the steps of a failure
        self._verbosity = logging.get_verbosity()
        logging.set_verbosity_error()

    @initialize(data=st.data())
    def start(self, data: Any) -> None:
        self.family = data.draw(st.sampled_from(self.families), label="family")
        torch.manual_seed(0)
        self.pristine, self.model = copy.deepcopy(made(self.family))
        self.inputs = tiny_inputs(self.family, batch=ROWS)
        self.plain_keys = list(self.model.state_dict())
        self.blocks = 4 if self.family == "t5" else 2

    def teardown(self) -> None:
        logging.set_verbosity(self._verbosity)
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.started:
            activation.unregister(self.model)
            del self.model

    # --- what rules use ---

    def snapshot(self, model: Any = None) -> dict[str, Any]:
        """All that a call which changes nothing leaves as it was."""
        used = self.model if model is None else model
        return {**state(used), "next forward": [bits(t) for t in run(used, **self.like(used))]}

    def like(self, model: Any) -> dict[str, Tensor]:
        """The fixed inputs in the dtype of a model."""
        inputs = self.inputs.items()
        return {k: v.to(model.dtype) if v.is_floating_point() else v for k, v in inputs}

    def fresh(self) -> Any:
        """A model without adapters, with the base weights of plain transformers."""
        model = copy.deepcopy(made(self.family)[1]).to(self.ledger.dtype)
        model.base_model.load_state_dict(self.pristine.state_dict())
        copy_buffers(self.pristine, model.base_model)
        return model

    def count(self, operation: str) -> None:
        OPERATIONS[operation] += 1

    def new_folder(self) -> Path:
        self.saved += 1
        return self.folder / str(self.saved)

    def attempt(self, operation: str, call: Callable[[], Any]) -> bool:
        """Run what may be refused; a refusal is one of the library's errors and changes nothing."""
        before = self.snapshot()
        try:
            call()
        except AdapterZooError as error:
            self.count(f"{operation} refused")
            self.unchanged(before, f"{operation} refused: {error}")
            return False
        self.count(operation)
        return True

    def must(self, operation: str, call: Callable[[], Any]) -> Any:
        """Run what is legal."""
        try:
            result = call()
        except AdapterZooError as error:
            raise AssertionError(f"{operation} is legal, and was refused: {error}") from error
        self.count(operation)
        return result

    def refused(self, operation: str, call: Callable[[], Any]) -> None:
        """Run what is not legal: an error of the library, and nothing has changed."""
        before = self.snapshot()
        try:
            call()
        except AdapterZooError as error:
            said = str(error)
        else:
            raise AssertionError(f"{operation} is not legal, and was not refused")
        self.count(f"bad {operation}")
        assert len(said) > 20, f"{operation}: the message says nothing: {said!r}"
        self.unchanged(before, f"bad {operation}")

    def unchanged(self, before: dict[str, Any], what: str) -> None:
        after = self.snapshot()
        found = changes(before, after)
        assert not found, f"{what}: changed {found[:8]}"
        order = [k for k in before if k.startswith("tensor ")]
        now = [k for k in after if k.startswith("tensor ")]
        assert order == now, f"{what}: the order of the state dict changed"

    def run(self, model: Any = None, **inputs: Any) -> list[Tensor]:
        """The model's answers to the fixed inputs."""
        return run(self.model if model is None else model, **(inputs or self.cast_inputs()))

    def alone(self, acting: Any, model: Any = None, **inputs: Any) -> list[Tensor]:
        """What the base model computes with a setup, without heads."""
        used = self.model if model is None else model
        with AdapterSetup(acting, skip_layers=[]):
            return run(used.base_model, **(inputs or self.cast_inputs()))

    def cast_inputs(self) -> dict[str, Tensor]:
        dtype = self.ledger.dtype
        return {k: v.to(dtype) if v.is_floating_point() else v for k, v in self.inputs.items()}

    def base_output(self) -> list[Tensor]:
        """The outputs of plain transformers."""
        if self._base is None or self._base[0] is not self.ledger.dtype:
            self._base = self.ledger.dtype, run(self.pristine, **self.cast_inputs())
        return self._base[1]

    def free_adapters(self) -> list[str]:
        """Adapters that nothing holds on to."""
        held = {n for names in self.ledger.fusions.values() for n in names}
        return [n for n in self.ledger.adapters if n not in self.ledger.merged and n not in held]

    # --- invariants ---

    @invariant()
    def holds(self) -> None:
        """All of them, in one line of what is printed."""
        if not self.started:
            return
        self.alone_in_the_process()
        self.names_are_as_expected()
        self.values_are_as_expected()
        self.the_state_dict_holds_what_is_there_and_nothing_else()
        self.base_weights_are_those_of_plain_transformers()
        self.nothing_active_is_plain_transformers()
        self.outputs_are_finite_and_of_the_right_dtype()
        self.a_model_without_adapters_is_of_plain_classes()

    def alone_in_the_process(self) -> None:
        """An AdapterSetup holds for every model, and raises where one of them refuses."""
        for other in list(activation._models):
            if other is not self.model:
                activation.unregister(other)

    def names_are_as_expected(self) -> None:
        model, book = self.model, self.ledger
        assert dict(model.adapters_config) == book.adapters, "adapters_config"
        assert list(model.adapters_config) == list(book.adapters), "order of adapters_config"
        assert model.has_adapters() == bool(book.adapters), "has_adapters"
        assert list(model.known_heads()) == list(book.heads), "known_heads"
        assert model.get_prediction_heads_config() == book.heads, "get_prediction_heads_config"
        assert dict(model.config.prediction_heads) == book.heads, "config.prediction_heads"
        assert not hasattr(model.config, "adapters"), "config.adapters stayed behind"
        assert repr(model.active_adapters) == repr(book.active), "active_adapters"
        assert heads_of(model) == book.answering, "active_head"
        assert model.training is False, "mode"

    def values_are_as_expected(self) -> None:
        model, book = self.model, self.ledger
        for name, values in book.values.items():
            assert adapter_values(model, name) == values, f"values of the adapter {name!r}"
        for name, values in book.head_values.items():
            assert head_values(model, name) == values, f"values of the head {name!r}"
        for name, values in book.fusion_values.items():
            assert fusion_values(model, name) == values, f"values of the fusion {name!r}"

    def the_state_dict_holds_what_is_there_and_nothing_else(self) -> None:
        owners = (*self.ledger.adapters, *self.ledger.fusions, *self._fusion_keys())
        heads = tuple(f"heads.{name}." for name in self.ledger.heads)
        plain = []
        for key in self.model.state_dict():
            if any(of_adapter(key, owner) for owner in owners) or (heads and key.startswith(heads)):
                continue
            plain.append(key)
        assert plain == self.plain_keys, f"left over: {sorted(set(plain) ^ set(self.plain_keys))}"

    def base_weights_are_those_of_plain_transformers(self) -> None:
        touched = self.merged_layers()
        own = self.model.base_model.state_dict()
        for key, value in self.pristine.state_dict().items():
            if key.rpartition(".")[0] not in touched:
                assert own[key].dtype == value.dtype, f"dtype of {key}"
                assert torch.equal(own[key], value), f"base weight {key}"

    def nothing_active_is_plain_transformers(self) -> None:
        if self.ledger.merged:
            return
        same(self.alone(None), self.base_output(), "nothing active")

    def outputs_are_finite_and_of_the_right_dtype(self) -> None:
        for tensor in self.run():
            assert tensor.dtype == self.ledger.dtype, f"{tensor.dtype} from {self.ledger.dtype}"
            assert bool(tensor.isfinite().all()), "an output is not finite"

    def a_model_without_adapters_is_of_plain_classes(self) -> None:
        if self.ledger.adapters:
            return
        plain = dict(self.pristine.named_modules())
        for path, module in self.model.base_model.named_modules():
            # the base model is of a subclass, which takes the calls for adapters
            kind = type(module) if path else type(module).__mro__[1]
            assert kind is type(plain[path]), f"class of {path}"
            owned = () if path else ("_adapter_owner",)
            expected = sorted([*vars(plain[path]), *owned])
            assert sorted(vars(module)) == expected, f"attributes of {path}"

    @property
    def started(self) -> bool:
        return "model" in vars(self)

    def merged_layers(self) -> set[str]:
        return {
            path
            for name in self.ledger.merged
            for path in (key.partition("/")[0] for key in self.ledger.values[name])
        }

    def _fusion_keys(self) -> list[str]:
        from adapterzoo.composition import fusion_key

        return [fusion_key(name) for name in self.ledger.fusions]


def copy_buffers(source: nn.Module, target: nn.Module) -> None:
    """Those too that no state dict has, such as the frequencies of rotary embeddings."""
    theirs = dict(source.named_buffers())
    for name, buffer in target.named_buffers():
        buffer.data = theirs[name].clone()


def made(family: str) -> tuple[nn.Module, Any]:
    """The plain model of a family and the one with the same values that takes adapters."""
    if family not in _MADE:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            plain = AutoModel.from_config(tiny_config(family)).eval()
        model = AutoAdapterModel.from_config(tiny_config(family)).eval()
        model.base_model.load_state_dict(plain.state_dict())
        _MADE[family] = plain, model
    return _MADE[family]


def heads_of(model: Any) -> tuple[str, ...]:
    active = model.active_head
    if active is None:
        return ()
    return (active,) if isinstance(active, str) else tuple(active)


def run(model: Any, **inputs: Any) -> list[Tensor]:
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return list(answers(model(**inputs)))


def answers(output: Any) -> Iterator[Tensor]:
    """The tensors of an output that answer row by row."""
    for part in output.get("head_outputs") or ():
        yield from answers(part)
    for name in ("logits", "start_logits", "end_logits", "last_hidden_state", "pooler_output"):
        value = output.get(name)
        if isinstance(value, Tensor):
            yield value


def adapter_values(model: Any, name: str) -> Bits:
    return {
        f"{path}/{key}": bits(tensor)
        for path, module in model.adapter_modules(name)
        for key, tensor in module.state_dict().items()
    }


def fusion_values(model: Any, name: str) -> Bits:
    return {
        f"{path}/{key}": bits(tensor)
        for path, module in model.fusion_modules(name)
        for key, tensor in module.state_dict().items()
    }


def head_values(model: Any, name: str) -> Bits:
    return {key: bits(tensor) for key, tensor in model.get_head(name).state_dict().items()}


def same(mine: list[Tensor], theirs: list[Tensor], what: str) -> None:
    """The same bits."""
    assert len(mine) == len(theirs), f"{what}: {len(mine)} answers, not {len(theirs)}"
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == b.dtype, f"{what}: {a.dtype}, not {b.dtype}"
        assert a.shape == b.shape, f"{what}: {list(a.shape)}, not {list(b.shape)}"
        assert bits(a) == bits(b), f"{what}: differs by {float((a - b).abs().max()):.1e}"


def near(mine: list[Tensor], theirs: list[Tensor], what: str) -> None:
    """The same numbers, as the dtype has them."""
    assert len(mine) == len(theirs), f"{what}: {len(mine)} answers, not {len(theirs)}"
    for a, b in zip(mine, theirs, strict=True):
        assert a.shape == b.shape, f"{what}: {list(a.shape)}, not {list(b.shape)}"
        scale = max(1.0, float(b.abs().max()))
        found = float((a.double() - b.double()).abs().max()) / scale
        assert found <= TOLERANCE[b.dtype], f"{what}: differs by {found:.1e} of the largest value"
