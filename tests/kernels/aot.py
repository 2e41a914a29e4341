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
import math
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
    low_rank_triton,
    row_norm_triton,
)

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
ARCHITECTURES = (80, 90, 100)
# those whose programs may use 101,376 bytes of shared memory
SMALL = (86, 89, 120)
# resources of a multiprocessor: shared memory, warps and programs that it holds; then the bytes
# that its share of the GPU's bandwidth brings in 800 ns, which must be on their way at all times
# (Little's law): A100, H200, B200, RTX 3090, RTX 4090, RTX 5090
HOLDS = {
    80: (167_936, 64, 32, 2.04e12 / 108),
    90: (233_472, 64, 32, 4.8e12 / 132),
    100: (233_472, 64, 32, 8.0e12 / 148),
    86: (102_400, 48, 16, 0.936e12 / 82),
    89: (102_400, 48, 24, 1.008e12 / 128),
    120: (102_400, 48, 24, 1.792e12 / 170),
}
LITTLE = {sm: int(per_second * 800e-9) for sm, (*_, per_second) in HOLDS.items()}
# programs of a kernel that loops, for each multiprocessor: `tiles_triton` asks for 512
LAUNCHED = 3
# instructions of the matrix units, by generation
MATRIX = {"HMMA": r"\bmma\.sync", "HGMMA": r"\bwgmma\.mma_async", "TCMMA": r"\btcgen05\.mma"}
# operands: activations, then factors
KINDS = {
    "half": ("*bf16", "*bf16", torch.bfloat16),
    "half, float32 factors": ("*bf16", "*fp32", torch.float32),
    "float32": ("*fp32", "*fp32", torch.float32),
}
# operands that are all float32 are left to torch, except weights
HALF = {kind: of for kind, of in KINDS.items() if kind != "float32"}
ACTIVATIONS = {"x", "other", "y", "dx", "dy", "out", "of_y", "bias", "dbias", "w", "to"}
FACTORS = {"a", "b", "t", "dt", "db", "down", "down_bias", "up", "up_bias", "h"}
WIDE = {"gain", "dgain", "of_t", "of_b", "dots", "sums", "gram", "norm", "blocks"}
WIDE |= {"scales", "m", "inverse", "parameters", "factors", "whole", "grad", "dR"}
NUMBERS = {"scale": "fp32", "scaling": "fp32", "least": "fp32", "seed": "*i64", "plan": "*i32"}
NUMBERS |= {"dropped": "*i1"}
# of a batch with one adapter
ALONE = ("plan", "scales")


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
        transposed: operands whose columns, not rows, are contiguous.
    """

    kernel: Any
    kind: str
    tile: Any
    label: str = ""
    constants: dict[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    transposed: tuple[str, ...] = ()

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
    shrink, outer = low_rank_triton.shrink_kernel, low_rank_triton.outer_kernel
    tile = fitting(low_rank_triton.chunk_tile, small)
    for kind, (_, _, dtype) in HALF.items():
        for made in dict.fromkeys(tile(n, rank, dtype) for n in (16, 64) for rank in (16, 64)):
            yield Case(shrink, kind, made, "", {}, ("seed", *ALONE))
            yield Case(shrink, kind, made, ", dropout", {}, ALONE)
        for made in dict.fromkeys(low_rank_triton.outer_tile(rank, dtype) for rank in (16, 64)):
            yield Case(outer, kind, made, ", dropout", {}, ALONE, ("sums",))


def compose_cases(small=False):
    """DoRA's composition at each rank, LoRA's, which has no gain, and BOFT's, without an update.

    Without a sum it is the gradient of an x with dropout, without all else dropout itself.
    """
    forward, backward = compose_triton.compose_kernel, compose_triton.compose_backward_kernel
    tile, last = fitting(compose_triton.compose_tile, small), compose_triton.finish_kernel
    none, plain = ("gain", "bias"), ("seed", *ALONE)
    few = {"NEEDS_Y": False, "NEEDS_DOTS": False}
    for kind, (_, _, dtype) in HALF.items():
        wide = {"WIDE": dtype is torch.float32}
        for made in dict.fromkeys(
            tile(n, rank, dtype) for n in (1, 8192) for rank in (16, 64, 128)
        ):
            yield Case(forward, kind, made, "", wide, plain)
            yield Case(forward, kind, made, ", no gain", wide, (*none, *plain))
            yield Case(forward, kind, made, ", dropout", wide, ("y", *none, *ALONE), ("b",))
        shapes = [(n, rank, dtype) for n in (1, 8192) for rank in (16, 32)]
        for made in dict.fromkeys(compose_triton.compose_backward_tile(*s) for s in shapes):
            yield Case(backward, kind, made, "", wide)
        for made in dict.fromkeys(compose_triton.compose_backward_tile(*s, True) for s in shapes):
            yield Case(backward, kind, made, ", no gain", {**wide, **few}, none)
        for alone, label in ((False, ", frozen b"), (True, ", no gain, frozen b")):
            without = {**wide, "NEEDS_B": False, **(few if alone else {})}
            for made in dict.fromkeys(
                compose_triton.compose_backward_tile(*s, alone, needs_b=False) for s in shapes
            ):
                yield Case(backward, kind, made, label, without, none if alone else ())
        for made in dict.fromkeys(compose_triton.finish_tile(rank) for rank in (16, 32, 64)):
            yield Case(last, kind, made, "", {"NUMBERS": compose_triton._NUMBERS, "TELLS": False})
    flags = {"NEEDS_T": False, "NEEDS_B": False, "WIDE": False, "NUMBERS": 1, "HIDDEN": False}
    for kernel, made, missing in (
        (forward, tile(8192, 0, torch.float16), plain),
        (backward, compose_triton.compose_backward_tile(1, 0, torch.float16), ()),
        (backward, compose_triton.compose_backward_tile(8192, 0, torch.float16), ()),
        (last, compose_triton.finish_tile(0), ()),
    ):
        yield Case(kernel, "half", made, ", no update", flags, ("t", "b", *missing))
    made = tile(8192, 0, torch.float16)
    yield Case(forward, "half", made, ", dropout, no update", flags, ("t", "b", *none, *ALONE))


def row_norm_cases(small=False):
    """DoRA's norms, with the products inside and, for a wide rank, without."""
    kernel, tile = row_norm_triton.row_norm_kernel, row_norm_triton.row_norm_tile
    for kind, (_, _, dtype) in KINDS.items():
        wide = {"WIDE": dtype is torch.float32}
        for rank in (16, 64):
            for made in dict.fromkeys(
                fitting(tile, small)(rows, rank, dtype) for rows in (4096, 14336)
            ):
                yield Case(kernel, kind, made, "", wide, ("dots", "m", "inverse"))
                yield Case(kernel, kind, made, ", gain", wide, ("dots",))
        for made in dict.fromkeys(fitting(tile, small)(rows, 384, dtype) for rows in (4096, 14336)):
            yield Case(kernel, kind, made, ", wide rank", wide, ("gram",))


