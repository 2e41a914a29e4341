"""How a module keeps the weights of all its experts."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn


def stores_transposed(module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether a module stores its experts' weights as `[experts, d_in, d_out]`.

    The shapes of the projections into and out of the inner width decide; if they fit both ways,
    the module's `is_transposed` does, which some families lack (Llama 4).

    Args:
        module: the owner of the weights.
        shapes: of its 3-D weights, by name; undecided without `down_proj`.
    """
    if "down_proj" not in shapes:
        return bool(getattr(module, "is_transposed", False))
    down = shapes["down_proj"]
    into = next((shape for name, shape in shapes.items() if name != "down_proj"), down)
    # [experts, d_model, d_inner] and [experts, (2) d_inner, d_model], or the other way round
    upright = into[2] == down[1] and into[1] in (down[2], 2 * down[2])
    transposed = into[1] == down[2] and into[2] in (down[1], 2 * down[1])
    return bool(getattr(module, "is_transposed", transposed)) if upright else transposed
