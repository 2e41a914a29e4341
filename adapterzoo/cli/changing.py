"""`convert` and `merge`: an adapter in another format, and a base model with it inside."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from .app import command, model_option
from .early import FORMATS, check_adapter, check_base, check_can_write, check_new
from .output import be_quiet, note, wants_progress


@command("convert", example="adapterzoo convert runs/reviews served/reviews --to peft")
@click.argument("src")
@click.argument("dst")
@click.option("--to", required=True, type=click.Choice(FORMATS), help="Format to write.")
@model_option
@click.option("--name", help="Name of the adapter in DST.  [default: its own]")
@click.option("--head/--no-head", default=True, help="Whether the head goes with it.")
@click.option("--edited", is_flag=True, help="Take SRC's config as it was edited by hand.")
@click.option("--revision", help="Branch, tag or commit of SRC on the Hub.")
def convert_command(
    src: str,
    dst: str,
    to: str,
    model: str | None,
    name: str | None,
    head: bool,
    edited: bool,
    revision: str | None,
) -> None:
    """Write an adapter in another format: that of adapterzoo, AdapterHub or PEFT.

    SRC is a folder or 'user/repository', DST a folder. The base model's config is needed, as it
    says which layers there are; its weights are read only where a file has to hold some. What the
    other format cannot say is an error, and nothing is written then. A native adapter whose
    adapter_config.json was changed is refused everywhere, but here with --edited.
    """
    call = f"convert {src} --to {to}"
    check_adapter(call, src)
    check_base(call, model)
    check_can_write(call, "", Path(dst))

    from .checkpoints import open_checkpoint
    from .converting import convert, with_edits

    be_quiet(wants_progress(False))
    with contextlib.ExitStack() as stack:
        if edited:
            checkpoint = stack.enter_context(with_edits(call, src, revision))
        else:
            checkpoint = open_checkpoint(call, src, revision)
        convert(checkpoint, dst, to, model, name, head)
    click.echo(f"{dst}: {checkpoint.stem} in the format {to!r}, from {checkpoint.format!r}")


@command("merge", example="adapterzoo merge bert-base-uncased runs/reviews merged/reviews")
@click.argument("base")
@click.argument("adapter")
@click.argument("out")
@click.option(
    "--as",
    "architecture",
    metavar="CLASS",
    help="Class of transformers to write, such as BertForSequenceClassification.  "
    "[default: that of BASE, or the one that has the adapter's head]",
)
@click.option("--head/--no-head", default=True, help="Whether the adapter's head goes with it.")
@click.option("--revision", help="Branch, tag or commit of ADAPTER on the Hub.")
def merge_command(
    base: str,
    adapter: str,
    out: str,
    architecture: str | None,
    head: bool,
    revision: str | None,
) -> None:
    """Write a plain transformers model that does what BASE does with the adapter.

    OUT is a new folder, for `AutoModel.from_pretrained` and its like; adapterzoo is not needed to
    load it. LoRA, DoRA and BOFT can be merged. The adapter's head takes the place of that of
    BASE, and the class is one of transformers that has such a head; where there is none, the class
    and the head of BASE stay.
    """
    call = f"merge {base} {adapter}"
    check_new(call, Path(out))
    check_can_write(call, "", Path(out))
    check_base(call, base)
    check_adapter(call, adapter)

    from .checkpoints import open_checkpoint
    from .converting import merge

    be_quiet(wants_progress(False))
    checkpoint = open_checkpoint(call, adapter, revision)
    merged = merge(checkpoint, base, out, architecture, head)
    click.echo(f"{out}: a {merged.model_class}")
    if merged.lost_head is not None:
        note(f"The adapter's head is not in it: {merged.lost_head}")
    if merged.lost_tokenizer is not None:
        note(f"{merged.lost_tokenizer}; none is in {out!r}.")