def rotate_cases(small=False):
    """BOFT's rotations, at every width that tiles have: forward, backward."""
    kernel, tile = butterfly_triton.rotate_kernel, butterfly_triton.rotate_tile
    for label, missing in (("", ("other", "sums")), (", sums", ())):
        widths = (64, 128)
        if small and not missing:
            widths = [w for w in widths if w <= butterfly_triton._WIDEST_SMALL]
        for width in widths:
            for made in dict.fromkeys(tile(rows, width, not missing) for rows in (1, 8192)):
                alone = {"ALONE": True}
                yield Case(kernel, "half, float32 factors", made, label, alone, missing)
                if width <= 64:
                    of = f"{label}, narrow"
                    yield Case(kernel, "half, float32 factors", made, of, {"ALONE": False}, missing)


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
            yield Case(kernel, "float32", tile, label, sizes, ("dropped",))
            if b == 8:
                yield Case(kernel, "float32", tile, f"{label}, dropout", sizes)


def bottleneck_cases(small=False):
    """Bottlenecks of every padded width with the longest activation, the others at one of them."""
    kernel, tile = bottleneck_triton.bottleneck_kernel, bottleneck_triton.bottleneck_tile
    for kind, (_, _, dtype) in HALF.items():
        widths = (16, 64) if dtype is torch.float32 else (16, 64, 128, 256)
        for made in dict.fromkeys(tile(n, width, dtype) for width in widths for n in (1, 8192)):
            yield Case(kernel, kind, made, ", gelu", {"PHI": "gelu"})
    made = tile(8192, 64, torch.bfloat16)
    for name in ("relu", "tanh", "gelu_tanh"):
        yield Case(kernel, "half", made, f", {name}", {"PHI": name})
    for kind, (_, _, dtype) in HALF.items():
        for made in dict.fromkeys(
            compose_triton.compose_tile(8192, w, dtype, small) for w in (16, 64, 128)
        ):
            yield Case(
                compose_triton.compose_kernel, kind, made, ", b in columns",
                {"WIDE": dtype is torch.float32}, ("gain", "bias", "seed", *ALONE), ("b",),
            )  # fmt: skip


