"""The table of `docs/quantized.md`: methods over base models in every quantization.

`make quantized` runs it and writes the page, whose rows `test_quantized_table.py` runs again.
Rows whose package is not installed stay as they are. `ARGS="'hqq 4 bits' gptq"` runs these only.
"""

from __future__ import annotations

import importlib.metadata
import logging
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from families import first_output
from quantized_bases import SCHEMES, STAND_IN, WIDTH, Scheme, base_bits, loaded_as
from snapshots import of_adapter, stir
from torch import Tensor
from transformers import AutoConfig, AutoModel

import adapterzoo
from adapterzoo.errors import AdapterZooError

PAGE = Path(__file__).parents[1] / "docs" / "quantized.md"
START = "<!-- written by `make quantized` -->\n"
METHODS = {
    "LoRA": "lora", "DoRA": "dora", "BOFT": "boft", "bottleneck": "double_seq_bn",
    "(IA)³": "ia3", "prefix": "prefix_tuning",
}  # fmt: skip
LLAMA = {**WIDTH, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
FAMILIES = {
    "llama": LLAMA,
    "gpt_oss": {**LLAMA, "num_local_experts": 2, "num_experts_per_tok": 1,
                "layer_types": ["full_attention"] * 2},
}  # fmt: skip
TRAINED, SAVED, MERGED, AFTER, REFUSED = "T", "S", "M", "D", "–"
HEAD = ("scheme", "layers", *METHODS, "note")

Rows = dict[str, list[str]]


def plain(family: str, folder: str) -> str:
    """Save a plain model of a family, and return its folder."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = AutoModel.from_config(AutoConfig.for_model(family, **FAMILIES[family]))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 0.0 if parameter.dim() > 1 else 0.5, 0.1)
    model.save_pretrained(folder)
    return folder


def row(name: str, folder: str) -> list[str]:
    """Run the row of a scheme over a plain model.

    Args:
        name: in `SCHEMES`.
        folder: of the plain model.
    """
    scheme = SCHEMES[name]
    with scheme.running():
        cells = [_cell(scheme, method, folder) for method in METHODS.values()]
    layers = scheme.kind if scheme.kind == STAND_IN else f"{scheme.kind}, {shown(scheme)}"
    return [layers, *cells, scheme.note]


def shown(scheme: Scheme) -> str:
    """The package of a scheme with its version."""
    return f"{scheme.package} {scheme.version}"


def _made(scheme: Scheme, folder: str) -> Any:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(1)
        return adapterzoo.init(loaded_as(AutoModel, folder, scheme.make()))


def _cell(scheme: Scheme, method: str, folder: str) -> str:
    """Return what a method can do over a base model; the base keeps all its bits."""
    model = _made(scheme, folder)
    before = base_bits(model)
    try:
        model.add_adapter("a", method, set_active=True)
    except AdapterZooError:
        return REFUSED
    found = _trained(model)
    stir(model, "a", std=0.05)
    found += _saved(model, _made(scheme, folder))
    assert base_bits(model) == before, "the base model has changed"
    return found + _merged(model)


def _output(model: Any) -> Tensor:
    ids = torch.randint(3, 99, (2, 7), generator=torch.Generator().manual_seed(0))
    return first_output(model(input_ids=ids, attention_mask=torch.ones_like(ids)))


def _trained(model: Any) -> str:
    try:
        model.train_adapter("a")
    except AdapterZooError:
        return REFUSED
    own = [p for n, p in model.named_parameters() if of_adapter(n, "a")]
    assert {id(p) for p in own} == {id(p) for p in model.parameters() if p.requires_grad}
    optimizer, losses = torch.optim.AdamW(own, lr=1e-2), []
    for _ in range(4):
        optimizer.zero_grad()
        try:
            loss = _output(model).pow(2).mean()
            loss.backward()
        except RuntimeError:
            # the layer's own backward
            return REFUSED
        if not all(p.grad is not None for p in own):
            return REFUSED
        optimizer.step()
        losses.append(loss.item())
    return TRAINED if losses[-1] < losses[0] else REFUSED


def _saved(model: Any, other: Any) -> str:
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_adapter(folder, "a")
        other.load_adapter(folder, set_active=True)
        # in evaluation bitsandbytes may round more, for the CPU
        equal = torch.equal(_output(model.train()), _output(other.train()))
    assert equal, "the loaded adapter acts otherwise"
    return SAVED


@torch.no_grad()
def _merged(model: Any) -> str:
    expected, mark = _output(model), MERGED
    try:
        model.merge_adapter("a")
    except AdapterZooError:
        try:
            model.dequantize()
            expected, mark = _output(model), AFTER
            model.merge_adapter("a")
        except (AdapterZooError, NotImplementedError, ValueError):
            return REFUSED
    model.set_active_adapters(None)
    near = torch.allclose(_output(model), expected, rtol=1e-4, atol=1e-4)
    assert near, "the merged model acts otherwise"
    return mark


def read(page: str) -> Rows:
    """The rows of a page by scheme."""
    lines = page.partition(START)[2].splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("| ")]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows[2:]}


def render(page: str, rows: Mapping[str, list[str]]) -> str:
    """The page with other rows."""
    lines = [HEAD, ["---"] * len(HEAD), *([name, *rows[name]] for name in SCHEMES if name in rows)]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return page.partition(START)[0] + START + table


def missing(name: str) -> str:
    """Return the package of a scheme that is not installed, if it is not."""
    scheme = SCHEMES[name]
    try:
        scheme.version  # noqa: B018  raises
    except importlib.metadata.PackageNotFoundError:
        return scheme.package
    return ""


def run(names: Iterator[str] | list[str]) -> Iterator[tuple[str, list[str]]]:
    """Run rows, and yield each."""
    with tempfile.TemporaryDirectory() as folder:
        folders = {family: plain(family, f"{folder}/{family}") for family in FAMILIES}
        for name in names:
            yield name, row(name, folders[SCHEMES[name].family])


def main() -> int:
    """Run the rows that are asked for, or all, and write the page."""
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    page = PAGE.read_text(encoding="utf-8")
    rows = read(page)
    for name in sys.argv[1:] or list(SCHEMES):
        if package := missing(name):
            sys.stderr.write(f"{name}: {package} is not installed\n")
            continue
        ((_, rows[name]),) = run([name])
        sys.stderr.write(f"{name}: {' '.join(rows[name])}\n")
        PAGE.write_text(render(page, rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    torch.compiler.set_stance("force_eager")
    sys.exit(main())
