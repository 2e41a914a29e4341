"""Runs the peer's example scripts and notebooks, each in a process of its own, on tiny models.

Only the import changes: `adapters` is adapterzoo, in the mode `strict`. A line of results has the
name, the outcome, and where and why a program stopped, for the rules to explain.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .suite import environment


class Script(NamedTuple):
    """An example script with its arguments; `{data}` is the folder of the peer's samples."""

    path: str
    model: str
    arguments: str


_TRAIN = (
    "--do_train --do_eval --train_adapter --per_device_train_batch_size 2 --max_steps 2 "
    "--learning_rate 5e-4 --seed 42 --use_cpu --report_to none --output_dir {out} "
)
_BN = "--adapter_config double_seq_bn[reduction_factor=8] "
_FILES = "--train_file {data}/%s --validation_file {data}/%s "


def _files(name: str) -> str:
    return _FILES % (name, name)


SCRIPTS = {
    "glue": Script("text-classification/run_glue.py", "bert", _TRAIN + _BN + "--max_seq_length 64 "
                   "--train_file {data}/MRPC/train.csv --validation_file {data}/MRPC/dev.csv"),
    "fusion": Script("adapterfusion/run_fusion_glue.py", "bert", _TRAIN + "--max_seq_length 64 "
                     "--task_name mrpc --data_dir {data}/MRPC"),
    "qa": Script("question-answering/run_qa.py", "bert", _TRAIN + _BN + _files("SQUAD/sample.json")
                 + "--version_2_with_negative"),
    "seq2seq_qa": Script("question-answering/run_seq2seq_qa.py", "t5", _TRAIN + _BN +
                         _files("SQUAD/sample.json") + "--predict_with_generate "
                         "--context_column context --question_column question "
                         "--answer_column answers"),
    "summarization": Script("summarization/run_summarization.py", "bart", _TRAIN + _BN +
                            _files("xsum/sample.json") + "--predict_with_generate "
                            "--max_target_length 16"),
    "translation": Script("translation/run_translation.py", "bart", _TRAIN + _BN +
                          _files("wmt16/sample.json") + "--predict_with_generate "
                          "--max_target_length 16 --source_lang en --target_lang ro"),
    "clm": Script("language-modeling/run_clm.py", "gpt2", _TRAIN + _BN + "--block_size 64 "
                  "--train_file {data}/../sample_text.txt "
                  "--validation_file {data}/../sample_text.txt"),
    "mlm": Script("language-modeling/run_mlm.py", "roberta", _TRAIN + _BN + "--max_seq_length 64 "
                  "--train_file {data}/../sample_text.txt "
                  "--validation_file {data}/../sample_text.txt"),
    "ner": Script("token-classification/run_ner.py", "bert", _TRAIN + _BN +
                  _files("conll/sample.json")),
    "swag": Script("multiple-choice/run_swag.py", "bert", _TRAIN + _BN +
                   _files("swag/sample.json")),
    "udp": Script("dependency-parsing/run_udp.py", "bert", _TRAIN + "--task_name en_ewt "
                  "--evaluate_on train"),
    "adapterdrop": Script("adapterdrop/drop_at_inference.py", "", ""),
    "generation": Script("text-generation/run_generation.py", "gpt2", "--model_type gpt2 "
                         "--prompt Hello --length 4 --seed 42"),
}  # fmt: skip


def run(peer: Path, what: str, results: Path, names: Iterable[str], seconds: int) -> None:
    """Write a line for each program: `what` is "scripts" or "notebooks".

    Args:
        peer: a checkout of adapters.
        what: which programs.
        results: the file to write.
        names: of the programs, all if empty.
        seconds: after which a program is ended.
    """
    results.parent.mkdir(parents=True, exist_ok=True)
    known = list(SCRIPTS) if what == "scripts" else _notebooks(peer)
    with results.open("w", encoding="utf-8") as file:
        for name in names or known:
            file.write(json.dumps(_run_one(peer.resolve(), what, name, seconds)) + "\n")
            file.flush()


def _notebooks(peer: Path) -> list[str]:
    return sorted(path.stem for path in (peer / "notebooks").glob("*.ipynb"))


def _run_one(peer: Path, what: str, name: str, seconds: int) -> dict[str, Any]:
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "tests").symlink_to(peer / "tests")
        command = [sys.executable, "-m", "peer.programs", str(peer), what, name, scratch]
        outcome = Path(scratch, "outcome.json")
        try:
            done = subprocess.run(
                command, cwd=scratch, env=environment("strict"), timeout=seconds, check=False,
                capture_output=True, text=True,
            )  # fmt: skip
            said = done.stderr.strip().split("\n")[-1]
        except subprocess.TimeoutExpired:
            said = f"TimeoutExpired: after {seconds} s"
        failures = [_failure(said, "", "")]
        if outcome.exists():
            failures = json.loads(outcome.read_text(encoding="utf-8"))
    return {
        "id": f"{what}::{name}",
        "outcome": "failed" if failures else "passed",
        "seconds": round(time.monotonic() - start, 1),
        "failures": failures,
    }


def _failure(error: str, line: str, frames: str) -> dict[str, str]:
    return {"subtest": "", "when": "call", "error": error, "line": line, "frames": frames}


# --- in the process of a program ---


def _main(peer: Path, what: str, name: str, scratch: Path) -> None:
    from . import offline, removed, shim, tiny

    shim.install("strict")
    fixtures = peer / "tests" / "fixtures"
    hub = tiny.Hub(fixtures / "SiBERT" / "vocab.txt", Path(tempfile.mkdtemp(dir=scratch)))
    offline.install(fixtures)
    removed.install(hub)
    failures: list[dict[str, str]] = []
    try:
        if what == "scripts":
            _script(peer, SCRIPTS[name], hub, scratch)
        else:
            _cells(peer / "notebooks" / f"{name}.ipynb")
    except BaseException as error:  # noqa: BLE001  a program may also exit
        if not (isinstance(error, SystemExit) and not error.code):
            failures.append(_described(error, peer))
    (scratch / "outcome.json").write_text(json.dumps(failures), encoding="utf-8")


def _script(peer: Path, script: Script, hub: Any, scratch: Path) -> None:
    path = peer / "examples" / "pytorch" / script.path
    given = script.arguments.format(data=peer / "tests/fixtures/samples", out=scratch / "out")
    model = ["--model_name_or_path", str(hub.model(script.model))] if script.model else []
    sys.argv = [str(path), *model, *given.split()]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


def _cells(path: Path) -> None:
    """Run the code cells of a notebook, without shell commands, in one namespace."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, source in enumerate(_sources(notebook)):
        exec(compile(source, f"{path.stem}, cell {number}", "exec"), names)


def _sources(notebook: dict[str, Any]) -> Iterator[str]:
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            lines = "".join(cell["source"]).split("\n")
            yield "\n".join("" if line.lstrip().startswith(("!", "%")) else line for line in lines)


def _described(error: BaseException, peer: Path) -> dict[str, str]:
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{Path(f.filename).name}:{f.lineno}" for f in frames]
    own = [f for f in frames if f.filename.startswith(str(peer)) or ", cell " in f.filename]
    line = f"{own[-1].filename.rpartition('/')[2]}:{own[-1].lineno} {own[-1].line}" if own else ""
    kind = type(error)
    text = f"{kind.__module__}.{kind.__qualname__}: {error}".removeprefix("builtins.")
    return _failure(text[:1200], line, " < ".join(reversed(places))[:600])


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))
