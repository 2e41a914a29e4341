"""Conformance: named checks of what every adapter method must do, yours included.

```python
from adapterzoo.testing import check_method

check_method(MyConfig(rank=4))        # or a config string: "my_method[rank=4]"
```

`check_method` raises one `ConformanceError` that lists every failed check. With pytest, write one
test for each check:

```python
@pytest.mark.parametrize("name", checks)
def test_my_method(name):
    failures = report(MyConfig(rank=4), only=[name])
    assert not failures, failures
```

`report_on(TinyModel(model, inputs), MyConfig(rank=4))` runs the checks that depend on where an
adapter sits, on a model of your own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from adapterzoo.config import AdapterConfig

# importing it registers the checks
from . import _checks  # noqa: F401
from ._case import (
    DTYPES,
    MODEL_CHECKS,
    Case,
    Check,
    ConformanceError,
    ModelCase,
    TinyModel,
    cases,
    checks,
    refusal,
)
from ._host import KINDS

__all__ = [
    "DTYPES",
    "KINDS",
    "MODEL_CHECKS",
    "Case",
    "Check",
    "ConformanceError",
    "Failure",
    "TinyModel",
    "cases",
    "check_method",
    "checks",
    "report",
    "report_on",
]


@dataclass(frozen=True)
class Failure:
    """A check that failed on a case.

    Attributes:
        check: its name.
        case: the case on which it failed.
        message: the reason.
    """

    check: str
    case: Case
    message: str

    def __str__(self) -> str:
        """Return one line."""
        return f"{self.check} [{self.case}]: {self.message}"


def report(
    config: AdapterConfig | str, only: Iterable[str] | None = None, kinds: Iterable[str] = KINDS
) -> list[Failure]:
    """Run the checks on every case of a config.

    Args:
        config: a config, or a config string.
        only: names of the checks to run; None: all.
        kinds: kinds of layers to run them on.

    Returns:
        The failures; none for a correct method.

    Raises:
        UnknownNameError: `only` names a check that does not exist.
        ConformanceError: the config fits none of the suite's models.
    """
    loaded = AdapterConfig.load(config)
    chosen = [checks.find(n) for n in (checks if only is None else only)]
    kinds = tuple(kinds)
    found = list(cases(loaded, kinds))
    if not found:
        reasons = (refusal(loaded, kind) for kind in kinds)
        why = next((f" It is refused there: {each}" for each in reasons if each), "")
        raise ConformanceError(
            f"{loaded!r}: fits no model of the suite, whose layers are q_proj, fc1, c_attn, … and "
            f"have 32 features. Check a config that can be placed there, or call report_on.{why}"
        )
    return list(_failures(chosen, found))


def report_on(
    tiny: TinyModel, config: AdapterConfig | str, only: Iterable[str] = MODEL_CHECKS
) -> list[Failure]:
    """Run the checks that depend on where an adapter sits, on a model of transformers.

    ```python
    model = AutoModel.from_config(LlamaConfig(hidden_size=64, num_hidden_layers=2, ...)).eval()
    inputs = {"input_ids": torch.tensor([[1, 2, 3]])}
    assert not report_on(TinyModel(model, inputs), "my_method")
    ```

    Args:
        tiny: the model and its inputs; a small model, as it is run many times.
        config: a config, or a config string.
        only: names of the checks to run.

    Returns:
        The failures; none for a correct method.

    Raises:
        UnknownNameError: `only` names a check that does not exist.
        SiteError: the model has no site of the kind that the config needs.
    """
    case = ModelCase(AdapterConfig.load(config), tiny=tiny)
    chosen = [checks.find(n) for n in only]
    case.host("a")
    return list(_failures(chosen, [case]))


def _failures(chosen: Iterable[Check], found: Iterable[Case]) -> Iterator[Failure]:
    for check in chosen:
        for case in filter(check.wants, found):
            try:
                check(case)
            except ConformanceError as error:
                yield Failure(check.name, case, str(error))
            except Exception as error:  # noqa: BLE001  whatever a method raises is its failure
                yield Failure(check.name, case, f"{type(error).__name__}: {error}")


def check_method(config: AdapterConfig | str, only: Iterable[str] | None = None) -> None:
    """Run the checks on every case of a config and raise one error for all failures.

    Args:
        config: a config, or a config string.
        only: names of the checks to run; None: all.

    Raises:
        ConformanceError: a check failed; the message has one line for each failure.
        UnknownNameError: `only` names a check that does not exist.
    """
    failures = report(config, only)
    if failures:
        names = dict.fromkeys(f.check for f in failures)
        lines = "\n  ".join(map(str, failures))
        raise ConformanceError(
            f"check_method({config!r}): {len(names)} of {len(checks)} checks failed:\n  {lines}"
        )


def __dir__() -> list[str]:
    return __all__
