"""Conformance: what every adapter method must do, as named checks, for yours as well.

```python
from adapterzoo.testing import check_method

check_method(MyConfig(rank=4))        # or a config string: "my_method[rank=4]"
```

`check_method` raises one `ConformanceError` with every check that failed. With pytest, one test
for each check says more:

```python
@pytest.mark.parametrize("name", checks)
def test_my_method(name):
    failures = report(MyConfig(rank=4), only=[name])
    assert not failures, failures
```
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from adapterzoo import methods as _methods  # noqa: F401  registers the config strings
from adapterzoo.configs import AdapterConfig

# importing a file registers its checks
from . import _configs, _state, _values, _world  # noqa: F401
from ._case import DTYPES, Case, Check, ConformanceError, cases, checks
from ._host import KINDS

__all__ = [
    "DTYPES",
    "KINDS",
    "Case",
    "Check",
    "ConformanceError",
    "Failure",
    "cases",
    "check_method",
    "checks",
    "report",
]


@dataclass(frozen=True)
class Failure:
    """One check that failed on one case.

    Attributes:
        check: its name.
        case: on which it failed.
        message: why.
    """

    check: str
    case: Case
    message: str

    def __str__(self) -> str:
        """One line."""
        return f"{self.check} [{self.case}]: {self.message}"


def report(
    config: AdapterConfig | str, only: Iterable[str] | None = None, kinds: Iterable[str] = KINDS
) -> list[Failure]:
    """Run the checks on every case of a config.

    Args:
        config: a config, or a config string.
        only: names of the checks to run; None: all.
        kinds: of layers to run them on.

    Returns:
        What failed; empty for a method that is right.

    Raises:
        UnknownNameError: there is no check of a name in `only`.
        ConformanceError: the config fits none of the models of the suite.
    """
    loaded = AdapterConfig.load(config)
    chosen = [checks.find(n, "report(only=…)") for n in (checks if only is None else only)]
    found = list(cases(loaded, kinds))
    if not found:
        raise ConformanceError(
            f"{loaded!r}: fits no model of the suite. Its blocks have the linear layers q_proj, "
            f"k_proj, v_proj, out_proj, fc1, fc2, or up_proj and down_proj, or c_attn, c_proj, "
            f"c_fc; hidden states have 32 features. Check a config that can be placed there."
        )
    failures: list[Failure] = []
    for check in chosen:
        for case in filter(check.wants, found):
            try:
                check(case)
            except ConformanceError as error:
                failures.append(Failure(check.name, case, str(error)))
            except Exception as error:  # noqa: BLE001  whatever a method raises is its failure
                failures.append(Failure(check.name, case, f"{type(error).__name__}: {error}"))
    return failures


def check_method(config: AdapterConfig | str, only: Iterable[str] | None = None) -> None:
    """Run the checks on every case of a config, and fail with all that failed.

    Args:
        config: a config, or a config string.
        only: names of the checks to run; None: all.

    Raises:
        ConformanceError: a check failed; the message has a line for each case.
        UnknownNameError: there is no check of a name in `only`.
    """
    failures = report(config, only)
    if failures:
        names = dict.fromkeys(f.check for f in failures)
        lines = "\n  ".join(map(str, failures))
        raise ConformanceError(
            f"check_method({config!r}): {len(names)} of {len(checks)} checks failed:\n  {lines}"
        )
