"""Bounds on the rounding errors of a result, whatever the order in which its sums are added.

Processors add in different orders. A bound that follows from the operations holds on all of them.
"""

import torch


def rounding(terms, *dtypes):
    """The part of Σ |a| |b| by which a sum of products may be off, in any order of its terms.

    n roundings are n·u, with u half the distance of 1 to the next number (Higham 2002, §3.1): one
    for each term, in float32 or float64, and a few in the dtypes that hold values between.

    Args:
        terms: of all sums that follow each other.
        dtypes: of the values.
    """
    single = torch.float64 if all(d is torch.float64 for d in dtypes) else torch.float32
    coarsest = max(torch.finfo(d).eps for d in dtypes)
    return (terms * torch.finfo(single).eps + 8 * coarsest) / 2


def half_step(dtype):
    """Half the distance of 1 to the next number."""
    # Triton's interpreter cuts bfloat16 off
    return torch.finfo(dtype).eps / (1 if dtype is torch.bfloat16 else 2)


class Rounded:
    """Numbers in float64, each with a bound on the error of a computation of it.

    The numbers of a tensor are exact. Operations round in float32, or in float64 if all operands
    are float64, and sums have any order. `to` is for a value that is kept in another dtype.

    Attributes:
        value: the numbers.
        error: the bounds.
        unit: what an operation rounds of a number, relative to it.
        kept: the dtype in which the numbers were kept last; None: they were not.
    """

    def __init__(self, value, error=0.0, unit=None, kept=None):
        self.value = value.detach().double()
        self.error = torch.as_tensor(error, dtype=torch.float64).expand(value.shape)
        # twice in float64, in which `value` is rounded, too
        self.unit = unit or (2.0**-52 if value.dtype is torch.float64 else 2.0**-24)
        self.kept = kept

    @property
    def largest(self):
        """What the absolute values may be."""
        return self.value.abs() + self.error

    @property
    def mT(self):  # noqa: N802  as of a tensor
        return self.arranged(lambda v: v.mT)

    def arranged(self, change):
        """Return the numbers as `change` views or permutes a tensor."""
        return Rounded(change(self.value), change(self.error), self.unit, self.kept)

    def to(self, dtype):
        if self.kept is dtype:
            return self
        info = torch.finfo(dtype)
        lost = half_step(dtype) * self.largest + info.smallest_normal * info.eps
        return Rounded(self.value, self.error + lost, self.unit, dtype)

    def __add__(self, other):
        value, error = self.value + other.value, self.error + other.error
        unit = max(self.unit, other.unit)
        return Rounded(value, error + unit * (value.abs() + error), unit)

    def __mul__(self, other):
        if not isinstance(other, Rounded):
            other = Rounded(torch.tensor(other, dtype=torch.float64))
        return self._product(other, torch.mul, 1)

    def __matmul__(self, other):
        return self._product(other, torch.matmul, self.value.shape[-1])

    def _product(self, other, multiply, terms):
        unit = max(self.unit, other.unit)
        most = multiply(self.largest, other.largest)
        error = most - multiply(self.value.abs(), other.value.abs())
        # a few more than the terms, of constants and of partial sums
        error = error + (terms + 4) * unit * most
        return Rounded(multiply(self.value, other.value), error, unit)

    def sum(self, dim):
        terms = self.value.shape[dim]
        error = self.error.sum(dim) + terms * self.unit * self.largest.sum(dim)
        return Rounded(self.value.sum(dim), error, self.unit)

    def through(self, function, dtype=None):
        """Return a function of each number, whose slope changes by at most 2 within 1.

        Args:
            function: an activation or its derivative; it may subtract from 1, as h · (1 − σ(h)).
            dtype: in which the parts of its formula are kept; None: they are not.
        """
        with torch.enable_grad():
            at = self.value.clone().requires_grad_()
            value = function(at)
            # a slope may be a constant
            (slope,) = torch.autograd.grad((value + 0.0 * at).sum(), at)
        error = slope.abs() * self.error + self.error.square()
        # the error of 1 − σ(h) is multiplied by h, until it is 0
        sizes = 2.0 + 2.0 * value.detach().abs() + self.value.abs().clamp(max=8.0)
        step = 8 * self.unit + (half_step(dtype) if dtype else 0.0)
        return Rounded(value, error + step * sizes, self.unit)


def chained(formula, values, terms, dtype):
    """Return the results of a formula of sums and products, such as an output and gradients.

    Absolute values in the place of `values` give the Σ |a| |b| of all results.

    Args:
        formula: values that require gradients → tensors; its own constants are positive.
        values: the operands.
        terms: of all sums that follow each other.
        dtype: of the computation.
    """
    exact, sizes = (
        formula(*(of(v.detach()).double().requires_grad_() for v in values))
        for of in (torch.clone, torch.abs)
    )
    limit = rounding(terms, dtype)
    return [Rounded(e, limit * s.detach().abs()) for e, s in zip(exact, sizes, strict=True)]


def right(name, got, truth, dtype):
    """Raise where a number is further from the truth than rounding explains, or NaN."""
    if got.dtype is not dtype or got.shape != truth.value.shape:
        shape = list(truth.value.shape)
        raise ValueError(f"{name}: {got.dtype} {list(got.shape)}, not {dtype} {shape}")
    if got.numel():
        error = (got.double() - truth.value).abs() / truth.to(dtype).error
        if not error.max() <= 1.0:
            raise ValueError(f"{name}: wrong by {error.max():.1e} times what rounding explains")


def as_near(own, reference, truth, sums=0.0):
    """The error is at most twice that of the reference of the same dtype, and one rounding.

    Args:
        own: the values.
        reference: the values of the definition.
        truth: in float64.
        sums: what the order of their float32 sums may change.
    """
    once = torch.finfo(reference.dtype).eps * truth.abs().max()
    error, usual = ((found.double() - truth).abs().max() for found in (own, reference))
    assert error <= 2 * usual + once + sums, (error, usual)