def grouped_cases(small=False):
    """Mixed batches: each product as a forward and as a backward takes it."""
    shrink, outer = low_rank_triton.shrink_kernel, low_rank_triton.outer_kernel
    expand = compose_triton.compose_kernel
    for kind, (_, _, dtype) in HALF.items():
        wide = {"WIDE": dtype is torch.float32}
        shapes = [(rows, rank, dtype) for rows in (16, 64) for rank in (16, 64)]
        tile = fitting(low_rank_triton.chunk_tile, small)
        for made in dict.fromkeys(tile(*shape) for shape in shapes):
            yield Case(shrink, kind, made, ", mixed", {}, ("scales", "seed"))
            yield Case(shrink, kind, made, ", mixed, dropout", {}, ("scales",))
            yield Case(shrink, kind, made, ", mixed, scaled", {}, ("seed",), ("a",))
        tile, none = fitting(compose_triton.update_tile, small), ("gain", "bias")
        for made in dict.fromkeys(tile(*shape) for shape in shapes):
            yield Case(expand, kind, made, ", mixed", wide, (*none, "seed"))
            dropped = ("y", *none, "scales")
            yield Case(expand, kind, made, ", mixed, dropout", wide, dropped, ("b",))
        for made in dict.fromkeys(
            low_rank_triton.outer_tile(*shape[1:], mixed=True) for shape in shapes
        ):
            yield Case(outer, kind, made, ", mixed, dropout", {}, ("scales",), ("sums",))
            yield Case(outer, kind, made, ", mixed, scaled", {}, ("seed",))


def made_for(case, architecture, ones=False):
    """The compiled kernel; with `ones` that of a call whose integers are all 1."""
    kernel, tile, missing = case.kernel, case.tile, case.missing
    # Triton makes a constant of an integer that is 1, and uses multiples of 16, but not of these
    general = {p.name for p in kernel.params if p.do_not_specialize}
    activation, factor, _ = KINDS[case.kind]
    types = {**dict.fromkeys(ACTIVATIONS, activation), **dict.fromkeys(FACTORS, factor)}
    types |= {**dict.fromkeys(WIDE, "*fp32"), **NUMBERS}
    constants = {"ROWS": tile.rows, "COLUMNS": tile.columns, "RANK": tile.rank}
    constants |= {"STAGES": tile.stages}
    constants |= {"PRECISION": "tf32x3", **case.constants}
    signature, aligned = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name.isupper():
            signature[name] = "constexpr"
            constants.setdefault(name, True)
        elif name.endswith("_row" if name[:-4] in case.transposed else "_col") or name in missing:
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


def exposed(ptx):
    """How often a warp group may overwrite what another one still multiplies.

    A wait that leaves products of matrix units running says nothing of those of the other warp
    groups: an asynchronous copy that follows needs a barrier before it.
    """
    lines = [line.strip() for line in ptx.splitlines()]
    labels = {line[:-1]: i for i, line in enumerate(lines) if re.match(r"\$\w+:$", line)}
    found = 0
    for start, line in enumerate(lines):
        if not re.search(r"wgmma\.wait_group\S* [1-9]", line):
            continue
        todo, seen, copies = [start + 1], set(), False
        while todo:
            i = todo.pop()
            while i not in seen and i < len(lines) and "bar.sync" not in lines[i]:
                seen.add(i)
                copies = copies or ("cp.async.c" in lines[i] and "shared" in lines[i])
                if to := re.search(r"\bbra\S*\s+(\$\w+)", lines[i]):
                    todo.append(labels[to[1]])
                    # a branch without a condition
                    if not lines[i].startswith("@"):
                        break
                i += 1
        found += copies
    return found


@dataclass
class Reads:
    """How a kernel reads global memory, from its code in Triton's GPU dialect.

    Attributes:
        copies: asynchronous copies inside loops.
        waiting: loads of tiles inside loops that the program waits for.
        buffers: the least number of tiles that a loop keeps of an operand; 0 without such a loop.
        ahead: bytes that a loop asks for before it begins, the least of all loops.
        alone: bytes of tiles that are loaded outside loops.
    """

    copies: int
    waiting: int
    buffers: int
    ahead: int
    alone: int


def bytes_of(shape):
    """Of a tile, from "128x32xbf16"."""
    *sizes, kind = shape.split("x")
    return math.prod(map(int, sizes)) * int(re.search(r"\d+", kind)[0]) // 8


