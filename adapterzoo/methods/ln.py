"""LN tuning — the norms of a model, trained for each adapter.

Paper: Zhao et al. 2023, arXiv:2312.11420, §3. y = norm_θ'(x) with the adapter's own gain and bias
θ', initially those of the model.

Differs from the paper: only norms are trained. Differs from PEFT: without `target_modules` all
norms of the base model are trained, while PEFT lists names for some families.
Cost: the parameters of the norms for each adapter, nothing in the forward.
"""

from __future__ import annotations

import warnings
from typing import ClassVar

from adapterzoo.anatomy import Anatomy
from adapterzoo.config import Layers, Placement, field, method_config
from adapterzoo.errors import SiteError, listing
from adapterzoo.patterns import Excluded, Modules, matches
from adapterzoo.peft_arguments import PeftArguments
from adapterzoo.spelling import PeftSpelling, spelled

from ._copies import ConfigWithCopies, CopyConfig
from ._peft import EXCLUDED, TARGETS
from ._targets import names_of, unmatched


@method_config("ln_tuning")
class LNTuningConfig(ConfigWithCopies, CopyConfig):
    """Config of LN tuning; norms in `modules_to_save` are trained as part of it.

    Attributes:
        target_modules: names or last parts of paths of norms, or of other layers, or one regular
            expression for whole paths; None: all norms.
        exclude_modules: the same, for norms to leave out.
        leave_out: numbers of blocks whose norms are not trained.
    """

    gives_way: ClassVar[bool] = True

    target_modules: str | tuple[str, ...] | None = field(None, Modules())
    exclude_modules: str | tuple[str, ...] | None = field(None, Excluded())
    leave_out: tuple[int, ...] = field((), Layers())

    @property
    def slot_fields(self) -> frozenset[str]:
        """All fields, because the norms themselves are compared."""
        return frozenset(self.field_names())

    def placements(self, anatomy: Anatomy) -> list[Placement]:
        """Return one placement for each norm.

        Raises:
            SiteError: a name matches no norm, or all are left out.

        Warns:
            UserWarning: a name in `exclude_modules` matches no norm.
        """
        wanted, out = self.target_modules, self.exclude_modules
        every = (*anatomy, *anatomy.convolutions, *anatomy.others)
        layers = [s for s in every if s.parameter is None]
        named = [s for s in layers if wanted is not None and matches(s.path, wanted)]
        norms = named or [site for site in anatomy.others if site.kind == "norm"]
        found = [
            site
            for site in norms
            if (wanted is None or matches(site.path, wanted))
            and not (out is not None and matches(site.path, out))
            and site.layer not in self.leave_out
        ]
        missing = unmatched(wanted or (), norms)
        if missing or not found:
            hint = "The model has none. Write LoRAConfig(target_modules=[…])."
            if norms:
                hint = f"Write some of {names_of(norms)}."
            raise SiteError(
                f"{self!r}: no norm matches {listing(missing) if missing else 'these'}. {hint}"
            )
        if idle := unmatched(out or (), norms):
            warnings.warn(
                f"LNTuningConfig(exclude_modules={out!r}): no norm matches {listing(idle)}. Write "
                f"some of {names_of(norms)}, or leave it out.",
                stacklevel=2,
            )
        return [Placement(site, self, "norm") for site in found]


# PEFT has a copy of each norm
spelled(
    lambda config: PeftSpelling(
        config=config,
        peft_type="LN_TUNING",
        arguments=PeftArguments(
            class_name="LNTuningConfig",
            fields={
                "target_modules": TARGETS["target_modules"],
                "modules_to_save": TARGETS["modules_to_save"],
                **EXCLUDED,
            },
        ),
        tensors={
            "layer.weight": ("ln_tuning_layers.weight",),
            "layer.bias": ("ln_tuning_layers.bias",),
        },
        of_norms=True,
    )
)(LNTuningConfig)
