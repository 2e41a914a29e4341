"""The table of a run on PEFT and one on adapterzoo: counts by file, with a reason for each failure.

A test counts if PEFT passes it and it is about a method that exists here. What fails then is one of

- *internal*: listed in `internal.md`, without a stand-in here;
- *allowed*: PEFT refuses what works here, and the test asks for the refusal;
- *documented*: refused here by name, with a reason in docs/from-peft.md;
- *words*: only the text of a warning or an error differs;
- *else*: everything that is left, by its error.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = {
    "BOFTConfig", "IA3Config", "LNTuningConfig", "LoHaConfig", "LoKrConfig", "LoraConfig",
    "MissConfig", "OFTConfig", "PrefixTuningConfig", "PromptTuningConfig", "TrainableTokensConfig",
    "VeraConfig", "PeftConfig", "PromptLearningConfig",
}  # fmt: skip

# words in the names of tests of methods that only PEFT has
_ONLY_PEFT = re.compile(
    r"adalora|adamss|adaption_?prompt|arrow|bd-?lora|beft|c3a|cartridge|cpt|deft|delora|fourier|"
    r"frod|gralora|glora|hira|hra|intruder|kasa|lily|lora_?ga|mica|monteclora|"
    r"multitask_prompt|osf|p_?tuning|peanut|poly|prompt_?encoder|psoft|pvera|qalora|rand_?lora|"
    r"riemannian|road|shadow|shira|supertuning|tinylora|unilora|vb_?lora|velora|wave_?ft|xlora",
    re.IGNORECASE,
)

# tests that ask PEFT to refuse what works here → why
_ALLOWED = {
    "adding_multiple_adapters_with_bias_raises": "each adapter has biases of its own",
    "generate_pos_args": "generate takes the prompt by position",
    "mixed_adapter_batches_training_mode_raises": "rows have their adapters in training too",
    "multiple_active_adapters_with_overlapping": "copies of layers are stacked",
    "multiple_active_adapters_with_same": "copies of layers are stacked",
    "test_mixed_adapter_batches[": "rows have their own adapters of parameters",
    "unload_adapter": "prompts and prefixes are unloaded too",
}
# texts of errors, or of names of tests → the difference
_DOCUMENTED = {
    "_lora_conversion_but_no_support": "more methods convert to LoRA",
    "sums patches of the input": "OFT at convolutions, where PEFT merges another function",
    "alora_invocation_tokens": "aLoRA in what does not show the invocation",
    "are quantized. Write model.dequantize": "merging into quantized weights",
    "combines low-rank factors, but a row": "SVDs of rows of tables",
    "corda_config.cache_file": "CorDA takes its data with the config",
    "do more than add theirs": "biases of layers that do more than add them",
    "drops no features of the weight": "dropout where it has no effect in PEFT",
    "ensure_weight_tying=True": "tied adapters",
    "fsdp_wrapped_learnable_bias": "each adapter has biases; the test sets the base model.s",
    "is unused by": "options of weighted adapters that have no effect in PEFT",
    "keys and values": "prefixes in DeBERTa, whose attention takes none",
    "LoRA with DoRA": "the magnitudes of DoRA are in float32 beside half precision",
    "no features to drop": "dropout at an embedding, where it has no effect in PEFT",
    "no layer matches": "names without a layer, also those of a head",
    "of the head too": "layers of a head",
    "takes initial values from batches": "CorDA takes its data with the config",
    "to require gradients, got": "names of parameters",
}
_LACKING = "there is no such method here"
_WORDS = re.compile(
    r"Regex pattern did not match|DID NOT WARN|startswith\(msg\)|msg in str|match=msg|"
    r"recwarn|No warnings of type|<ExceptionInfo|WarningsRecorder"
)


def lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the tests of a run."""
    for line in file.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


