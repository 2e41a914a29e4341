"""Compile every shipped configuration of the Triton kernels for GPUs that are not here.

A script, run in a process of its own because Triton decides at import whether it interprets.
It prints one JSON list, a row for each kernel, configuration and architecture, with what ptxas
made of it. `python tests/kernels/aot.py docs/kernels.md` writes the table of the documentation.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from adapterzoo.kernels import low_rank_triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ARCHITECTURES = (80, 90, 100)
# instructions of the matrix units, by generation
MATRIX = {"HMMA": r"\bmma\.sync", "HGMMA": r"\bwgmma\.mma_async", "TCMMA": r"\btcgen05\.mma"}
# operands: activations, then factors
KINDS = {
    "half": ("*bf16", "*bf16", torch.bfloat16),
    "half, float32 factors": ("*bf16", "*fp32", torch.float32),
    "float32": ("*fp32", "*fp32", torch.float32),
}
ACTIVATIONS = {"x", "y", "dx", "dy", "out"}
FACTORS = {"a", "b", "t", "dt"}
PARTS = {"da", "db"}
NUMBERS = {"scale": "fp32", "scaling": "fp32", "seed": "*i64"}
# numbers that are no multiples of 16
ODD = {"rows", "threshold", "scale", "scaling"}


def low_rank_cases():
    """Kernel, kind, tile and dropout of everything that the default configurations give."""
    tiles = {
        low_rank_triton.shrink_kernel: low_rank_triton.shrink_tile,
        low_rank_triton.shrink_backward_kernel: low_rank_triton.shrink_backward_tile,
        low_rank_triton.expand_kernel: low_rank_triton.expand_tile,
        low_rank_triton.expand_backward_kernel: low_rank_triton.expand_backward_tile,
    }
    shapes = [(rows, rank) for rows in (1, 8192) for rank in (16, 64)]
    for kernel, tile in tiles.items():
        for kind, (_, _, dtype) in KINDS.items():
            for made in dict.fromkeys(tile(rows, rank, dtype) for rows, rank in shapes):
                for drops in (False, True) if "DROPS" in kernel.arg_names else (False,):
                    yield kernel, kind, made, drops


def compiled(kernel, kind, tile, drops, architecture):
    """What ptxas makes of a kernel: one row of the table."""
    activation, factor, _ = KINDS[kind]
    types = {**dict.fromkeys(ACTIVATIONS, activation), **dict.fromkeys(FACTORS, factor)}
    types |= {**dict.fromkeys(PARTS, "*fp32"), **NUMBERS}
    constants = {"ROWS": tile.rows, "COLUMNS": tile.columns, "RANK": tile.rank}
    constants |= {"PRECISION": "tf32x3", "DROPS": drops}
    signature, aligned = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name.isupper():
            signature[name] = "constexpr"
            constants.setdefault(name, True)
        elif name.endswith("_col") or (name == "seed" and not drops):
            # Triton makes a constant of a stride of 1, and of None
            signature[name], constants[name] = "constexpr", None if name == "seed" else 1
        else:
            signature[name] = types.get(name, "i32")
            if name not in ODD:
                aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={k: v for k, v in constants.items() if k in signature},
        attrs=aligned,
    )
    made = triton.compile(
        source,
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": tile.warps, "num_stages": tile.stages},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        tool = [TOOLS / "cuobjdump", "-res-usage", file.name]
        used = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    return {
        "kernel": kernel.fn.__name__.removesuffix("_kernel") + (", dropout" if drops else ""),
        "kind": kind,
        "tile": f"{tile.rows} × {tile.columns} × {tile.rank}, {tile.warps} warps, "
        f"{tile.stages} stages",
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
        f"# What ptxas makes of the Triton kernels, with Triton {triton.__version__}",
        "",
        "Made by `python tests/kernels/aot.py docs/kernels.md`; a test compiles all of it again",
        "and compares. No GPU is needed. *Tile* is rows × features × rank of a program; *spilled*",
        "is bytes of the stack; *shared* is bytes for a program, of which Ampere (sm 80) has",
        "166,912 and Hopper and Blackwell (sm 90, sm 100) 232,448; *matrix* counts instructions of",
        "the matrix unit.",
        "",
        "| kernel | operands | tile | sm | registers | spilled | shared | matrix |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, r.values()))} |" for r in rows), ""])


def main():
    rows = [
        compiled(*case, architecture) for case in low_rank_cases() for architecture in ARCHITECTURES
    ]
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(table(rows), encoding="utf-8")
    json.dump(rows, sys.stdout)


if __name__ == "__main__":
    main()
