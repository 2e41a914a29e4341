"""A method of PEFT in a family: its file here, ours in PEFT, and what it converts to.

The cells of `docs/peft-files.md`.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import peft_world
import torch
from click.testing import CliRunner
from peft.tuners.boft import layer as peft_boft
from peft_methods import FAMILIES, Case
from peft_world import BlockDiagonal, inputs_of, logits, ours, plain
from torch import Tensor

# it registers the methods
import adapterzoo.methods  # noqa: F401
from adapterzoo.cli import main as command
from adapterzoo.errors import AdapterZooError
from adapterzoo.spelling import peft_readable

OK, REFUSED, WRONG, CANNOT = "✓", "–", "✗", "·"
# in float64; what only PEFT has computes in float32
NEAR, NEAR_IN_FLOAT32 = 1e-10, 1e-3
ACTS = 1e-3
NOTHING = "the adapter changes no output"


@dataclass(frozen=True)
class Cell:
    """One verdict.

    Attributes:
        mark: one of the four.
        reason: what was raised, or how large the difference is.
        written: the method of the file that was written, if it is another one.
    """

    mark: str
    reason: str = ""
    written: str = ""


class CannotError(Exception):
    """PEFT itself refuses."""


Row = dict[str, tuple[Cell, Cell, Cell | None]]
"""By family: from PEFT, to PEFT, and converted to LoRA where PEFT's file is refused."""


# --- PEFT ---


def _first(error: BaseException) -> str:
    """What an error says, without what differs between runs."""
    text = " ".join(str(error).split())
    text = re.sub(r"/tmp/[\w./-]+", "…", text)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextlib.contextmanager
def by_peft() -> Iterator[None]:
    """What PEFT says by itself is not ours to judge.

    Raises:
        CannotError: PEFT raises.
    """
    try:
        with (
            warnings.catch_warnings(),
            mock.patch.object(peft_boft, "get_fbd_cuda", return_value=BlockDiagonal),
        ):
            warnings.simplefilter("ignore")
            yield
    except CannotError:
        raise
    # PEFT raises errors of every kind
    except Exception as error:
        raise CannotError(_first(error)) from error


def is_known(kind: str) -> bool:
    """Whether files of a method load here."""
    return kind in {spelling.peft_type for spelling in peft_readable()}


def _dtype(case: Case) -> torch.dtype | None:
    # some of the others cannot compute in float64
    return torch.float64 if is_known(case.kind) else None


def _fill(model: Any, std: float, of: Callable[[str], bool]) -> int:
    """Move each parameter that is trained; float32 holds the values exactly."""
    source, count = torch.Generator().manual_seed(5), 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                drawn = torch.randn(parameter.shape, generator=source) * std
                if "lora_embedding_A" in name:
                    drawn += torch.randn(parameter.shape, generator=source)
                if of(name):
                    parameter.copy_((parameter + drawn).float())
                    count += 1
    return count


def authored(case: Case, family: str, folder: Path) -> Tensor:
    """Save an adapter of PEFT with random values; the logits with it.

    Raises:
        CannotError: PEFT cannot, or its adapter does nothing.
    """
    with by_peft(), torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = case.make(plain(family), case.config(family), family)
        model = model.double() if case.double else model
        before = logits(plain(family), family, _dtype(case))
        if not _fill(model, case.std, lambda name: ".classifier." not in name):
            raise CannotError("it adapts no layer")
        found = logits(model, family, _dtype(case), **case.inputs)
    if found.shape == before.shape and (found - before).abs().max() < ACTS:
        raise CannotError(NOTHING)
    with by_peft():
        if is_known(case.kind):
            _fill(model, case.std, lambda name: ".classifier." in name)
        model.save_pretrained(folder)
        return logits(model, family, _dtype(case), **case.inputs)


def reloaded(family: str, folder: Path) -> Tensor:
    """The logits of PEFT with a folder.

    Raises:
        CannotError: PEFT cannot.
    """
    with by_peft():
        return peft_world.reloaded(family, folder)


# --- cells ---


def _difference(found: Tensor, expected: Tensor) -> float:
    # prompts of PEFT have logits too
    if found.dim() == 3:
        length = min(found.shape[1], expected.shape[1])
        found, expected = found[:, -length:], expected[:, -length:]
    if found.shape != expected.shape:
        return float("inf")
    return float((found.double() - expected.double()).abs().max())


def _compared(found: Tensor, expected: Tensor, near: float = NEAR) -> Cell:
    difference = _difference(found, expected)
    return Cell(OK) if difference <= near else Cell(WRONG, f"the logits differ by {difference:.1e}")


