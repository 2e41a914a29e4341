"""The table of `docs/calls.md`: methods that read the call × the ways to call a model.

`make calls` runs every cell and writes the table; `test_calls.py` runs a cover of it and compares.
"""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from cached import CACHE
from families import tiny_config
from snapshots import stir
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, DynamicCache

from adapterzoo import AdapterConfig, init
from adapterzoo import methods as _methods  # noqa: F401  registers the config strings
from adapterzoo.config import config_strings
from adapterzoo.contracts import Adapter, AttentionAdapter, PositionAdapter, PromptAdapter
from adapterzoo.errors import AdapterZooError

TABLE = Path(__file__).parents[1] / "docs" / "calls.md"
RIGHT, REFUSED, NONE, WRONG = "right", "refused", "–", "wrong"
FAMILIES = ("llama", "gpt2", "gemma3_text", "t5", "bart")
ENCODER_DECODERS = ("t5", "bart")
# transformers casts logits to float32; a wrong prompt changes them by more than 1e-3
BOUND = 1e-5
NEW = 5
# tokens of a prompt that a cache has
KNOWN = 2
# of each config that has the field, this value is tried as well
OPTIONS = {
    "use_gating": "True",
    "suffix_positions": "2",
    "positions": "'shifted'",
    "alora_invocation_tokens": "[5,6]",
}

HEAD = f"""# Ways to call a model

Some adapters depend on the call: on padding, on which tokens are the prompt, or on the position of
a token. This page shows in which calls they are correct. `make calls` writes it and runs every
cell; `tests/test_calls.py` runs a part of them again.

Each cell compares the logits of a tiny model in float64 with those of each row alone, without
padding and without a cache. `{RIGHT}`: they are equal. `{REFUSED}`: an error says what to write
instead, before anything is computed wrongly. `{NONE}`: the model itself does not support this way,
or gives other logits. A method that has no row for a model cannot be added to it. New config
strings are added automatically.

| way | what is called |
| --- | --- |
| greedy | `generate` on two rows of equal length |
| beams | the same with `num_beams=2` |
| assistant | `generate(assistant_model=…)`, a copy of the model with another adapter |
| lookup | `generate(prompt_lookup_num_tokens=3)` |
| early exit | `generate(assistant_early_exit=1)` |
| static | `generate(cache_implementation="static")`, on one row and on two with padding |
| filled | `generate` with a cache that already has the first tokens of the prompt |
| chunks | `generate(prefill_chunk_size=3)` |
| left | `generate` with the second row padded on the left |
| right | a forward pass with the second row padded on the right |
| packed | a forward pass on both rows packed into one, with `position_ids` that restart |

In an encoder–decoder model, the padded rows are those of the encoder and the prompt is that of the
decoder.

"""


@functools.cache
def configs() -> tuple[str, ...]:
    """The config strings of all methods that read the call."""
    found: dict[str, AdapterConfig] = {}
    for name in config_strings:
        if name == "union":
            # of other methods
            continue
        plain = AdapterConfig.load(name)
        texts = [name, *(f"{name}[{f}={v}]" for f, v in OPTIONS.items() if hasattr(plain, f))]
        for text in texts:
            config = AdapterConfig.load(text)
            if config not in found.values() and any(map(reads, ("llama", "t5"), (text, text))):
                found[text] = config
    return tuple(found)


def model_of(family: str) -> Any:
    """A tiny model of the family, in float64."""
    torch.manual_seed(0)
    config = tiny_config(family)
    if family == "gemma3_text":
        # prompts are longer than the window
        config.sliding_window = 6
        config.layer_types = ["sliding_attention", "full_attention"]
    auto = AutoModelForSeq2SeqLM if family in ENCODER_DECODERS else AutoModelForCausalLM
    return init(auto.from_config(config).double().eval().requires_grad_(False))


@functools.cache
def reads(family: str, text: str) -> bool:
    """Whether an adapter of a config depends on the call."""
    try:
        model = model_of(family)
        model.add_adapter("a", text)
    except AdapterZooError:
        return False
    kinds = AttentionAdapter, PositionAdapter, PromptAdapter
    return any(
        isinstance(part, Adapter) and (part.reads_call or isinstance(part, kinds))
        for _, module in model.adapter_modules("a")
        for part in module.modules()
    )