def reads(ir, repeats=False):
    """What the code does.

    Args:
        ir: in Triton's GPU dialect.
        repeats: whether branches are rarely taken, and left out.
    """
    copies = waiting = alone = 0
    # of each loop: buffers of its operands, and bytes that are asked for before it begins
    loops, pending, asked = [], [], 0
    # how far the loops and branches that are open are indented
    depths, rare = [], []
    for line in ir.splitlines():
        depth = len(line) - len(line.lstrip())
        if line.strip().startswith("}"):
            for opened in (depths, rare):
                if opened and depth == opened[-1] and "else" not in line:
                    opened.pop()
        if "scf.if" in line and repeats:
            rare.append(depth)
        if rare:
            continue
        # its loads would not be made in each step
        assert not (depths and "scf.if" in line)
        if found := re.search(r"local_alloc : \(\) -> !ttg.memdesc<(\d+)x([^,]*),", line):
            pending.append((int(found[1]), bytes_of(found[2])))
        if "async_copy_global_to_local" in line:
            copies += bool(depths)
            asked += bytes_of(re.search(r"-> <([^,]*),", line)[1])
        tile = re.search(r"tt\.load .*: tensor<(\d+x\d+x)!tt\.ptr<(\w+)>", line)
        if tile and depths:
            waiting += 1
        elif tile:
            alone += bytes_of(tile[1] + tile[2])
        if "scf.for" in line:
            depths.append(depth)
            if pending:
                loops.append((max(pending, key=lambda each: each[1])[0], asked))
            pending, asked = [], 0
    buffers, ahead = zip(*loops, strict=True) if loops else ((0,), (0,))
    return Reads(copies, waiting, min(buffers), min(ahead), alone)


def resident(made, registers, warps, architecture):
    """How many programs a multiprocessor holds at a time."""
    shared, most_warps, most, _ = HOLDS[architecture]
    per_warp = -(-registers // 8) * 8 * 32
    of_registers = 65_536 // (per_warp * warps)
    return min(of_registers, shared // (made.metadata.shared + 1024), most_warps // warps, most)


def compiled(case, architecture):
    """What ptxas makes of a kernel: one row of the table."""
    made, tile = made_for(case, architecture), case.tile
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        tool = [TOOLS / "cuobjdump", "-res-usage", file.name]
        used = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    registers = int(re.search(r"\bREG:(\d+)", used)[1])
    # it sums a row again if the update cancels most of it
    read = reads(made.asm["ttgir"], repeats=case.name.startswith("row_norm"))
    programs = resident(made, registers, tile.warps, architecture)
    # a kernel that loops over its large operand has few programs, others have many
    flying = min(programs, LAUNCHED) * read.ahead
    if "STAGES" not in case.kernel.arg_names:
        flying = max(flying, programs * read.alone)
    return {
        "kernel": case.name,
        "kind": case.kind,
        "tile": f"{tile.rows} × {tile.columns}{f' × {tile.rank}' if tile.rank else ''}, "
        f"{tile.warps} warps, {tile.stages} stages",
        "sm": architecture,
        "registers": registers,
        "spilled": int(re.search(r"\bSTACK:(\d+)", used)[1]),
        "shared": made.metadata.shared,
        "matrix": " ".join(
            f"{n} {name}"
            for name, pattern in MATRIX.items()
            if (n := len(re.findall(pattern, made.asm["ptx"])))
        ),
        "copies": read.copies,
        "waiting": read.waiting,
        "buffers": read.buffers,
        "in flight": flying,
        "exposed": exposed(made.asm["ptx"]) if tile.warps > 4 else 0,
    }


COLUMNS = (
    *("kernel", "operands", "tile", "sm", "registers", "spilled", "shared", "matrix", "copies"),
    *("waiting", "buffers", "in flight"),
)


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
        "matrix unit. *Copies* counts asynchronous copies inside loops, *waiting* the loads there",
        "that the program waits for; *buffers* is how many tiles of an operand a loop keeps.",
        "*In flight* is bytes on their way to a multiprocessor: what a loop asks for before it",
        "begins × resident programs; loops of rarely taken branches do not count. To keep the",
        "memory busy for 800 ns, Little's law asks for",
        ", ".join(f"{LITTLE[sm]:,} (sm {sm})" for sm in LITTLE) + ".",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{' --- |' * len(COLUMNS)}",
    ]
    return "\n".join([*lines, *map(shown, rows), ""])


def shown(row):
    """A row of the page; what all kernels must be is not there."""
    return f"| {' | '.join(str(v) for name, v in row.items() if name != 'exposed')} |"


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


def rows_of(name, only=None):
    """The rows of one operator, or of one operator on one architecture."""
    return [
        compiled(case, architecture)
        for small, architectures in ((False, ARCHITECTURES), (True, SMALL))
        for case in CASES[name](small)
        for architecture in architectures
        if only in (None, architecture)
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
        asked, *only = sys.argv[1:]
        answers = {"ones": ones, "version": lambda: triton.__version__}
        rows = answers[asked]() if asked in answers else rows_of(asked, *map(int, only))
        json.dump(rows, sys.stdout)
    else:
        PAGE.write_text(table([row for name in CASES for row in rows_of(name)]), encoding="utf-8")


if __name__ == "__main__":
    main()
