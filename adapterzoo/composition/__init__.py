"""Composition: how several adapters act together. Data, rules, a compiler and one evaluator.

Semantics: https://docs.adapterhub.ml/adapter_composition.html.

A composition names adapters (`nodes`, by the `rules`). `compile_site` prunes it to the adapters
that are present at one site; the result, a `Step`, is what the site evaluates in each forward. An
adapter is a function around its layer, so `Stack(a, b)` is function composition at a site: the
deltas of weight adapters add, bottlenecks chain. `BatchSplit`, `Parallel`, `MultiTask` with
`task_ids` and the argument `adapter_names` all give rows of a batch to different adapters, and are
compiled alike: `_rows` assigns a composition to each row, and a site gets one step for each
distinct one.
"""

from __future__ import annotations

from .compile import (
    Chain,
    Copies,
    LayerView,
    Nested,
    RowSteps,
    SiteStep,
    Step,
    compile_site,
    evaluate,
    fold,
    fusion_key,
    inverse_of,
    prefix_of,
    step_of_copies,
)
from .nodes import (
    Average,
    BatchSplit,
    Composition,
    Fuse,
    MultiTask,
    Parallel,
    Split,
    Stack,
    from_json,
    fused,
    fusions_of,
    last_adapter,
    parse,
    refuse_merged_part,
    to_json,
    validate_composition,
    without,
)
from .prompts import Joined, Prompts, prompts_of
from .rows import (
    ActiveHeads,
    RowMap,
    has_rows,
    has_tokens,
    heads_of_rows,
    numbered,
    parse_heads,
    parts_of,
    rows_of,
)

# their names in `adapters`
AdapterCompositionBlock = Composition
parse_composition = parse

__all__ = [
    "ActiveHeads",
    "AdapterCompositionBlock",
    "Average",
    "BatchSplit",
    "Chain",
    "Composition",
    "Copies",
    "Fuse",
    "Joined",
    "LayerView",
    "MultiTask",
    "Nested",
    "Parallel",
    "Prompts",
    "RowMap",
    "RowSteps",
    "SiteStep",
    "Split",
    "Stack",
    "Step",
    "compile_site",
    "evaluate",
    "fold",
    "from_json",
    "fused",
    "fusion_key",
    "fusions_of",
    "has_rows",
    "has_tokens",
    "heads_of_rows",
    "inverse_of",
    "last_adapter",
    "numbered",
    "parse",
    "parse_composition",
    "parse_heads",
    "parts_of",
    "prefix_of",
    "prompts_of",
    "refuse_merged_part",
    "rows_of",
    "step_of_copies",
    "to_json",
    "validate_composition",
    "without",
]
