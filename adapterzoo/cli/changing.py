"""`convert` and `merge`: an adapter in another form, or merged into its base model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from adapterzoo.errors import listing

from .app import command, model_option
from .early import FORMATS, check_adapter, check_base, check_can_write, check_new
from .output import be_quiet, note, wants_progress, write_json


def _target(ctx: click.Context, option: click.Parameter, value: str) -> str:
    """Check a format or a method; methods are imported only if it is not a format.

    Raises:
        BadParameter: it is neither.
    """
    if value in FORMATS:
        return value
    from adapterzoo import methods  # noqa: F401  registers them
    from adapterzoo.configs import change_forms

    if value not in change_forms:
        raise click.BadParameter(
            f"{value!r} is neither a format ({listing(FORMATS)}) nor a conversion method "
            f"({listing(change_forms)})."
        )
    return value


@command("convert", example="adapterzoo convert runs/reviews served/reviews --to peft")
@click.argument("src")
@click.argument("dst")
@click.option(
    "--to",
    required=True,
    callback=_target,
    metavar=f"[{'|'.join(FORMATS)}|METHOD]",
    help="Format to write, or method to convert to.",
)
@model_option
@click.option("--name", help="Name of the adapter in DST.  [default: its own]")
@click.option("--head/--no-head", default=True, help="Whether to write the head too.")
@click.option("--revision", help="Branch, tag or commit of SRC on the Hub.")
@click.option("--rank", type=click.IntRange(min=1), help="To a method: the largest rank.")
@click.option(
    "--energy",
    type=click.FloatRange(0, 1, min_open=True),
    help="To a method: share of the squared singular values to keep in each layer.",
)
@click.option("--text", help="To a method: compare outputs on this text.  [default: random tokens]")
@click.option("--report", metavar="FILE", help="To a method: write the errors as JSON.")
def convert_command(
    src: str,
    dst: str,
    to: str,
    model: str | None,
    name: str | None,
    head: bool,
    revision: str | None,
    **options: Any,
) -> None:
    """Write an adapter in another format, or as an adapter of another method.

    SRC is a folder or 'user/repository', DST a folder. For another format, that of adapterzoo,
    AdapterHub or PEFT, the base model's config is needed to know its layers; its weights are read
    only if a file must hold some of them. If the format cannot express the adapter, nothing is
    written.

    For another method, such as LoRA, the base model is loaded. DST has the format of SRC. The
    conversion is exact where the method of SRC has low-rank factors, and an SVD otherwise; a table
    shows the error of each layer and the difference of the outputs.
    """
    given = [option for option, value in options.items() if value is not None]
    if to in FORMATS and given:
        raise click.UsageError(f"--{given[0]} needs --to with a method, not a format.")
    if options["rank"] is not None and options["energy"] is not None:
        raise click.UsageError("--rank and --energy both limit the ranks. Write one of them.")
    check_adapter(src)
    check_base(model)
    check_can_write(dst)
    report = options.pop("report")
    if report is not None:
        check_can_write(str(Path(report).parent), "--report ")

    from .checkpoints import open_checkpoint

    be_quiet(wants_progress(False))
    checkpoint = open_checkpoint(src, revision)
    if to in FORMATS:
        from .converting import convert

        convert(checkpoint, dst, to, model, name, head)
        click.echo(f"{dst}: {checkpoint.kind} in the format {to!r}, from {checkpoint.format!r}")
        return
    from .methods import convert_method

    certificate = convert_method(checkpoint, dst, to, model, name, head, **options)
    if report is not None:
        write_json(report, certificate.to_dict())
    click.echo(str(certificate))
    click.echo(f"{dst}: {certificate.to} from {certificate.method}, as {checkpoint.format!r}")


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
