"""Shards of features that share a matrix: the config fields of their size and form."""

from __future__ import annotations

from adapterzoo.anatomy import Site
from adapterzoo.config_base import config_class
from adapterzoo.errors import ConfigError
from adapterzoo.fields import MAX_WIDTH, Choice, Range, Share, field

from ._targets import TargetedConfig

FORMS = Choice(True, False, "mini", "bat")


@config_class
class ShardConfig(TargetedConfig):
    """Base of the configs whose adapters share a matrix D among shards of features.

    Attributes:
        r: features of a shard, 1 to d_in; for "bat" it divides d_in and d_out.
        init_weights: the form, and the initial values of D. True: D is zero; False: uniform in
            ±1 / √d_out; "mini" and "bat": those forms, with D zero.
        mini_r: columns of D in the form "mini", a divisor of d_out.
        miss_dropout: probability, 0 to below 1, of dropping an input feature on the way to D.
    """

    # `init_weights` says more than the initial values
    training_fields = TargetedConfig.training_fields - {"init_weights"} | {"miss_dropout"}

    r: int = field(64, Range(1, MAX_WIDTH))
    init_weights: bool | str = field(True, FORMS)
    mini_r: int = field(1, Range(1, MAX_WIDTH))
    miss_dropout: float = field(0.0, Share())

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: a value is not legal, or has no effect.
        """
        super().__post_init__()
        if self.mini_r != 1 and self.init_weights != "mini":
            raise ConfigError(
                f"{type(self).__name__}(mini_r={self.mini_r}, init_weights={self.init_weights!r}): "
                f"mini_r has an effect only with init_weights='mini'. Write mini_r=1."
            )
        if self.miss_dropout and self.init_weights == "bat":
            raise ConfigError(
                f"{type(self).__name__}(miss_dropout={self.miss_dropout}, init_weights='bat'): D "
                f"multiplies the weight, so there are no features to drop. Write miss_dropout=0.0."
            )

    @property
    def starts_as_identity(self) -> bool:
        """Whether D starts as zero."""
        return self.init_weights is not False

    def shape_at(self, site: Site) -> tuple[int, ...]:
        """Return the shape of D at a site, without experts.

        Raises:
            ConfigError: r or mini_r does not fit the widths.
        """
        r, d_in, d_out, form = self.r, site.d_in, site.d_out, self.init_weights
        if form == "bat":
            self._require("r", r, range(1, d_in + 1), (d_in, d_out), site)
            return d_out // r, r, r
        self._require("r", r, range(1, d_in + 1), (), site)
        if form != "mini":
            return r, d_out
        self._require("mini_r", self.mini_r, range(1, d_out + 1), (d_out,), site)
        return r, self.mini_r

    def _require(
        self, name: str, value: int, legal: range, widths: tuple[int, ...], site: Site
    ) -> None:
        """Raise unless the value is legal and divides the widths."""
        fits = [n for n in legal if not any(width % n for width in widths)]
        if value in fits:
            return
        near = sorted(sorted(fits, key=lambda n: abs(n - value))[:2])
        form = f", init_weights={self.init_weights!r}" if widths else ""
        rule = f"divide {' and '.join(map(str, widths))}" if widths else "be at most d_in"
        raise ConfigError(
            f"{type(self).__name__}({name}={value}{form}) at {site.path!r}, with d_in={site.d_in} "
            f"and d_out={site.d_out}: {name} must {rule}; legal near it: {near}. Write "
            f"{name}={near[-1]}."
        )
