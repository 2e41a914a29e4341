"""A device without float64, as Apple's: no operation on it may ask for a float64 value.

The CPU stands in for the device: within `without_float64` each operation that returns one raises,
as torch does there. Operators of our own hide what they call, so that each method is tried with
the definitions of the kernels, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from made import made
from snapshots import output
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from variants import VARIANTS

from adapterzoo import AdapterZooError, contracts, kernels
from adapterzoo.contracts import widest
from adapterzoo.kernels.cayley import cayley


class _NoFloat64(TorchDispatchMode):
    """Refuses float64, except of what `Tensor.cpu` has brought to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.of_host = WeakIdKeyDictionary()

    def brought(self, t: Tensor) -> Tensor:
        """What `Tensor.cpu` returns."""
        found = t.clone()
        self.of_host[found] = True
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given, made = (
            [t for t in tree_leaves(each) if isinstance(t, Tensor)]
            for each in ((args, kwargs), found)
        )
        if given and all(t in self.of_host for t in given):
            self.of_host.update((t, True) for t in made)
        elif any(t.dtype is torch.float64 for t in made):
            raise TypeError(f"{func}: the device does not support float64")
        return found


@contextmanager
def without_float64() -> Iterator[None]:
    with (
        mock.patch.dict(contracts._HAVE_FLOAT64, cpu=False),
        _NoFloat64() as device,
        mock.patch.object(Tensor, "cpu", lambda t: device.brought(t)),
    ):
        yield


def test_the_stand_in_refuses_float64():
    with without_float64():
        assert widest(torch.device("cpu")) is torch.float32
        # a kind of device that the table does not name is asked
        del contracts._HAVE_FLOAT64["cpu"]
        assert widest(torch.device("cpu")) is torch.float32
        with pytest.raises(TypeError, match="float64"):
            torch.ones(1).double()
        assert torch.ones(1).cpu().double().dtype is torch.float64
        with pytest.raises(TypeError, match="float64"):
            torch.linalg.vector_norm(torch.ones(2), dtype=torch.float64)
    assert widest(torch.device("cpu")) is torch.float64


@pytest.mark.parametrize("mode", ["auto", "reference"])
@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_each_method(config, mode, tmp_path):
    """Train, save, load, average, merge, reset and convert in float32."""
    with kernels.use(mode), without_float64():
        model = made(dtype=torch.float32, a=config, b=config)
        model.train_adapter("a")
        model(input_ids=torch.arange(3, 9).view(1, 6))[0].sum().backward()
        model.eval()
        alone = output(model)
        model.save_adapter(tmp_path, "a")
        assert model.load_adapter(tmp_path, load_as="c", set_active=True) == "c"
        assert torch.equal(output(model), alone)
        model.set_active_adapters("a")
        for act in (
            lambda: model.save_adapter(tmp_path / "theirs", "a", format="adapterhub"),
            lambda: model.average_adapter("d", ["a", "b"]),
            lambda: model.convert_adapter("a", rank=2, new_name="e"),
            lambda: (model.merge_adapter("a"), output(model), model.reset_adapter()),
        ):
            try:
                act()
            # not every method can do each of these
            except AdapterZooError:
                continue


@pytest.mark.parametrize("angle", [0.0, 0.5, 2.0])
def test_rotations_are_orthogonal(angle):
    """3e-6 up to 150 degrees, by the docstring of the definition."""
    R = torch.randn(4, 8, 8)
    S = (R - R.mT) / 2
    R = R * torch.tan(torch.tensor(angle / 2)) / torch.linalg.matrix_norm(S, 2)[..., None, None]
    with without_float64():
        Q = cayley(R)
    assert Q.dtype is torch.float32
    off = (Q @ Q.mT - torch.eye(8)).abs().max()
    assert off <= 3e-6
