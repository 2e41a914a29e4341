"""Compile every shipped configuration of the Triton kernels for GPUs that are not here.

A script, run in a process of its own because Triton decides at import whether it interprets.
`python tests/kernels/aot.py low_rank` prints one JSON list, a row for each kernel, configuration
and architecture of that operator, with what ptxas made of it; `aot.py ones` prints which kernels do
not compile for integers of 1, `aot.py version` Triton's version; without a name it writes the table
of all to docs/kernels.md.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from adapterzoo.kernels import (
    bottleneck_triton,
    butterfly_triton,
    cayley_fold_triton,
    compose_triton,
    grouped_triton,
    low_rank_triton,
    row_norm_triton,
)

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
ARCHITECTURES = (80, 90, 100)
# those whose programs may use 101,376 bytes of shared memory
SMALL = (86, 89, 120)
# instructions of the matrix units, by generation
MATRIX = {"HMMA": r"\bmma\.sync", "HGMMA": r"\bwgmma\.mma_async", "TCMMA": r"\btcgen05\.mma"}
# operands: activations, then factors
KINDS = {
    "half": ("*bf16", "*bf16", torch.bfloat16),
    "half, float32 factors": ("*bf16", "*fp32", torch.float32),
    "float32": ("*fp32", "*fp32", torch.float32),
}
ACTIVATIONS = {"x", "y", "dx", "dy", "out", "of_y", "bias", "w", "to"}
FACTORS = {"a", "b", "t", "dt", "down", "down_bias", "up", "up_bias", "h"}
WIDE = {"da", "db", "gain", "of_t", "of_b", "dots", "sums", "gram", "norm", "blocks", "dblocks"}
WIDE |= {"du", "dup", "dup_bias", "scales", "m", "inverse"}
WIDE |= {"parameters", "factors", "whole", "grad", "dR"}
NUMBERS = {"scale": "fp32", "scaling": "fp32", "seed": "*i64", "plan": "*i32", "dropped": "*i1"}


@dataclass
class Case:
    """What is compiled: a kernel and what a call would fix of it.

    Attributes:
        kernel: under triton.jit.
        kind: key of KINDS.
        tile: its configuration.
        label: after the name of the kernel.
        constants: its other constant expressions; True if they are not here.
        missing: operands that are None.
        turned: operands whose columns, not rows, are contiguous.
    """

    kernel: Any
    kind: str
    tile: Any
    label: str = ""
    constants: dict[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    turned: tuple[str, ...] = ()

    @property
    def name(self):
        """For the table."""
        return self.kernel.fn.__name__.removesuffix("_kernel") + self.label


def fitting(tile, small):
    """The function of a configuration, for small GPUs where they have their own."""
    own = small and "small" in inspect.signature(tile).parameters
    return functools.partial(tile, small=True) if own else tile


def low_rank_cases(small=False):
    """Everything that the default configurations give."""
    tiles = {
        low_rank_triton.shrink_kernel: low_rank_triton.shrink_tile,
        low_rank_triton.shrink_backward_kernel: low_rank_triton.shrink_backward_tile,
        low_rank_triton.expand_kernel: low_rank_triton.expand_tile,
        low_rank_triton.expand_backward_kernel: low_rank_triton.expand_backward_tile,
    }
    shapes = [(rows, rank) for rows in (1, 8192) for rank in (16, 64)]
    for kernel, tile in tiles.items():
        for kind, (_, _, dtype) in KINDS.items():
            for made in dict.fromkeys(
                fitting(tile, small)(rows, rank, dtype) for rows, rank in shapes
            ):
                if "DROPS" not in kernel.arg_names:
                    yield Case(kernel, kind, made)
                    continue
                yield Case(kernel, kind, made, "", {"DROPS": False}, ("seed",))
                yield Case(kernel, kind, made, ", dropout")
    for kind in ("half", "float32"):
        yield Case(low_rank_triton.drop_kernel, kind, low_rank_triton.DROP_TILE)


def compose_cases(small=False):
    """DoRA's composition at each rank, and BOFT's, which has no update."""
    tiles = {
        compose_triton.compose_kernel: compose_triton.compose_tile,
        compose_triton.compose_backward_kernel: compose_triton.compose_backward_tile,
    }
    shapes = [(rows, rank) for rows in (1, 8192) for rank in (16, 64)]
    for kernel, tile in tiles.items():
        for kind, (_, _, dtype) in KINDS.items():
            for made in dict.fromkeys(
                fitting(tile, small)(rows, rank, dtype) for rows, rank in shapes
            ):
                yield Case(kernel, kind, made, "", {"WIDE": dtype is torch.float32})
        plain = {"UPDATES": False, "NEEDS_T": False, "NEEDS_B": False, "WIDE": False}
        for kind in ("half", "float32"):
            for made in dict.fromkeys(tile(rows, 0, torch.float16) for rows in (1, 8192)):
                yield Case(kernel, kind, made, ", no update", plain, ("t", "b"))


def row_norm_cases(small=False):
    """DoRA's norms, with the products inside and, for a wide rank, without."""
    kernel, tile = row_norm_triton.row_norm_kernel, row_norm_triton.row_norm_tile
    for kind, (_, _, dtype) in KINDS.items():
        wide = {"WIDE": dtype is torch.float32}
        for rank in (16, 64):
            for made in dict.fromkeys(
                fitting(tile, small)(rows, rank, dtype) for rows in (4096, 14336)
            ):
                plain = {**wide, "DIVIDES": False}
                yield Case(kernel, kind, made, "", plain, ("dots", "m", "inverse"))
                yield Case(kernel, kind, made, ", gain", wide, ("dots",))
        for made in dict.fromkeys(fitting(tile, small)(rows, 384, dtype) for rows in (4096, 14336)):
            yield Case(kernel, kind, made, ", wide rank", {**wide, "FUSED": False}, ("gram",))


