"""Why a test of the peer fails here: the first rule that fits a failure names its kind.

missing      a name, argument or feature of the peer that adapterzoo does not have
documented   a difference that docs/from-adapters.md or tests/test_peer_defects.py explains
internals    the test looks at what the peer does not document: its layers and their names
skipped      the peer skips the test too, for lack of a feature that is here
environment  the network, a fixture that is not there, what transformers 5 has removed
bug          none of these: ours to mend

A test that fails in several sub-tests is of the kind that comes last in `KINDS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

KINDS = ("skipped", "environment", "internals", "documented", "missing", "bug")


class Rule(NamedTuple):
    """What a failure looks like, and why it fails; patterns are searched for."""

    kind: str
    reason: str
    error: str = ""
    line: str = ""  # of the peer's test
    test: str = ""

    def fits(self, test: str, failure: Mapping[str, str]) -> bool:
        """Whether every pattern is found."""
        texts = ((self.error, failure["error"]), (self.line, failure["line"]), (self.test, test))
        return all(re.search(pattern, text) for pattern, text in texts)


RULES = (
    # --- skipped ---
    Rule(
        "skipped",
        "no heads for the class there; its texts are longer than the model's positions",
        error=r"Sequence length must be less than max_position_embeddings .* 128 and .* 77",
    ),
    Rule(
        "skipped",
        "no heads for the class there",
        error=r"'CLIP\w+' object has no attribute 'add_\w+_head'",
    ),
    # --- environment ---
    Rule(
        "environment",
        "a fixture or data set that is not at hand",
        error=r"NotAtHandError",
    ),
    Rule(
        "environment",
        "the network",
        error=r"HubError: .* may not be asked|OfflineModeIsEnabled|LocalEntryNotFoundError|"
        r"couldn't connect|ConnectionError",
    ),
    Rule(
        "environment",
        "transformers 5 has removed it",
        error=r"ImportError: cannot import name '\w+' from 'transformers|"
        r"has no attribute '(overwrite_output_dir|batch_encode_plus)'|"
        r"'ViTConfig' object has no attribute 'tie_word_embeddings'",
    ),
    Rule(
        "environment",
        "CLIP's …WithProjection have a base model since transformers 5, without the projection",
        line=r"torch\.equal\(output1\[0\], output2\[0\]\)|"
        r"assertEqual\(model_no_params, summary\[-1\]\[.#param.\]\)",
        test=r"test_on_clip/test_\w+withprojection",
    ),
    Rule(
        "environment",
        "a package that is not installed",
        error=r"from 'evaluate'|ModuleNotFoundError",
    ),
    # --- internals ---
    Rule(
        "internals",
        "classes of the peer's layers, which the test looks for among the model's modules",
        error=r"MissingNameError: adapters\.methods\.",
    ),
    Rule(
        "internals",
        "how many modules an adapter consists of",
        line=r"assertEqual\(num_expected_modules, num_found_modules\)",
    ),
    Rule(
        "internals",
        "the words of an error message",
        error=r'AssertionError: ".*" does not match',
    ),
    Rule(
        "internals",
        "an invertible function taken out of its container by hand",
        error=r"del invertible_adapters\[",
    ),
    # --- documented ---
    Rule(
        "documented",
        "quantized weights are merged after `model.dequantize()`",
        error=r"StateError: merge_adapter.* are quantized",
    ),
    Rule(
        "documented",
        "`custom_weights_loaders` are objects; a class of them fails in adapters too",
        error=r"custom_weights_loaders=\[<class .* is not an object with the methods save and load",
    ),
    Rule(
        "documented",
        "low-rank factors of adapters that have none; it fails in adapters too",
        error=r"CompositionError: average_adapter.*'lora_delta_w_svd' .* NormBottleneck",
    ),
    Rule(
        "documented",
        "`adapter_config.json` repeats the tensors' file, and its version is that of the format",
        error=r"'int' object has no attribute 'replace'|has another .* than adapter.safetensors",
    ),
    Rule(
        "documented",
        "a native checkpoint has the head in the adapter's file, so there is no `head_config.json`",
        line=r"head_config\.json",
    ),
    Rule(
        "documented",
        "a fused layer has an adapter for each of its parts",
        error=r"'FusedAdapters' object has no attribute 'delta_w'",
    ),
    Rule(
        "documented",
        "layers of adapters are visited by `model.adapter_modules(name)`",
        error=r"has no attribute 'apply_to_adapter_layers'",
    ),
    # --- missing ---
    Rule(
        "missing",
        "a name that adapterzoo does not have",
        error=r"MissingNameError|<missing adapters\.|a Missing\b",
    ),
    Rule(
        "missing",
        "a method or attribute that adapterzoo's models do not have",
        error=r"AttributeError: (type object )?'\w*(Model|For)\w*' (object )?has no attribute|"
        r"AttributeError: 'AdaptersConfig' object",
    ),
    Rule(
        "missing",
        "the head of a class of transformers, saved natively, does not become a named head",
        error=r"load_head\(.* the checkpoint has the head of a \w+, this model has named heads",
    ),
    Rule(
        "missing",
        "methods of a base model whose whole model was not kept",
        error=r"StateError: base_model\.\w+: the model around it is gone",
    ),
    Rule(
        "missing",
        "a composition of heads as `active_head`",
        line=r"active_head = head_setup|active_head = BatchSplit|active_head, BatchSplit",
    ),
    Rule(
        "missing",
        "an argument or config field that adapterzoo does not have",
        error=r"got an unexpected keyword argument|there is no field",
    ),
)


def explain(test: Mapping[str, Any]) -> Rule:
    """The rule of a failed test's gravest failure; a `bug` where one fits no rule."""
    found = [_first(test["id"], failure) for failure in test["failures"]]
    return max(found, key=lambda rule: KINDS.index(rule.kind))


def _first(test: str, failure: Mapping[str, str]) -> Rule:
    for rule in RULES:
        if rule.fits(test, failure):
            return rule
    error = re.sub(r"/tmp/\w+|0x\w+", "…", failure["error"].split("\n")[0])
    return Rule("bug", error[:160])


def unused(tests: Iterable[Mapping[str, Any]]) -> list[Rule]:
    """Rules that no failure of these tests is explained by."""
    seen = {_first(test["id"], failure) for test in tests for failure in test["failures"]}
    return [rule for rule in RULES if rule not in seen]
