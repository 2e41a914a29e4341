"""What tests of models must not see of each other."""

from __future__ import annotations

import pytest

from adapterzoo.model import setup


@pytest.fixture(autouse=True)
def _models_of_this_test_alone():
    """A setup holds for every model that lives; when one dies, the garbage collector decides."""
    before = list(setup._models)
    yield
    for model in list(setup._models):
        if not any(model is other for other in before):
            setup.withdraw(model)
