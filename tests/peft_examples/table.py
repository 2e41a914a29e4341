"""Compares what both libraries showed, and writes results.md."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .programs import KINDS, LIBRARIES

HEAD = """# PEFT's documented examples, with PEFT and with the import changed

Written by `python -m peft_examples table`; `tests/peft_examples` says how each row was made. Both
libraries start from the same values, on tiny models, without dropout. Columns with two numbers are
PEFT's and ours. *Losses* are compared step by step, *tokens* are those that were generated,
*outputs* those computed without gradients, and *files* the keys, shapes, values and fields of what
was saved. A page has blocks; the others run to their end, or until what "why not" says. Adapters
whose initial values are parts of the base weights are saved with twice the rank.
"""
SEEN = ("counts", "losses", "tokens", "outputs", "files")
# relative difference of two losses, outputs or values
CLOSE = 2e-3
# TRL and transformers ask for a class of PEFT
_OURS = re.compile(
    r"adapterzoo\.|(ImportError|ModuleNotFoundError): .*adapterzoo|.*an? .*PeftConfig"
)
# fields of adapter_config.json that say nothing about the adapter, or that the tensors' keys say
_PLAIN = {
    "peft_version", "auto_mapping", "base_model_name_or_path", "inference_mode", "task_type",
    "megatron_core", "qalora_group_size", "num_layers", "num_attention_heads", "prompt_tuning_init",
    "prompt_tuning_init_text", "tokenizer_name_or_path", "modules_to_save", "target_modules",
    "feedforward_modules",
}  # fmt: skip


def render(folder: Path) -> str:
    """The page for all runs in a folder."""
    lines = [HEAD]
    for kind in KINDS:
        file = folder / f"{kind}.jsonl"
        if file.is_file():
            lines += ["", *(_pages if kind == "pages" else _programs)(kind, _pairs(file))]
    return "\n".join(lines) + "\n"


def _pairs(file: Path) -> dict[str, list[dict[str, Any]]]:
    """Each program → its line with PEFT, and with ours."""
    found: dict[str, dict[str, Any]] = {}
    for text in file.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        found.setdefault(line["id"], {})[line["library"]] = line
    return {name: [both[each] for each in LIBRARIES] for name, both in found.items()}


def _programs(kind: str, pairs: Mapping[str, Sequence[dict[str, Any]]]) -> Iterator[str]:
    rows = {name: _row(theirs, mine) for name, (theirs, mine) in pairs.items()}
    for name, cells in rows.items():
        if cells[0] != "the same":
            reasons = [*(why for part, why in _WHY.items() if part in name), cells[-1]]
            cells[-1] = "; ".join(filter(None, reasons))
    counts = {word: sum(row[0] == word for row in rows.values()) for word in _WORDS}
    told = ", ".join(f"{number} {word}" for word, number in counts.items() if number)
    yield f"## {kind.capitalize()}: {told}"
    yield ""
    yield "| | outcome | parameters | losses | tokens | outputs | files | why not |"
    yield "| --- " * 8 + "|"
    for name, cells in sorted(rows.items(), key=lambda item: _WORDS.index(item[1][0])):
        yield f"| {name.replace('|', ' ')} | {' | '.join(cells)} |"


# why the libraries differ; docs/from-peft.md says the same
_WHY = {
    "peft_ln_tuning_clm": "all norms of the base model; PEFT has a list of names for BLOOM",
    "peft_ia3_seq2seq": "layers are found by role: `wo`, where PEFT has `wi_1` for mT5",
    "peft_prompt_tuning_seq2seq": "PEFT has rows for the decoder too, which it does not use",
    "seq2seq_with_generate": "PEFT's wrapper does not get the `generation_config` of the trainer",
    "whisper_large_v2": "2 % of 10,360 tokens of a random model in float16",
    "sequence_classification/IA3": "PEFT's `output.dense` matches attention, too",
    "prefix_tuning_seq2seq": "PEFT's prefix has no effect in generate() of transformers 5.24",
    "multilayer_perceptron_lora": "names of parameters have no `base_model.model`",
    "olora_finetuning": "saved as plain LoRA of twice the rank, since the base is not changed",
    "pissa_finetuning": "saved as plain LoRA of twice the rank, since the base is not changed",
    "sequence_classification/VeRA": "it trains parameters whose names are PEFT's, `vera_lambda_b`",
    "sft/train": "TRL wants a config of PEFT; write SFTTrainer(get_peft_model(model, config))",
}


_WORDS = ("the same", "different", "refused", "stopped", "not run")


def _row(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    seen = compare(theirs["seen"], mine["seen"])
    same = not any("≠" in cell for cell in seen)
    first, own = _first(theirs), _first(mine)
    is_refused = own is not None and _OURS.match(own[1]) is not None
    if first is not None and (own is None or (own[0] == first[0] and not is_refused)):
        shown = any(theirs["seen"].values())
        word = ("the same" if same else "different") if shown else "not run"
        return [
            word,
            *seen,
            f"PEFT stops, too: {_told(first)}" if own else f"PEFT stops: {_told(first)}",
        ]
    if own is not None:
        return ["refused" if is_refused else "stopped", *seen, _told(own)]
    shown = any(theirs["seen"].values())
    return [("the same" if same else "different") if shown else "not run", *seen, ""]


def _first(line: Mapping[str, Any]) -> tuple[str, str] | None:
    return next(((key, error[0]) for key, error in line["errors"].items()), None)


def _told(error: tuple[str, str]) -> str:
    # ends of long messages, and folders of one run
    text = error[1].replace("\n", " ")
    text = re.sub(r"(Methods|Names of modules|its names): .*|/tmp/\S*/| ?\(/\S*\)", "", text)
    text = re.sub(r"https?://\S*|HTTPS?Connection.*", "it needs a network", text)
    return text.removeprefix("adapterzoo.errors.").replace("|", "\\|")[:220].strip()


def compare(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """A cell for counts, losses, tokens, outputs and files; one that differs has a "≠"."""
    # a process that was ended has seen nothing
    theirs, mine = ({**dict.fromkeys(SEEN, ()), **each} for each in (theirs, mine))
    counts = [_numbers(each["counts"]) for each in (theirs, mine)]
    return [
        "" if not any(counts) else "=" if counts[0] == counts[1] else f"≠ {counts[0]}, {counts[1]}",
        _close(theirs["losses"], mine["losses"]),
        _equal(theirs["tokens"], mine["tokens"]),
        _close(*([v for _, v in each["outputs"]] for each in (theirs, mine))),
        _files(theirs["files"], mine["files"]),
    ]


def _numbers(lines: Sequence[str]) -> list[str]:
    # of "trainable params: 1,024 || all params: …": PEFT's "all" counts the copy of a head twice
    return [line.partition("||")[0].rpartition(":")[2].strip() for line in lines]


def _close(theirs: Sequence[float], mine: Sequence[float]) -> str:
    if not theirs:
        return ""
    if len(theirs) != len(mine):
        return f"≠ {len(theirs)}, {len(mine)}"
    worst = max(map(_difference, theirs, mine))
    return f"{'=' if worst < CLOSE else '≠'} {len(mine)}, {worst:.0e}"


def _difference(first: float, second: float) -> float:
    if math.isnan(first) or math.isnan(second):
        return 0.0 if math.isnan(first) and math.isnan(second) else math.inf
    return abs(first - second) / max(abs(first), 1e-3)


def _equal(theirs: Sequence[Any], mine: Sequence[Any]) -> str:
    if not theirs:
        return ""
    return f"= {len(mine)}" if theirs == mine else f"≠ {len(theirs)}, {len(mine)}"


def _files(theirs: Sequence[Any], mine: Sequence[Any]) -> str:
    if not theirs and not mine:
        return ""
    if len(theirs) != len(mine):
        return f"≠ {len(theirs)}, {len(mine)}"
    told = [word for a, b in zip(theirs, mine, strict=True) for word in _of_folder(a, b)]
    return "≠ " + ", ".join(dict.fromkeys(told)) if told else f"= {len(mine)}"


def _of_folder(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> Iterator[str]:
    if theirs.keys() != mine.keys():
        yield f"names {sorted(theirs)}, {sorted(mine)}"
    for name in theirs.keys() & mine.keys():
        a, b = theirs[name], mine[name]
        if name.endswith(".json"):
            yield from (
                f"`{key}` {a.get(key)}, {b.get(key)}"
                for key in sorted((a.keys() | b.keys()) - _PLAIN)
                if a.get(key) != b.get(key)
            )
        elif a.keys() != b.keys():
            yield f"{len(a.keys() - b.keys())} keys missing, {len(b.keys() - a.keys())} more"
        elif any(a[key][0] != b[key][0] for key in a):
            yield "shapes"
        elif max((_difference(a[key][1], b[key][1]) for key in a), default=0.0) > 0.02:
            yield "values"


def _pages(kind: str, pairs: Mapping[str, Sequence[dict[str, Any]]]) -> Iterator[str]:
    both = total = 0
    lines = []
    for name, (theirs, mine) in pairs.items():
        failed = [{k: e[0] for k, e in each["errors"].items()} for each in (theirs, mine)]
        ran = theirs["blocks"] - len(failed[0])
        own = {k: text for k, text in failed[1].items() if k not in failed[0]}
        both, total = both + ran - len(own), total + ran
        why = "; ".join(f"block {k}: {_told((k, text))}" for k, text in own.items())
        if not ran:
            continue
        lines.append(f"| {name} | {theirs['blocks']} | {ran} | {ran - len(own)} | {why} |")
    yield f"## Pages: {both} of the {total} blocks that run with PEFT on tiny models run"
    yield ""
    yield "| | blocks | run with PEFT | of these, with adapterzoo | why not |"
    yield "| --- " * 5 + "|"
    yield from lines
