"""`convert` and `merge`: an adapter in another format, or merged into its base model."""

from __future__ import annotations

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
@click.option("--head/--no-head", default=True, help="Whether to write the head too.")
@click.option("--revision", help="Branch, tag or commit of SRC on the Hub.")
def convert_command(
    src: str,
    dst: str,
    to: str,
    model: str | None,
    name: str | None,
    head: bool,
    revision: str | None,
) -> None:
    """Write an adapter in another format: that of adapterzoo, AdapterHub or PEFT.

    SRC is a folder or 'user/repository', DST a folder. The base model's config is needed to know
    its layers; its weights are read only if a file must hold some of them. If the format cannot
    express the adapter, nothing is written.
    """
    check_adapter(src)
    check_base(model)
    check_can_write(dst)

    from .checkpoints import open_checkpoint
    from .converting import convert

    be_quiet(wants_progress(False))
    checkpoint = open_checkpoint(src, revision)
    convert(checkpoint, dst, to, model, name, head)
    click.echo(f"{dst}: {checkpoint.kind} in the format {to!r}, from {checkpoint.format!r}")


@command("merge", example="adapterzoo merge bert-base-uncased runs/reviews merged/reviews")
@click.argument("base")
@click.argument("adapter")
@click.argument("out")
@click.option(
    "--as",
    "architecture",
    metavar="CLASS",
    help="transformers class to write, such as BertForSequenceClassification.  "
    "[default: that of BASE, or one that has the adapter's head]",
)
@click.option("--head/--no-head", default=True, help="Whether to write the adapter's head too.")
@click.option("--revision", help="Branch, tag or commit of ADAPTER on the Hub.")
def merge_command(
    base: str, adapter: str, out: str, architecture: str | None, head: bool, revision: str | None
) -> None:
    """Write a plain transformers model that computes what BASE computes with the adapter.

    OUT is a new folder for `AutoModel.from_pretrained`; adapterzoo is not needed to load it. Only
    methods that change weights can be merged. The adapter's head replaces that of BASE in a class
    of transformers that has such a head; if there is none, BASE keeps its class and head.
    """
    check_new(out)
    check_can_write(out)
    check_base(base)
    check_adapter(adapter)

    from .checkpoints import open_checkpoint
    from .converting import merge

    be_quiet(wants_progress(False))
    checkpoint = open_checkpoint(adapter, revision)
    model_class, lost_head, lost_tokenizer = merge(checkpoint, base, out, architecture, head)
    click.echo(f"{out}: a {model_class}")
    if lost_head is not None:
        note(f"The adapter's head has been left out: {lost_head}")
    if lost_tokenizer is not None:
        note(f"{lost_tokenizer}; {out!r} has none.")
