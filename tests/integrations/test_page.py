"""docs/integrations.md: its blocks of Python, run one after the other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModel, AutoModelForCausalLM
from words import plain, tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"


# the page is for machines with an accelerator too; torch says that this one has none
@pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")
def test_the_blocks_of_the_page_run(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 4
    for cls, family in ((AutoModel, "bert"), (AutoModelForCausalLM, "llama")):
        plain(cls, family).save_pretrained(tmp_path / family)
        tokenizer(pairs=family == "bert").save_pretrained(tmp_path / family)
    space: dict[str, Any] = {
        "path": tmp_path / "bert", "causal_path": tmp_path / "llama", "folder": tmp_path,
    }  # fmt: skip
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), space)
    loaded, trained = space["again"], space["model"]
    assert loaded.known_heads() == ("mood",)
    assert trained.adapter_fingerprint("mood") != loaded.adapter_fingerprint("mood")
    assert trained.load_adapter(tmp_path / "mood", load_as="saved") == "saved"
    assert (tmp_path / "style" / "adapter_config.json").is_file()
    assert space["added"].model.load_adapter(tmp_path / "added" / "default", load_as="b") == "b"
