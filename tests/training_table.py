"""The table of `docs/training-matrix.md`: trainer × method × base × engine.

`make training` runs every cell and writes the page; `test_training_table.py` runs a part and
compares. A cell says `right`, or which of `WAYS` is not:

- train: after four steps all processes have equal bits, and the adapter is that of one process
  with the whole batch;
- save: the adapter's files have the same names, keys, shapes, dtypes and config as those of one
  process;
- checkpoint: it has the adapters and nothing of the base model;
- resume: training from the second step ends with the same bits as training without a stop;
- elsewhere: resumed by another number of processes, it ends with the adapter of one process.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
import training_rank
from ranks import TESTS, ended, forked
from safetensors.torch import load_file
from training_rank import BASES, ENGINES, IN_FLOAT32, METHODS, OF_FLOAT32, STOP, TRAINERS

PAGE = TESTS.parent / "docs" / "training-matrix.md"
MARK = "<!-- `make training` writes what follows -->"
WAYS = ("train", "save", "checkpoint", "resume", "elsewhere")
RIGHT, REFUSED, WRONG, NONE = "right", "refused", "wrong", "–"
ONE = "1 process"
# of the run, and of the one that resumes elsewhere
PROCESSES = dict.fromkeys(ENGINES, (2, 4)) | {ONE: (1, 0), "HSDP": (4, 2)}
# float64, and float32; four steps move the adapters by more than 1e-2
BOUNDS = {torch.float64: 1e-9, torch.float32: 2e-4}
# of bfloat16, of autocast or of parameters that TRL rounds; still less than the adapters move
COARSE = 2e-3
# methods to which it matters how the base is stored and computes
AT_LAYERS = ("lora", "dora")
# trainers that compute the loss the plain way
PLAIN = ("Trainer", "AdapterTrainer")
Cells = dict[tuple[str, str], str]
"""By case and engine."""


def cases() -> list[str]:
    """`trainer/method/base`, in the order of the page."""
    return [
        f"{t}/{m}/{b}"
        for t in TRAINERS
        for m in METHODS
        for b in BASES
        if b == "float" or (m in AT_LAYERS and (b == "4-bit" or t in PLAIN))
    ]


# --- runs ---


def launched(
    world: int, engine: str, folder: Path, way: str, chosen: list[str], seconds: float = 3000
) -> dict[str, str]:
    """Run cases in some processes; return what the first says of each."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / way
    codes = ended(forked(world, training_rank.main, log, engine, folder, way, chosen), seconds)
    said = [Path(f"{log} {rank}").read_text() for rank in range(world)]
    if any(codes):
        raise RuntimeError("\n".join(text[-2000:] for text in said))
    lines = [line.split(" ", 2)[1:] for line in said[0].splitlines() if line[:5] == "case "]
    return {case: text for case, text in lines}  # noqa: C416  lists of two


def run(engine: str, chosen: Iterable[str], folder: Path) -> dict[tuple[str, str], str]:
    """Train cases with an engine, and resume elsewhere; return what the processes say."""
    chosen, (world, other) = [*chosen], PROCESSES[engine]
    first = launched(world, engine, folder, "train", chosen)
    said = {("train", case): text for case, text in first.items()}
    if other:
        again = launched(other, engine, folder, "resume", chosen)
        said |= {("elsewhere", case): text for case, text in again.items()}
    return said


# --- what the files show ---


def same(folder: Path, reference: Path, bound: float) -> bool:
    """Whether the tensors of two folders are equal within a bound."""
    mine, theirs = (load_file(each / "adapter.safetensors") for each in (folder, reference))
    return mine.keys() == theirs.keys() and all(
        torch.allclose(mine[key].double(), tensor.double(), rtol=0, atol=bound)
        for key, tensor in theirs.items()
    )


def same_files(folder: Path, reference: Path, same_dtype: bool) -> bool:
    """Whether two folders have the files, keys, shapes, dtypes and config of each other."""
    names = [{file.name for file in each.iterdir()} for each in (folder, reference)]
    tensors = [load_file(each / "adapter.safetensors") for each in (folder, reference)]
    shapes = [{k: (t.shape, same_dtype and t.dtype) for k, t in each.items()} for each in tensors]
    configs = [
        json.loads((each / "adapter_config.json").read_text()) for each in (folder, reference)
    ]
    for config in configs:
        # each run reads its base from its own folder
        config.pop("model_name", None)
        if not same_dtype:
            # a sample of the base model's weights, and the model's own dtype
            config.pop("base", None)
    return all(pair[0] == pair[1] for pair in (names, shapes, configs))


def without_base(checkpoint: Path) -> bool:
    """Whether a checkpoint has the adapter, and no weights of the base model."""
    large = [*checkpoint.glob("model*"), *checkpoint.glob("pytorch_model*")]
    states = (
        torch.load(f, weights_only=False)["module"] for f in checkpoint.glob("*/*model_states.pt")
    )
    keys = [key for state in states for key in state or ()]
    is_own = re.compile(r"adapter|lora|heads\.|prefix|reft|ia3")
    return (
        (checkpoint / "a" / "adapter.safetensors").is_file()
        and not large
        and all(is_own.search(key) for key in keys)
    )


