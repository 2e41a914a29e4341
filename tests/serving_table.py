"""The tables of `docs/serving.md`: methods and options × servers, and models × servers.

`make serving` runs every cell and writes the page; `serving/test_serving_table.py` runs a part.
A cell is written for the server and proven with its reader: exactly, by SVD, or refused by name.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from pathlib import Path
from typing import Any

from peft_world import CLASSES, ours, plain
from snapshots import stir
from variants import VARIANTS

from adapterzoo import AdapterConfig
from adapterzoo.errors import AdapterZooError, CheckpointError
from adapterzoo.serving import verify

PAGE = Path(__file__).parents[1] / "docs" / "serving.md"
MARK = "<!-- `make serving` writes what follows -->"
EXACT, SVD, REFUSED, WRONG = "exact", "SVD", "refused", "wrong"
SERVERS = ("vllm", "sglang", "lorax", "tgi", "gguf")
ALL = (*SERVERS, "any")

CLASSES |= {
    "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM", "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM", "mixtral": "MixtralForCausalLM",
}  # fmt: skip

_TABLE = "target_modules=['embed_tokens','q_proj','k_proj','v_proj']"
# each has met a server that reads it otherwise
OPTIONS = (
    "lora[r=8]",
    "lora[r=4]",
    "lora[r=24,alpha=5]",
    "lora[r=16,use_rslora=True]",
    "lora[r=8,rank_pattern={'q_proj':4}]",
    "lora[r=8,alpha_pattern={'q_proj':32}]",
    "lora[leave_out=[0]]",
    "lora[attn_matrices=['q']]",
    "lora[attn_matrices=['v']]",
    "lora[attn_matrices=['k','v']]",
    "lora[selfattn_lora=False,intermediate_lora=True]",
    "lora[intermediate_lora=True,output_lora=True]",
    f"lora[{_TABLE}]",
    "lora[target_modules=['lm_head','q_proj']]",
    "lora[lora_bias=True]",
    "lora[alora_invocation_tokens=[5,6]]",
    "vera[r=4]",
    "seq_bn",
    "lora|boft",
)
TEXTS: dict[str, AdapterConfig | str] = {**{text: text for text in OPTIONS}, **VARIANTS}
"""Rows of the first table, on a Llama."""

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "mixtral", "qwen3_moe",
    "gpt2", "bert",
)  # fmt: skip
PARTS = {
    "attention": "lora[r=4]",
    "MLP or experts": "lora[r=4,selfattn_lora=False,intermediate_lora=True,output_lora=True]",
}
"""Rows of the second table: what is adapted."""


@functools.cache
def _made(family: str, text: str) -> tuple[Any, str]:
    """A model with an adapter, and the folder of the adapter."""
    model = ours(family)
    model.add_adapter("a", TEXTS.get(text, text))
    stir(model, "a")
    folder = tempfile.mkdtemp()
    model.save_adapter(folder, "a", with_head=False)
    return model, folder


def cell(family: str, text: str, server: str) -> str:
    """What becomes of an adapter for a server; the reason if it is wrong."""
    model, original = _made(family, text)
    kwargs: dict[str, Any] = {"format": "peft", "serve": server, "with_head": False}
    with tempfile.TemporaryDirectory() as folder:
        said = EXACT
        try:
            try:
                written = model.save_adapter(folder, "a", **kwargs)
            except CheckpointError as error:
                if "energy=" not in str(error):
                    raise
                said, written = SVD, model.save_adapter(folder, "a", **kwargs, energy=1.0)
        except AdapterZooError as error:
            # by name, with what to write instead, and before anything is written
            named = "Nothing has been written. Write " in str(error)
            return REFUSED if named and not any(Path(folder).iterdir()) else f"{WRONG}: {error}"
        if written.is_exact is (said == SVD):
            return f"{WRONG}: {written}"
        for reader in SERVERS if server == "any" else (server,):
            proof = verify(folder, reader, plain(family).double(), original)
            if not proof.is_equal or not proof.change:
                return f"{WRONG}: {proof}"
    return said


Cells = dict[tuple[str, str, str], str]
"""By family, adapter and server."""


def rows() -> list[tuple[str, str]]:
    """All families with their adapters."""
    models = [(family, text) for family in FAMILIES for text in PARTS.values()]
    return [*(("llama", text) for text in TEXTS), *models]


def render(found: Cells) -> str:
    """The page."""
    kinds = [*found.values()]
    total = (
        f"Of {len(kinds)} cells, {kinds.count(EXACT)} are exact, {kinds.count(SVD)} are an SVD "
        f"with its errors reported, and {kinds.count(REFUSED)} are refused by name. Silently "
        "different or refused by the server alone: "
        f"{sum(kind.startswith(WRONG) for kind in kinds)}."
    )
    lines = [f"| adapter of a Llama | {' | '.join(ALL)} |", "| --- |" + " --- |" * len(ALL)]
    lines += [
        f"| `{text}` | {' | '.join(found['llama', text, server] for server in ALL)} |".replace(
            "|boft", "\\|boft"
        ).replace("|par_bn", "\\|par_bn")
        for text in TEXTS
    ]
    lines += ["", f"| model | adapted | {' | '.join(ALL)} |", "| --- | --- |" + " --- |" * len(ALL)]
    lines += [
        f"| {family} | {part} | {' | '.join(found[family, text, server] for server in ALL)} |"
        for family in FAMILIES
        for part, text in PARTS.items()
    ]
    start, mark, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    assert mark, "the text of the page stands above the tables"
    return f"{start}{MARK}\n\n{total}\n\n" + "\n".join(lines) + "\n"


def read(page: str) -> Cells:
    """The cells of a page."""
    cells: Cells = {}
    for line in page.partition(MARK)[2].replace("\\|", "¦").splitlines():
        first, *others = line[2:-2].split(" | ") if line.startswith("| ") else [""]
        if first.startswith("`"):
            key = ("llama", first.strip("`").replace("¦", "|"))
            cells.update({(*key, s): kind for s, kind in zip(ALL, others, strict=True)})
        elif first in FAMILIES:
            part, *kinds = others
            cells.update({(first, PARTS[part], s): k for s, k in zip(ALL, kinds, strict=True)})
    return cells


def main() -> int:
    """Run all cells and write the page; 1 if one is wrong."""
    found: Cells = {}
    for family, text in rows():
        for server in ALL:
            found[family, text, server] = said = cell(family, text, server)
            if said.startswith(WRONG):
                sys.stderr.write(f"{family}, {text}, {server}: {said}\n")
        _made.cache_clear()
    PAGE.write_text(render(found), "utf-8")
    return any(kind.startswith(WRONG) for kind in found.values())


if __name__ == "__main__":
    sys.exit(main())
