"""The machine: all rules on one model, and how it is run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from adapter_rules import AdapterRules
from bad_calls import BadCalls
from call_rules import CallRules
from file_rules import FileRules
from head_rules import HeadRules
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from static_rules import StaticRules
from weight_rules import WeightRules

_EXAMPLES, _STEPS = 4, 25


class Machine(AdapterRules, HeadRules, WeightRules, FileRules, CallRules, StaticRules, BadCalls):
    """Everything that a user can do to a model, in any order."""


def run_seed(
    number: int, machine: type[Any] = Machine, examples: int = _EXAMPLES, shrinks: bool = True
) -> None:
    """Run the sequences of one seed, the same ones every time.

    Args:
        number: the seed.
        machine: a `Machine`, or a part of it.
        examples: how many sequences.
        shrinks: whether a sequence that fails is made shorter, which may take minutes.

    Raises:
        AssertionError: with the shortest sequence of steps that was found, as notes.
    """
    seeded = seed(number)(type(machine.__name__, (machine,), {}))
    run_state_machine_as_test(
        seeded,
        settings=settings(
            max_examples=examples, stateful_step_count=_STEPS, database=None, deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, *([Phase.shrink] if shrinks else [])],
            print_blob=False, report_multiple_bugs=False,
        ),
    )  # fmt: skip


def run_seeds(seeds: Iterable[int]) -> None:
    """Run seed after seed.

    Raises:
        AssertionError: a violation, with its steps and its seed as notes.
    """
    for number in seeds:
        try:
            run_seed(number)
        except BaseException as error:
            error.add_note(f"seed {number}: python tests/fuzz/run.py --seed {number} --seeds 1")
            raise
