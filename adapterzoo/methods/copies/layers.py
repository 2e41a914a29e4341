"""Copies of whole layers, one for each adapter: norms, and the modules in `modules_to_save`.

y = f_θ'(x) with the function f of the layer and parameters θ' of the adapter, initially the layer's
own θ. After other adapters in a stack it adds its change: y + f_θ'(x) − f_θ(x).

Differs from PEFT: several can act in one call, in a stack or an average, and each row of a batch
can have its own, whatever the layer; merging writes the values into the layer.
Cost: the parameters of the layer for each adapter; alone, nothing in the forward.
Cannot do: layers that are called with more than one input, quantized ones, batch norms.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.func import functional_call

from adapterzoo.anatomy import Anatomy, Site
from adapterzoo.config import AdapterConfig, Placement, config_class
from adapterzoo.contracts import BaseLayer, CopyAdapter, replaced
from adapterzoo.errors import SiteError, listing
from adapterzoo.patterns import around, matches

from .base import Copy


@config_class
class CopyConfig(AdapterConfig):
    """Base of the configs whose adapters are copies of layers."""

    def build(self, site: Site, device: torch.device, dtype: torch.dtype) -> LayerCopy:
        """Return an adapter that does not have its copy yet."""
        return LayerCopy(site.transposed or site.kind == "embedding")


class LayerCopy(Copy, CopyAdapter):
    """y = layer(x) with a copy of the layer."""

    noun: ClassVar[str] = "a copy of a layer"

    def __init__(self, transposed: bool) -> None:
        """Wait for the copy.

        Args:
            transposed: whether the layer stores its weight as `[d_in, d_out]`.
        """
        super().__init__()
        self.transposed = transposed

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the output of the copy, or with earlier adapters add its change."""
        if base.is_original:
            return self._run(x, base)
        y, plain = base(x), base.original(x)
        own = self._run(x, base)
        return own if y is plain else y + (own - plain)

    def _run(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the copy's output; values of another dtype are cast to that of the layer."""
        like = base.parameters
        out: Tensor
        if all(self._own(name).dtype is value.dtype for name, value in like.items()):
            out = self.layer(x)
        else:
            cast = {name: self._own(name).to(value.dtype) for name, value in like.items()}
            out = functional_call(self.layer, cast, (x,))
        return out

    def weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged weight, `[d_out, d_in]`."""
        own = self._own("weight").to(w.dtype)
        return replaced(w, own.mT if self.transposed else own, base.weight.to(w.dtype))

    def bias(self, b: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged bias, `[d_out]`."""
        return b if base.bias is None else self.parameter("bias", b, base)

    def parameter(self, name: str, value: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged value of any parameter, as the layer stores it."""
        plain = base.parameters[name].to(value.dtype)
        return replaced(value, self._own(name).to(value.dtype), plain)

    def identity_values(self, base: BaseLayer) -> dict[str, Tensor]:
        """Return the values of the layer."""
        return {f"layer.{name}": value for name, value in base.parameters.items()}

    def _own(self, name: str) -> Tensor:
        own: Tensor = self.layer._parameters[name]  # type: ignore[assignment]
        return own


# --- whole modules: `modules_to_save` ---


@config_class
class SavedModulesConfig(CopyConfig):
    """The part of a config that its `modules_to_save` add.

    Attributes:
        names: of modules; each layer in one gets a copy.
    """

    architecture: ClassVar[str] = "modules_to_save"

    names: str | tuple[str, ...] = ()

    def placements(self, anatomy: Anatomy) -> list[Placement]:
        """Return one placement for each layer in the modules.

        Raises:
            SiteError: a name matches no module with parameters, or a layer cannot be copied.
        """
        sites = {s.path: s for s in (*anatomy, *anatomy.others)}
        # a string is one pattern, a tuple holds names
        given = (self.names,) if isinstance(self.names, str) else self.names
        for name in given:
            one = name if isinstance(self.names, str) else (name,)
            if not any(_is_in(path, one) for path in sites):
                known = sorted({name for path in sites for name in path.split(".")})
                names = listing((n for n in known if not n.isdecimal()), limit=30)
                raise SiteError(
                    f"modules_to_save={self.names!r}: no module of the base model matches "
                    f"{name!r}. Write some of {names}; a head needs no copy."
                )
        found = [site for path, site in sites.items() if _is_in(path, self.names)]
        for site in found:
            _refuse_shared(site, anatomy)
        return [Placement(site, self, "modules_to_save") for site in found]


def _is_in(path: str, wanted: str | tuple[str, ...]) -> bool:
    """Return whether a layer, or a module around it, matches."""
    return any(matches(each, wanted) for each in around(path))


def _refuse_shared(site: Site, anatomy: Anatomy) -> None:
    group = next((group for group in anatomy.shared_tables if site.path in group), ())
    if group:
        raise SiteError(
            f"modules_to_save: {listing(group)} share the table at {site.path!r}. Write "
            f"trainable_token_indices=[…], or train_adapter(…, train_embeddings=True)."
        )
    if site.parameter is not None:
        raise SiteError(f"modules_to_save: {site.path!r} reads {site.parameter!r}. Leave it out.")
