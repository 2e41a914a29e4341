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

`report_on(tiny_model("llama"), MyConfig(rank=4))` runs the checks of where adapters sit on a tiny
model of any model type of transformers; `python -m adapterzoo.testing.architectures` runs them for
every registered method on all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from adapterzoo import methods as _methods  # noqa: F401  registers the config strings
from adapterzoo.configs import AdapterConfig

# importing a file registers its checks
from . import _configs, _state, _values, _world  # noqa: F401
from ._case import DTYPES, Case, Check, ConformanceError, cases, checks
from ._host import KINDS
from ._models import MODEL_CHECKS, ModelCase, TinyModel, tiny_model

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
    "tiny_model",
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
    chosen = [checks.find(n) for n in (checks if only is None else only)]
    found = list(cases(loaded, kinds))
    if not found:
        raise ConformanceError(
            f"{loaded!r}: fits no model of the suite. Its blocks have the linear layers q_proj, "
            f"k_proj, v_proj, out_proj, fc1, fc2, or up_proj and down_proj, or c_attn, c_proj, "
            f"c_fc; hidden states have 32 features. Check a config that can be placed there."
        )
    return list(_failures(chosen, found))


def report_on(
    tiny: TinyModel, config: AdapterConfig | str, only: Iterable[str] = MODEL_CHECKS
) -> list[Failure]:
    """Run the checks on a model of transformers: that a method sits where it should.

    ```python
    for model_type in ("bert", "llama", "vit"):
        assert not report_on(tiny_model(model_type), "my_method")
    ```

    Args:
        tiny: the model and its inputs: of `tiny_model`, or of your own.
        config: a config, or a config string.
        only: names of the checks to run.

    Returns:
        What failed; empty for a method that is right.

    Raises:
        UnknownNameError: there is no check of a name in `only`.
        SiteError: the model has no place that the config asks for.
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