@contextlib.contextmanager
def _verdict(cells: list[Cell]) -> Iterator[None]:
    """An error of the library is a refusal; any other error, and what is ignored, is wrong."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            yield
        except AdapterZooError as error:
            cells.append(Cell(REFUSED, _first(error)))
        except CannotError as error:
            cells.append(Cell(WRONG, f"PEFT cannot read it: {error}"))
        except Exception as error:  # noqa: BLE001
            cells.append(Cell(WRONG, _first(error)))
    for warning in said:
        if "They are ignored" in str(warning.message):
            cells.append(Cell(WRONG, str(warning.message)))


def loaded(case: Case, family: str, folder: Path, expected: Tensor) -> Cell:
    """A folder of PEFT, loaded here."""
    cells: list[Cell] = []
    with _verdict(cells):
        model = ours(family).double() if case.double else ours(family)
        model.load_adapter(folder, load_as="a", set_active=True)
        cells.append(_compared(logits(model, family), expected, case.near))
    return cells[-1]


def returned(case: Case, family: str, folder: Path, out: Path) -> Cell:
    """A folder of PEFT, loaded and saved here, and loaded by PEFT; in float32, as PEFT loads."""
    cells: list[Cell] = []
    with _verdict(cells):
        model = ours(family)
        model.load_adapter(folder, load_as="a", set_active=True, **case.rounded)
        cells.append(_written(case, family, model, out, logits(model, family)))
    return cells[-1]


def _written(
    case: Case, family: str, model: Any, folder: Path, expected: Tensor, near: float = NEAR
) -> Cell:
    """The adapter `a` of a model in PEFT's format."""
    cells: list[Cell] = []
    with _verdict(cells):
        model.save_adapter(folder, "a", format="peft")
        cells.append(_compared(reloaded(family, folder), expected, near))
    if cells[-1].mark != OK:
        return cells[-1]
    kind = json.loads((folder / "adapter_config.json").read_text())["peft_type"]
    return Cell(OK, written="" if kind == case.kind else kind)


def made(case: Case, family: str, folder: Path) -> Cell:
    """An adapter that is made here from PEFT's config, and loaded by PEFT."""
    cells: list[Cell] = []
    try:
        with by_peft():
            config = case.config(family)
    except CannotError as error:
        return Cell(CANNOT, str(error))
    with _verdict(cells):
        model = ours(family)
        start = str(getattr(config, "init_lora_weights", ""))
        data = {"init_data": [inputs_of(family)] * 3} if start in ("eva", "corda") else {}
        model.add_adapter("a", config, **data)
        model.train_adapter("a")
        _fill(model, case.std, lambda _name: True)
        model.requires_grad_(False)
        expected = logits(model, family)
        if (
            expected.shape == logits(plain(family), family).shape
            and _difference(expected, logits(plain(family), family)) < ACTS
        ):
            raise ValueError(NOTHING)
        cells.append(_written(case, family, model, folder, expected, case.near))
    return cells[-1]


_home = tempfile.TemporaryDirectory()


def converted(case: Case, family: str, folder: Path, expected: Tensor) -> Cell:
    """What `adapterzoo convert --to lora` makes of a folder that is refused."""
    base = Path(_home.name) / family
    if not base.is_dir():
        plain(family).save_pretrained(base)
    out = folder.with_name("lora")
    arguments = ["convert", folder, out, "--to", "lora", "--model", base, "--no-head"]
    report = folder.with_name("report.json")
    said = CliRunner().invoke(command, [*map(str, arguments), "--report", str(report)])
    if said.exit_code == 1:
        text = " ".join(said.stderr.split())
        return Cell(REFUSED, re.sub(r"/tmp/[\w./-]+", "…", text))
    if said.exit_code:
        return Cell(WRONG, f"{said.exception!r} {said.stderr}")
    model = ours(family)
    model.load_adapter(out, load_as="a", set_active=True)
    found = _compared(logits(model, family), expected, NEAR_IN_FLOAT32)
    relative = json.loads(report.read_text())["relative"]
    if found.mark == OK and relative > NEAR_IN_FLOAT32:
        return Cell(WRONG, f"a relative error of {relative:.1e}")
    return found


def cells(case: Case, family: str) -> tuple[Cell, Cell, Cell | None]:
    """Run a row in a family: from PEFT, to PEFT, converted."""
    with tempfile.TemporaryDirectory() as home, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs, back, own = (Path(home) / name for name in ("theirs", "back", "own"))
        try:
            expected = authored(case, family, theirs)
        except CannotError as error:
            new = made(case, family, own)
            # what PEFT has no layer for cannot be said in its format either
            second = Cell(CANNOT, new.reason) if new.mark == REFUSED else new
            return Cell(CANNOT, str(error)), second, None
        first = loaded(case, family, theirs, expected)
        second = new = made(case, family, own)
        if first.mark == OK:
            again = returned(case, family, theirs, back)
            if again.mark != OK:
                second = again
            elif new.mark == REFUSED:
                # only read: what was loaded goes back
                second = Cell(OK, new.reason, again.written or "read")
        third = None
        if first.mark == REFUSED and not is_known(case.kind):
            third = converted(case, family, theirs, expected)
        return first, second, third


def run(case: Case) -> Row:
    """The cells of a row."""
    return {family: cells(case, family) for family in FAMILIES}