def rotate_cases(small=False):
    """BOFT's rotations, at every width that tiles have."""
    tiles = {
        butterfly_triton.rotate_kernel: butterfly_triton.rotate_tile,
        butterfly_triton.rotate_backward_kernel: butterfly_triton.rotate_backward_tile,
    }
    for kernel, tile in tiles.items():
        for kind, dtype in (("half, float32 factors", torch.bfloat16), ("float32", torch.float32)):
            narrow = dtype is torch.float32 and kernel is butterfly_triton.rotate_backward_kernel
            widths = (32,) if narrow else (64, 128)
            if small and (
                dtype is torch.float32 or kernel is butterfly_triton.rotate_backward_kernel
            ):
                widths = [w for w in widths if w <= butterfly_triton._WIDEST_SMALL]
            for width in widths:
                for made in dict.fromkeys(tile(rows, width, dtype) for rows in (1, 8192)):
                    yield Case(kernel, kind, made, "", {"ALONE": True})
                    if width <= 64:
                        yield Case(kernel, kind, made, ", narrow", {"ALONE": False})


def cayley_fold_cases(small=False):
    """BOFT's and OFT's rotations, at every width that tiles have, narrow and wide blocks."""
    for kernel in (
        cayley_fold_triton.cayley_fold_kernel,
        cayley_fold_triton.cayley_fold_backward_kernel,
    ):
        for b, m in ((4, 1), (8, 2), (2, 4), (32, 1), (16, 2), (4, 4), (64, 1)):
            chunk = b << (m - 1)
            if small and chunk > cayley_fold_triton._WIDEST_SMALL:
                continue
            tile = cayley_fold_triton.cayley_fold_tile(chunk)
            sizes = {"B": b, "M": m, "USED": tile.columns // chunk * chunk}
            label = f", b = {b}, m = {m}"
            yield Case(kernel, "float32", tile, label, {**sizes, "DROPS": False}, ("dropped",))
            if b == 8:
                yield Case(kernel, "float32", tile, f"{label}, dropout", sizes)


def bottleneck_cases(small=False):
    """Bottlenecks of every padded width with the longest activation, the others at one of them."""
    forward = bottleneck_triton.bottleneck_kernel
    tiles = {
        forward: bottleneck_triton.bottleneck_tile,
        bottleneck_triton.bottleneck_backward_kernel: bottleneck_triton.bottleneck_backward_tile,
    }
    for kernel, tile in tiles.items():
        for kind, (_, _, dtype) in KINDS.items():
            narrow = dtype is torch.float32 or kernel is not forward
            shapes = [(n, w) for w in (16, 64, 128, 256)[: 2 if narrow else 4] for n in (1, 8192)]
            for made in dict.fromkeys(tile(rows, width, dtype) for rows, width in shapes):
                yield Case(kernel, kind, made, ", gelu", {"PHI": "gelu"})
    made = bottleneck_triton.bottleneck_tile(8192, 64, torch.bfloat16)
    for name in ("relu", "tanh", "gelu_tanh"):
        yield Case(forward, "half", made, f", {name}", {"PHI": name})
    for kind, (_, _, dtype) in KINDS.items():
        for made in dict.fromkeys(
            low_rank_triton.expand_tile(8192, w, dtype, small) for w in (16, 64)
        ):
            kernel = low_rank_triton.expand_kernel
            yield Case(kernel, kind, made, ", b in columns", {}, (), ("b",))


def grouped_cases(small=False):
    """Mixed batches: each product as a forward and as a backward takes it."""
    first, second, third = (
        grouped_triton.grouped_shrink_kernel,
        grouped_triton.grouped_expand_kernel,
        grouped_triton.grouped_outer_kernel,
    )
    plain, scaled = ("scales", "seed"), ("seed",)
    for kind, (_, _, dtype) in KINDS.items():
        shapes = [(rows, rank, dtype) for rows in (16, 64) for rank in (16, 64)]
        for made in dict.fromkeys(grouped_triton.shrink_tile(*shape) for shape in shapes):
            none = {"DROPS": False, "SCALES": False}
            yield Case(first, kind, made, "", none, plain)
            yield Case(first, kind, made, ", dropout", {"SCALES": False}, ("scales",))
            yield Case(first, kind, made, ", scaled", {"DROPS": False}, scaled, ("a",))
        for made in dict.fromkeys(grouped_triton.expand_tile(*shape) for shape in shapes):
            yield Case(second, kind, made, "", {"DROPS": False}, scaled)
            dropped = {"ADDS": False}
            yield Case(second, kind, made, ", dropout", dropped, ("y", "scales"), ("b",))
        for made in dict.fromkeys(grouped_triton.outer_tile(*shape[1:]) for shape in shapes):
            yield Case(third, kind, made, ", dropout", {"SCALES": False}, ("scales",))
            yield Case(third, kind, made, ", scaled", {"DROPS": False}, scaled)


def made_for(case, architecture, ones=False):
    """The compiled kernel; with `ones` that of a call whose integers are all 1."""
    kernel, tile, missing = case.kernel, case.tile, case.missing
    # Triton makes a constant of an integer that is 1, and uses multiples of 16, but not of these
    general = {p.name for p in kernel.params if p.do_not_specialize}
    activation, factor, _ = KINDS[case.kind]
    types = {**dict.fromkeys(ACTIVATIONS, activation), **dict.fromkeys(FACTORS, factor)}
    types |= {**dict.fromkeys(WIDE, "*fp32"), **NUMBERS}
    constants = {"ROWS": tile.rows, "COLUMNS": tile.columns, "RANK": tile.rank}
    constants |= {"PRECISION": "tf32x3", **case.constants}
    signature, aligned = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name.isupper():
            signature[name] = "constexpr"
            constants.setdefault(name, True)
        elif name.endswith("_row" if name[:-4] in case.turned else "_col") or name in missing:
            # Triton makes a constant of a stride of 1, and of None
            signature[name], constants[name] = "constexpr", None if name in missing else 1
        else:
            signature[name] = types.get(name, "i32")
            if ones and signature[name] == "i32" and name not in general:
                signature[name], constants[name] = "constexpr", 1
            elif signature[name] != "fp32" and name not in general:
                aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={k: v for k, v in constants.items() if k in signature},
        attrs=aligned,
    )
    return triton.compile(
        source,
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": tile.warps, "num_stages": tile.stages},
    )


