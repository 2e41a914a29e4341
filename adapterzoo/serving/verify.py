"""Proof that a server computes the same from a folder as the adapter does here.

A reader reads the folder as the server does, and its result is applied to a plain model. The logits
and weights of this model are compared with those of the model with the adapter.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from adapterzoo.errors import (
    AdapterZooError,
    CheckpointError,
    ConfigError,
    listing,
    names_call,
    unknown_name,
)
from adapterzoo.model import init, merging
from adapterzoo.model.conversion import difference, plain_outputs, random_inputs

from .readers import READERS, Reading, apply, gguf, opened

StrPath: TypeAlias = "str | os.PathLike[str]"

# how much of the adapter's change may differ: units in the last place of the file's dtype, plus the
# rounding of a deep model in float32
_ROUNDING, _NOISE = 4, 1e-4
_ADAPTER = "verified"
# the errors that values of wrong types, shapes or patterns raise
_STUMBLES = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError,
    ValueError, re.error,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Wrong:
    """A weight that the server changes differently.

    Attributes:
        key: key of the weight.
        error: ‖ΔW − ΔW'‖ / ‖ΔW‖ with the server's ΔW'; 1 if it does not change the weight.
    """

    key: str
    error: float


@dataclass(frozen=True, slots=True)
class Proof:
    """Comparison of what a server makes of a folder with the adapter here.

    Attributes:
        server: the reader's name.
        version: the server's version.
        refused: reasons why the server does not load the folder.
        dropped: keys in the file that it ignores.
        without_effect: weights that the adapter changes and the server does not.
        wrong: weights that the server changes differently, the worst first.
        needs: options that the server must be started with.
        here: why the adapter cannot be loaded here; None if it can.
        difference: the largest difference of the logits.
        change: the largest difference that the adapter makes to the logits of the base model.
        tolerance: the largest acceptable `difference` / `change`.
    """

    server: str
    version: str
    refused: tuple[str, ...]
    dropped: tuple[str, ...]
    without_effect: tuple[str, ...]
    wrong: tuple[Wrong, ...]
    needs: tuple[str, ...]
    here: str | None
    difference: float
    change: float
    tolerance: float

    @property
    def is_equal(self) -> bool:
        """Whether the server loads the folder and computes the same as the adapter."""
        is_close = self.difference <= self.tolerance * self.change
        found = self.refused or self.dropped or self.without_effect or self.wrong or self.here
        return is_close and not found

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"equal": self.is_equal, **asdict(self)}

    def __str__(self) -> str:
        """Return a line for each finding."""
        lines = [f"{self.version} refuses it: {reason}" for reason in self.refused]
        if self.here is not None:
            lines.append(f"it cannot be loaded here: {self.here}")
        for what, keys in (
            ("keys that it drops", self.dropped),
            ("weights without effect", self.without_effect),
        ):
            if keys:
                lines.append(f"{what}: {listing(keys)}")
        lines += [
            f"{each.key}: its change differs by {each.error:.2g} of the norm"
            for each in self.wrong[:10]
        ]
        if not self.refused and self.here is None:
            lines.append(
                f"logits differ by at most {self.difference:.2e}; the adapter changes them by up "
                f"to {self.change:.2e}"
            )
        lines += [f"needs {option}" for option in self.needs]
        said = "computes what the adapter computes here" if self.is_equal else "is NOT equal"
        return "\n".join([*lines, f"{self.version}: {said}"])


@names_call
def verify(
    folder: StrPath,
    server: str,
    model: Any,
    adapter: StrPath | None = None,
    *,
    inputs: Mapping[str, Any] | None = None,
    tolerance: float | None = None,
    converter: StrPath | None = None,
) -> Proof:
    """Compare what a server computes from a folder with what the adapter computes here.

    Args:
        folder: a PEFT folder, as the server is given it.
        server: "vllm", "sglang", "lorax", "tgi" or "gguf".
        model: the base model: a folder, a name on the Hub, or a plain model, which is not changed.
        adapter: the folder of the adapter that was exported, in any format; None: `folder` as it
            is read here, which cannot reveal wrong values in the file itself.
        inputs: arguments of a call of the model; None: random ones.
        tolerance: by how much of the adapter's change the logits may differ; None: as much as the
            dtype of the file allows.
        converter: for "gguf": path of llama.cpp's `convert_lora_to_gguf.py`, which is run, and
            whose file is compared; None: its rules are followed.

    Raises:
        ConfigError: `converter` is given for another server.
        CheckpointError: the folder is not a PEFT folder, the model cannot be loaded, or the
            converter has written a damaged file.
        UnknownNameError: there is no reader for the server.
    """
    if server not in READERS:
        raise unknown_name("", "server", server, READERS)
    if converter is not None and server != "gguf":
        raise ConfigError(f"{server!r} reads PEFT's files. Leave converter out.")
    reader = READERS[server]
    config, tensors = opened(Path(folder))
    base = _base(model, tensors)
    try:
        if converter is None:
            reading = reader.read(config, tensors, base)
        else:
            reading = gguf.convert(os.fspath(converter), os.fspath(folder), base)
    except CheckpointError:
        raise
    except _STUMBLES as error:
        # the server's own code would fail there too
        reading = Reading(refused=[f"{type(error).__name__}: {error}"])
    allowed = _tolerance(tensors) if tolerance is None else tolerance
    served = None if reading.refused else _served(base, reading)
    original = folder if adapter is None else adapter
    try:
        here = _here(base, original)
    except AdapterZooError as error:
        return _proof(server, reading, allowed, here=str(error))
    given = random_inputs(here) if inputs is None else inputs
    before, after = plain_outputs(base, given), plain_outputs(here, given)
    change = difference(before, after)
    if served is None:
        return _proof(server, reading, allowed, change=change)
    found = plain_outputs(served, given)
    lost, wrong = _weights(base, here, served, allowed)
    return _proof(
        server, reading, allowed, difference=_difference(found, after), change=change, lost=lost,
        wrong=wrong,
    )  # fmt: skip


def _proof(
    server: str,
    reading: Reading,
    tolerance: float,
    *,
    here: str | None = None,
    difference: float = 0.0,
    change: float = 0.0,
    lost: tuple[str, ...] = (),
    wrong: tuple[Wrong, ...] = (),
) -> Proof:
    return Proof(
        server, READERS[server].version, tuple(reading.refused), tuple(reading.dropped), lost,
        wrong, tuple(reading.needs), here, difference, change, tolerance,
    )  # fmt: skip


def _difference(some: list[Tensor], others: list[Tensor]) -> float:
    """Return the largest difference of the logits, the first outputs."""
    return difference(some[:1], others[:1])


def _tolerance(tensors: Mapping[str, Tensor]) -> float:
    """Return how far outputs may differ through rounding, of the file or in the model's float32."""
    dtypes = {t.dtype for t in tensors.values() if t.is_floating_point()}
    return _ROUNDING * max((torch.finfo(d).eps for d in dtypes), default=0.0) + _NOISE


