"""Why a test of the peer fails here: the first rule that fits a failure names its kind.

missing      a name, argument or feature of the peer that adapterzoo does not have
documented   a difference that docs/from-adapters.md or tests/test_peer_defects.py explains
internals    the test looks at what the peer does not document: its layers and their names
environment  the network, a fixture that is not there, what transformers 5 has removed
bug          none of these: ours to mend

A test that fails in several sub-tests is of the kind that comes last in `KINDS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

KINDS = ("environment", "internals", "documented", "missing", "bug")


class Rule(NamedTuple):
    """What a failure looks like, and why it fails; patterns are searched for."""

    kind: str
    reason: str
    error: str = ""
    line: str = ""  # of the peer's test
    test: str = ""

    def fits(self, test: str, failure: Mapping[str, str]) -> bool:
        """Whether every pattern is found."""
        texts = ((self.error, failure["error"]), (self.line, failure["line"]), (self.test, test))
        return all(re.search(pattern, text) for pattern, text in texts)


RULES = (
    Rule(
        "environment",
        "a fixture that the checkout does not have",
        error=r"FileNotFoundError: .*(common_voice|speech_commands)",
    ),
    Rule(
        "environment",
        "the network",
        error=r"OfflineModeIsEnabled|LocalEntryNotFoundError|couldn't connect|ConnectionError",
    ),
    Rule(
        "missing",
        "a name that adapterzoo does not have",
        error=r"MissingNameError|<missing adapters\.|a Missing\b",
    ),
    Rule(
        "missing",
        "a method or attribute that adapterzoo's models do not have",
        error=r"AttributeError: '\w*(Model|For)\w*' object has no attribute|"
        r"AttributeError: 'AdaptersConfig' object",
    ),
    Rule(
        "missing",
        "an argument or config field that adapterzoo does not have",
        error=r"got an unexpected keyword argument|there is no field",
    ),
    Rule(
        "documented",
        "parameters are named `….adapters.<name>.…` for every method "
        "(the peer: `loras`, `prefix_tunings`, …)",
        line=r"assertTrue\(has_weights\)",
    ),
    Rule(
        "documented",
        '`save_adapter` writes safetensors; `format="adapterhub"` writes the peer\'s files',
        error=r"FileNotFoundError.*\.bin",
    ),
)


def explain(test: Mapping[str, Any]) -> Rule:
    """The rule of a failed test's gravest failure; a `bug` where one fits no rule."""
    found = [_first(test["id"], failure) for failure in test["failures"]]
    return max(found, key=lambda rule: KINDS.index(rule.kind))


def _first(test: str, failure: Mapping[str, str]) -> Rule:
    for rule in RULES:
        if rule.fits(test, failure):
            return rule
    return Rule("bug", failure["error"].split("\n")[0][:160])


def unused(tests: Iterable[Mapping[str, Any]]) -> list[Rule]:
    """Rules that no failure of these tests is explained by."""
    seen = {_first(test["id"], failure) for test in tests for failure in test["failures"]}
    return [rule for rule in RULES if rule not in seen]