def compiled(case, architecture):
    """What ptxas makes of a kernel: one row of the table."""
    made, tile = made_for(case, architecture), case.tile
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        tool = [TOOLS / "cuobjdump", "-res-usage", file.name]
        used = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    return {
        "kernel": case.name,
        "kind": case.kind,
        "tile": f"{tile.rows} × {tile.columns}{f' × {tile.rank}' if tile.rank else ''}, "
        f"{tile.warps} warps, {tile.stages} stages",
        "sm": architecture,
        "registers": int(re.search(r"\bREG:(\d+)", used)[1]),
        "spilled": int(re.search(r"\bSTACK:(\d+)", used)[1]),
        "shared": made.metadata.shared,
        "matrix": " ".join(
            f"{n} {name}"
            for name, pattern in MATRIX.items()
            if (n := len(re.findall(pattern, made.asm["ptx"])))
        ),
    }


def table(rows):
    """The page of the documentation."""
    lines = [
        f"# The Triton kernels compiled by ptxas, with Triton {triton.__version__}",
        "",
        "Written by `python tests/kernels/aot.py`; a test compiles all kernels again and compares.",
        "No GPU is needed. *Tile* is rows × features × rank of a program. *Spilled* is bytes",
        "on the stack. *Shared* is bytes per program; the limit is 166,912 on the A100 (sm 80),",
        "232,448 on Hopper and Blackwell (sm 90, sm 100), and 101,376 on smaller GPUs (sm 86, 89",
        "and 120), where some kernels have tiles of their own. *Matrix* counts instructions of the",
        "matrix unit.",
        "",
        "| kernel | operands | tile | sm | registers | spilled | shared | matrix |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, r.values()))} |" for r in rows), ""])


# in the order of the page
CASES = {
    "low_rank": low_rank_cases,
    "compose": compose_cases,
    "row_norm": row_norm_cases,
    "rotate": rotate_cases,
    "cayley_fold": cayley_fold_cases,
    "bottleneck": bottleneck_cases,
    "grouped": grouped_cases,
}


def rows_of(name):
    """The rows of one operator."""
    return [
        compiled(case, architecture)
        for small, architectures in ((False, ARCHITECTURES), (True, SMALL))
        for case in CASES[name](small)
        for architecture in architectures
    ]


def ones():
    """Each kernel and kind of operands → why it does not compile for integers of 1, or ""."""
    found = {}
    for case in (case for cases in CASES.values() for case in cases()):
        key = f"{case.name}, {case.kind}"
        if key not in found:
            found[key] = ""
            try:
                made_for(case, 90, ones=True)
            except Exception as error:  # noqa: BLE001  Triton's errors have no common class
                found[key] = str(error)[-300:]
    return found


def main():
    if len(sys.argv) > 1:
        asked = sys.argv[1]
        answers = {"ones": ones, "version": lambda: triton.__version__}
        json.dump(answers[asked]() if asked in answers else rows_of(asked), sys.stdout)
    else:
        PAGE.write_text(table([row for name in CASES for row in rows_of(name)]), encoding="utf-8")


if __name__ == "__main__":
    main()