def _base(model: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return a copy of the base model in float32 or float64, of the class that the file is for."""
    if not isinstance(model, str | os.PathLike):
        if not isinstance(model, PreTrainedModel) or hasattr(model, "load_adapter_setup"):
            raise CheckpointError(
                f"{type(model).__name__} is not a plain model. Write the folder of the base model."
            )
        found = copy.deepcopy(model)
        return (found if found.dtype == torch.float64 else found.float()).eval()
    base = os.fspath(model)
    try:
        config = AutoConfig.from_pretrained(base, trust_remote_code=False)
        name = next(iter(config.architectures or ()), "AutoModel")
        heads = [t for key, t in tensors.items() if key.endswith(".score.weight")]
        if heads:
            name = name.replace("ForCausalLM", "ForSequenceClassification")
            config.num_labels = len(heads[0])
        cls = getattr(transformers, name)
        return cls.from_pretrained(base, config=config, dtype=torch.float32).eval()
    except (AttributeError, OSError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"the base model {base!r} cannot be loaded ({reason}). Write its folder or its name on "
            "the Hub."
        ) from error


def _served(base: Any, reading: Reading) -> Any:
    """Return the model as the server changes it; None, with a reason, if a change does not fit."""
    served = copy.deepcopy(base)
    try:
        apply(served, reading)
    except _STUMBLES as error:
        reading.refused.append(str(error))
        return None
    return served


def _here(base: Any, folder: StrPath) -> Any:
    """Return the model with the adapter of a folder, loaded here."""
    model = init(copy.deepcopy(base)).eval()
    model.load_adapter(folder, load_as=_ADAPTER, set_active=True, dtype=base.dtype)
    return model


@torch.no_grad()
def _weights(
    base: nn.Module, here: Any, served: nn.Module, tolerance: float
) -> tuple[tuple[str, ...], tuple[Wrong, ...]]:
    """Return the weights that the server does not change, and those that it changes wrongly."""
    try:
        # like the server, change a layer and not those that share its weight
        with merging.untied_for(here, [_ADAPTER]):
            here.merge_adapter(_ADAPTER)
    except AdapterZooError:
        # not a change of weights; only the logits can be compared
        return (), ()
    plain, own = dict(base.named_parameters(remove_duplicate=False)), here.state_dict()
    lost, wrong = [], []
    for key, theirs in served.named_parameters(remove_duplicate=False):
        if key not in own or key not in plain or own[key].shape != theirs.shape:
            continue
        mine, changed = own[key] - plain[key], theirs - plain[key]
        norm = float(torch.linalg.vector_norm(mine))
        error = float(torch.linalg.vector_norm(mine - changed))
        # a difference of large weights carries their rounding
        slack = torch.finfo(plain[key].dtype).eps * float(torch.linalg.vector_norm(plain[key]))
        if error <= tolerance * norm + 4 * slack:
            continue
        if norm > 4 * slack and not bool(changed.count_nonzero()):
            lost.append(key)
        else:
            wrong.append(Wrong(key, error / norm if norm else float("inf")))
    return tuple(lost), tuple(sorted(wrong, key=lambda each: -each.error))
