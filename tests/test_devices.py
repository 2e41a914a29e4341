"""Every method in every dtype in every way that a model runs: the cells of `docs/devices.md`."""

import device_modes as modes
import device_steps as steps
import devices_table as tables
import pytest
import torch

from adapterzoo.config import architectures


def red(cells):
    return {cell: text for cell, text in cells.items() if not text.startswith(modes.GREEN)}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def committed():
    return tables.TABLE.read_text(encoding="utf-8")


# each takes long; in the quick part, the planted bugs below run a method in all modes of a process
@pytest.mark.sweep
@pytest.mark.parametrize("run", tables.RUNS)
def test_all_cells_hold_and_are_those_of_the_page(run, committed):
    found = tables.RUNS[run]()
    page = tables.read(committed)
    for column, cells in found.items():
        if column.startswith("planted "):
            # the bugs that the processes plant for themselves, each in its column
            assert red(cells) == cells, f"{column} is not seen"
        else:
            assert red(cells) == {}, column
            assert page[column] == cells, "docs/devices.md is stale: write `make devices`"


def test_the_page_is_what_is_rendered_of_its_table(committed):
    rendered = tables.render(tables.read(committed))
    assert rendered == committed, "docs/devices.md is stale: write `make devices`"


def test_every_architecture_and_column_has_its_cells(committed):
    shown = {type(config).architecture for config in steps.METHODS.values()}
    # others may have been registered since, by who writes a method
    own = {
        name for name, kind in architectures.items() if kind.__module__.startswith("adapterzoo.")
    }
    # without a config string
    assert shown == own - {"union", "no_language_adapters", "trainable_tokens"}
    page = tables.read(committed)
    rows = [f"{m} {str(d).removeprefix('torch.')}" for m in steps.METHODS for d in steps.DTYPES]
    assert {column: list(page[column]) for column in tables.COLUMNS} == dict.fromkeys(
        tables.COLUMNS, rows
    )


def rounded(adapter, x, y):
    """Two bits behind the point."""
    return y + ((4 * y).round() / 4 - y).detach()


def mixed(adapter, x, y):
    """A product that autocast does not reach, of a cast operand and one that is not."""
    with torch.autocast(x.device.type, enabled=False):
        return y + 0 * (y @ adapter.lora_A.T).sum()


def counted(adapter, x, y):
    """A number in an attribute that each call changes."""
    adapter.calls = getattr(adapter, "calls", 0) + 1
    return y * (1 + 0 * adapter.calls)


def drawn(adapter, x, y):
    """Dropout from a generator that checkpointing does not know."""
    if not hasattr(adapter, "source"):
        adapter.source = torch.Generator().manual_seed(0)
    return y * (torch.rand(y.shape, generator=adapter.source) > 0.1)


@pytest.mark.parametrize(
    ("mode", "bug", "dtypes"),
    [
        ("eager", rounded, steps.DTYPES),
        # the others are not cast: each to its own dtype, and float64 not at all
        ("autocast", mixed, [torch.float32]),
        ("compiled", counted, [torch.float32]),
        ("checkpointed", drawn, steps.DTYPES),
    ],
)
def test_a_planted_bug_turns_its_column_red(mode, bug, dtypes):
    assert red(modes.cells(modes.HERE[mode], ["lora"], dtypes)) == {}
    with steps.planted(bug):
        found = modes.cells(modes.HERE[mode], ["lora"], dtypes)
    assert red(found) == found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", modes.HERE)
def test_all_cells_hold_on_a_gpu(mode):
    assert red(modes.cells(modes.HERE[mode], device="cuda")) == {}