def cell(engine: str, case: str, folder: Path, one: Path, said: dict[tuple[str, str], str]) -> str:
    """What a case did with an engine, of which `said` has the words and `folder` the files."""
    base = case.split("/")[2]
    text = said["train", case]
    if text != "done":
        return judged(text)
    in_float32 = engine in IN_FLOAT32 or base in OF_FLOAT32
    bound = BOUNDS[torch.float32 if in_float32 else torch.float64]
    at, reference = folder / case, one / case / "whole"
    stored = {t.dtype for t in load_file(reference / "adapter.safetensors").values()}
    if base == "autocast" or torch.bfloat16 in stored:
        bound = COARSE
    right = {
        "train": same(at / "whole", reference, bound),
        "save": same_files(at / "whole", reference, engine not in IN_FLOAT32),
        "checkpoint": without_base(at / "trainer" / f"checkpoint-{STOP}"),
        "resume": same(at / "resumed", at / "whole", 0.0),
    }
    found = {way: RIGHT if is_right else WRONG for way, is_right in right.items()}
    if (text := said.get(("elsewhere", case))) is not None:
        found["elsewhere"] = judged(text)
        if text == "done" and not same(at / "elsewhere", reference, bound):
            found["elsewhere"] = WRONG
    kinds: dict[str, list[str]] = {}
    for way, kind in found.items():
        kinds.setdefault(kind, []).append(way)
    kinds.pop(RIGHT, None)
    return "; ".join([RIGHT, *(f"{kind}: {', '.join(ways)}" for kind, ways in kinds.items())])


# errors of a host that occur without adapters too
HOSTS = re.compile(
    "uniform original parameter dtype|Params4bit"
    # accelerate has no other way for a base that is offloaded
    "|train a model that has been loaded with `device_map='auto'` in any distributed mode"
    # DeepSpeed cannot read what another number of processes wrote
    "|DP world size|RuntimeError: The size of tensor a .* must match the size of tensor b"
)


def judged(text: str) -> str:
    """`refused` for an error of ours that says what to write, `–` for a limit of the host."""
    if text == "done":
        return RIGHT
    if re.match(r"(\w+Error): .*Write ", text):
        return REFUSED
    return NONE if HOSTS.search(text) else WRONG


# --- the page ---


def render(found: Cells) -> str:
    """The page."""
    start, mark, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    if not mark:
        raise RuntimeError("the text of the page stands above the table")
    lines = [["trainer", "method", "base", *ENGINES], ["---"] * (3 + len(ENGINES))]
    for case in dict.fromkeys(case for case, _ in found):
        trainer, method, base = case.split("/")
        cells = [found.get((case, engine), " ") for engine in ENGINES]
        lines.append([f"`{trainer}`", f"`{method}`", base, *cells])
    return f"{start}{MARK}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def read(page: str) -> Cells:
    """The cells of a page."""
    rows = [line[2:-2].split(" | ") for line in page.partition(MARK)[2].splitlines() if line]
    found: Cells = {}
    for trainer, method, base, *cells in rows[2:]:
        case = f"{trainer.strip('`')}/{method.strip('`')}/{base}"
        found |= {(case, e): text for e, text in zip(ENGINES, cells, strict=True) if text.strip()}
    return found


def installed(engine: str) -> bool:
    """Whether the package of an engine is there."""
    return "deepspeed" not in ENGINES[engine] or importlib.util.find_spec("deepspeed") is not None


def main(asked: list[str]) -> int:
    """Run the named engines, trainers, methods and bases, of each kind all if none is named.

    Returns 1 if a cell is wrong; with `--check`, which writes nothing, if it is another one.
    """
    engines = [each for each in asked if each in ENGINES] or [*filter(installed, ENGINES)]
    chosen = [
        case
        for case in cases()
        for trainer, method, base in [case.split("/")]
        if not {*TRAINERS} & {*asked} or trainer in asked
        if not {*METHODS} & {*asked} or method in asked
        if not {*BASES} & {*asked} or base in asked
    ]
    page = read(PAGE.read_text(encoding="utf-8"))
    known, why = dict(page), []
    with tempfile.TemporaryDirectory() as folder:
        at = {engine: Path(folder) / re.sub(r"\W", "", engine) for engine in ENGINES}
        for engine in dict.fromkeys([ONE, *engines]):
            said = run(engine, chosen, at[engine])
            for case in chosen:
                known[case, engine] = cell(engine, case, at[engine], at[ONE], said)
            why += [f"{engine} {at}: {text}\n" for at, text in said.items() if text != "done"]
            if "--check" not in asked:
                order = ((c, e) for c in cases() for e in ENGINES)
                PAGE.write_text(render({key: known[key] for key in order if key in known}), "utf-8")
    sys.stderr.write("".join(why))
    if "--check" in asked:
        return known != page
    return any(WRONG in text for text in known.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