def internals() -> set[str]:
    """The tests in `internal.md` that no stand-in lets pass, as `file::name`."""
    found = set()
    text = Path(__file__).with_name("internal.md").read_text(encoding="utf-8")
    for row in re.findall(r"^\| `(test_\w+\.py)` \| `([\w:]+)` \|[^\n]*\|([^|\n]*)\|$", text, re.M):
        if "yes" not in row[2]:
            found.add(f"tests/{row[0]}::{row[1]}")
    return found


def is_of_ours(test: Mapping[str, Any]) -> bool:
    """Whether a test is about methods that exist here."""
    return {*test["methods"]} <= HERE and _ONLY_PEFT.search(test["id"]) is None


def reason(test: Mapping[str, Any], listed: set[str]) -> tuple[str, str]:
    """The class of a failure, and why."""
    # `parameterized` adds a number and the values to the name
    name = test["id"].partition("[")[0]
    if name in listed or re.sub(r"_\d+(_\w+)?$", "", name) in listed:
        return "internal", ""
    failure = (test["failures"] or [{"error": "", "line": ""}])[-1]
    error, line = failure["error"], failure.get("line", "")
    for words, why in _ALLOWED.items():
        if words in test["id"] and "DID NOT RAISE" in error:
            return "allowed", why
    for words, why in _DOCUMENTED.items():
        if words in error or (words in test["id"] and not _WORDS.search(error + line)):
            return "documented", why
    if _WORDS.search(error + line):
        return "words", ""
    first = error.splitlines()[0] if error else ""
    return "else", re.sub(r"0x\w+|(?:/\S*)?/tmp\S*", "…", first)[:150]


def table(theirs: Path, ours: Path) -> str:
    """The report, in Markdown."""
    listed, runs = internals(), {test["id"]: test for test in lines(ours)}
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    why: dict[tuple[str, str], list[str]] = defaultdict(list)
    for test in lines(theirs):
        file = test["id"].partition("::")[0].removeprefix("tests/")
        row = counts[file]
        row[f"PEFT {test['outcome']}"] += 1
        own = runs.get(test["id"])
        if test["outcome"] != "passed" or own is None:
            continue
        if not is_of_ours(test):
            row["only PEFT"] += 1
            continue
        if any(_LACKING in failure["error"] for failure in own["failures"] or ()):
            row["only PEFT"] += 1
            continue
        row["asked"] += 1
        if own["outcome"] == "passed":
            row["passed"] += 1
            continue
        kind, text = reason(own, listed)
        row[kind] += 1
        why[kind, text].append(own["id"])
    columns = "asked", "passed", "internal", "allowed", "documented", "words", "else"
    head = "| file | on PEFT passed, skipped, failed | only PEFT | " + " | ".join(columns) + " |"
    out = [head, "|" + " --- |" * (len(columns) + 3)]
    total: Counter[str] = Counter()
    for file, row in sorted(counts.items()):
        total.update(row)
        out.append(_row(file, row, columns))
    out.append(_row("**all**", total, columns))
    fair = total["asked"] - total["internal"]
    share = 100 * total["passed"] / max(fair, 1)
    out += ["", f"Passed: {total['passed']} of {fair} that are not internal, {share:.1f} %.", ""]
    for (kind, text), ids in sorted(why.items(), key=lambda pair: (pair[0][0], -len(pair[1]))):
        if kind != "internal":
            out.append(f"- *{kind}* {len(ids)}: {text or 'see above'} (`{_short(ids[0])}`)")
    return "\n".join(out) + "\n"


def _row(file: str, row: Mapping[str, int], columns: tuple[str, ...]) -> str:
    runs = ", ".join(str(row.get(f"PEFT {n}", 0)) for n in ("passed", "skipped", "failed"))
    rest = " | ".join(str(row.get(name, 0)) for name in columns)
    return f"| {file} | {runs} | {row.get('only PEFT', 0)} | {rest} |"


def _short(test: str) -> str:
    return test.removeprefix("tests/").partition("[")[0]