class Case:
    """A model with an adapter, or without one, and what its rows give alone.

    Attributes:
        model: of the family.
        assistant: another one.
        rows: the tokens of each row, those of the encoder in an encoder-decoder.
        prompt: of the decoder, None for a decoder-only model.
    """

    def __init__(self, family: str, text: str | None) -> None:
        """Make the model; `text` None: without an adapter.

        Raises:
            AdapterZooError: the adapter cannot be added to it.
        """
        self.family, self.model = family, model_of(family)
        self.assistant = copy.deepcopy(self.model)
        for seed, model in enumerate((self.model, self.assistant)):
            if text is not None:
                model.add_adapter("a", text, set_active=True)
                stir(model, "a", seed + 1, 0.3)
                model.eval()
        source = torch.Generator().manual_seed(1)
        two, more = torch.randint(10, 90, (6,), generator=source).split((2, 4))
        # an invocation, which is also among the candidates that a look-up finds
        long = [*two.tolist(), 5, 6, *more.tolist(), *two.tolist()]
        self.rows = [long, [20, 5, 6, 21, 22, 23]]
        self.prompt = None
        if family in ENCODER_DECODERS:
            self.prompt = torch.tensor([[model.config.decoder_start_token_id, *self.rows[0]]])
        self._alone = functools.lru_cache(None)(self._of_row)

    def generate(self, ids: Tensor, **options: Any) -> list[Tensor]:
        """The logits of each new token, or the scores of beams; `[rows, …]` each."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = self.model.generate(
                ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, output_logits=True,
                output_scores=True, eos_token_id=None, pad_token_id=0,
                return_dict_in_generate=True, **options,
            )  # fmt: skip
        return [out.sequences_scores] if "num_beams" in options else list(out.logits)

    def _of_row(self, row: int, prompted: bool, beams: int) -> list[Tensor]:
        options: dict[str, Any] = {"num_beams": beams} if beams > 1 else {}
        if prompted:
            options["decoder_input_ids"] = self.prompt
        return self.generate(torch.tensor([self.rows[row]]), use_cache=False, **options)

    def off(self, got: list[Tensor], row: int, at: int = 0, prompted: bool = False) -> float:
        """How far row `at` of generated logits is from those of a row alone."""
        beams = 2 if len(got) == 1 and NEW > 1 else 1
        alone = self._alone(row, prompted, beams)
        assert len(alone) == len(got)
        pairs = zip(got, alone, strict=True)
        return max(float((g[at] - a[0]).abs().max()) for g, a in pairs)

    def padded(self, side: str) -> tuple[Tensor, Tensor]:
        """Both rows and their mask."""
        long, short = self.rows
        gap = [0] * (len(long) - len(short))
        pair = [long, [*gap, *short] if side == "left" else [*short, *gap]]
        ids = torch.tensor(pair)
        mask = torch.ones_like(ids)
        mask[1, : len(gap)] = 0
        return ids, mask if side == "left" else mask.flip(1)

    @torch.no_grad()
    def logits(self, ids: Tensor, **inputs: Any) -> Tensor:
        """The logits of a forward pass, `[rows, tokens, vocabulary]`."""
        if self.prompt is not None:
            inputs["decoder_input_ids"] = self.prompt.expand(len(ids), -1)
        return self.model(input_ids=ids, use_cache=False, **inputs).logits


def _greedy(case: Case, **options: Any) -> float:
    ids = torch.tensor([case.rows[0], case.rows[0][::-1]])
    case.rows.append(ids[1].tolist())
    got = case.generate(ids, **options)
    return max(case.off(got, 0), case.off(got, len(case.rows) - 1, 1))


def _prompted(case: Case, **options: Any) -> float:
    """`generate` on one row, with a prompt of several tokens for a decoder, too."""
    prompted = case.prompt is not None
    if prompted:
        options["decoder_input_ids"] = case.prompt
    return case.off(case.generate(torch.tensor([case.rows[0]]), **options), 0, 0, prompted)


def _filled(case: Case) -> float:
    cache: Any = DynamicCache()
    ids, inputs = torch.tensor([case.rows[0]]), {}
    with torch.no_grad():
        if case.prompt is None:
            inputs["input_ids"] = ids[:, :KNOWN]
        else:
            cache = transformers.EncoderDecoderCache(cache, DynamicCache())
            inputs |= {"input_ids": ids, "decoder_input_ids": case.prompt[:, :KNOWN]}
        case.model(**inputs, **{CACHE: cache}, use_cache=True)
    options = {CACHE: cache}
    if case.prompt is not None:
        # `generate` sees by the mask that the prompt includes the cached tokens
        options["decoder_attention_mask"] = torch.ones_like(case.prompt)
    return _prompted(case, **options)


def _padded(case: Case, side: str = "left", **options: Any) -> float:
    ids, mask = case.padded(side)
    got = case.generate(ids, attention_mask=mask, **options)
    return max(case.off(got, 0), case.off(got, 1, 1))


def _static(case: Case) -> float:
    # positions of an encoder's tokens count its padding
    side = "left" if case.prompt is None else "right"
    options = {"cache_implementation": "static"}
    return max(_padded(case, side, **options), _prompted(case, **options))


def _right(case: Case) -> float:
    ids, mask = case.padded("right")
    got = case.logits(ids, attention_mask=mask)
    offs = []
    for row, own in enumerate(case.rows):
        alone = case.logits(torch.tensor([own]))
        offs.append(got[row : row + 1, : alone.shape[1]] - alone)
    return max(float(each.abs().max()) for each in offs)


def _packed(case: Case) -> float:
    assert case.prompt is None, "transformers packs no encoder-decoder"
    packed = torch.tensor([[token for row in case.rows for token in row]])
    positions = torch.tensor([[place for row in case.rows for place, _ in enumerate(row)]])
    got = case.logits(packed, position_ids=positions)
    alone = torch.cat([case.logits(torch.tensor([row])) for row in case.rows], 1)
    return float((got - alone).abs().max())


WAYS: dict[str, Callable[[Case], float]] = {
    "greedy": _greedy,
    "beams": lambda case: _greedy(case, num_beams=2),
    "assistant": lambda case: _prompted(case, assistant_model=case.assistant),
    "lookup": lambda case: _prompted(case, prompt_lookup_num_tokens=3),
    "early exit": lambda case: _prompted(case, assistant_early_exit=1),
    "static": _static,
    "filled": _filled,
    "chunks": lambda case: _prompted(case, prefill_chunk_size=3),
    "left": _padded,
    "right": _right,
    "packed": _packed,
}
"""What each way is off from the rows alone."""


@functools.cache
def supports(family: str, way: str) -> bool:
    """Whether the model of a family, without adapters, gives the logits of its rows alone."""
    try:
        return WAYS[way](Case(family, None)) < BOUND
    except Exception:  # noqa: BLE001  whatever transformers raises where it does not support it
        return False


def cell(family: str, text: str, way: str) -> str:
    """What a method does in a way to call a model."""
    if not supports(family, way):
        return NONE
    try:
        case = Case(family, text)
        return RIGHT if WAYS[way](case) < BOUND else WRONG
    except AdapterZooError:
        return REFUSED


Cells = dict[tuple[str, str], dict[str, str]]
"""Family and method → way → what happens."""


def rows() -> Iterator[tuple[str, str]]:
    """The family and the config of each row."""
    for family in FAMILIES:
        yield from ((family, text) for text in configs() if reads(family, text))


def render(cells: Cells) -> str:
    """The page."""
    counts = [text for row in cells.values() for text in row.values()]
    lines = [["model", "method", *WAYS], ["---"] * (2 + len(WAYS))]
    lines += [[f, f"`{text}`", *row.values()] for (f, text), row in cells.items()]
    total = ", ".join(f"{counts.count(t)} {t}" for t in (RIGHT, REFUSED, WRONG))
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"{HEAD}Cells: {total}.\n\n{table}"


def read(page: str) -> Cells:
    """The cells of a page."""
    split = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return {
        (family, text.strip("`")): dict(zip(WAYS, texts, strict=True))
        for family, text, *texts in split
        if family in FAMILIES
    }


def main() -> int:
    """Run all cells, or those of the named families, and write the page; 1 if one is wrong."""
    asked = sys.argv[1:] or FAMILIES
    known = read(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}
    cells: Cells = {}
    for family, text in rows():
        if family in asked:
            cells[family, text] = {way: cell(family, text, way) for way in WAYS}
        elif (family, text) in known:
            cells[family, text] = known[family, text]
        # what was run stays if the rest is interrupted
        TABLE.write_text(render(cells), encoding="utf-8")
    wrong = [(*row, way) for row, ways in cells.items() for way, t in ways.items() if t == WRONG]
    counts = [text for row in cells.values() for text in row.values()]
    sys.stdout.write(", ".join(f"{counts.count(t)} {t}" for t in (RIGHT, REFUSED, WRONG)) + "\n")
    sys.stderr.write("".join(f"{family} {text} {way}\n" for family, text, way in wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
