"""What PEFT's files can say of the site of an adapter that changes a weight."""

from __future__ import annotations

import torch
from torch import Tensor

from adapterzoo.anatomy import OutputSlice, Site
from adapterzoo.configs import Placement


def unsayable(placement: Placement, config: str, why: str) -> str | None:
    """Return why PEFT's format cannot express an adapter; None: it can.

    Args:
        placement: of the adapter.
        config: its config with an article, such as "a BOFTConfig".
        why: what PEFT lacks at a Conv1D, such as "PEFT has no BOFT".
    """
    site = placement.site
    if not site.is_called:
        return f"an adapter at {site.path!r}, and PEFT's would not act: no module there is called"
    if site.parameter is not None:
        return f"an adapter at the parameter {site.parameter!r} of {site.path!r}"
    if site.transposed:
        return f"{config} at {site.path!r}, a Conv1D, where {why}"
    return None


def whole_width(site: Site) -> int:
    """Return the output width of the layer to which a part belongs, or of the layer itself."""
    rows = site.output_slice
    return site.d_out if rows is None else rows.groups * rows.width


def row_numbers(rows: OutputSlice) -> Tensor:
    """Return the indices of a part's output features."""
    every = torch.arange(rows.groups * rows.width)
    return every.view(rows.groups, rows.width)[:, rows.start : rows.stop].reshape(-1)  # [size]
