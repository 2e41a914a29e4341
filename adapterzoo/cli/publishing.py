"""`push` and `list`: adapters on the Hub."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import click

from .app import command, json_option
from .early import check_push
from .output import be_quiet, print_json, print_table, wants_progress


@command("push", example="adapterzoo push runs/reviews user/reviews --metric accuracy=0.91")
@click.argument("path")
@click.argument("repo")
@click.option("--private", is_flag=True, help="Make a new repository private.")
@click.option("--revision", help="Branch to push to; created if missing.")
@click.option("--message", "commit_message", help="First line of the commit message.")
@click.option("--create-pr", is_flag=True, help="Open a pull request.")
@click.option("--base-model", help="Hub name of the base model.")
@click.option("--dataset", "datasets", multiple=True, help="Hub name; may be repeated.")
@click.option("--metric", "metrics", multiple=True, metavar="NAME=VALUE", help="For the card.")
@click.option("--license", help="License, such as apache-2.0.")
@click.option("--language", help="Language, such as en.")
@click.option("--overwrite-card", "overwrite_adapter_card", is_flag=True,
              help="Replace an existing model card.")  # fmt: skip
@json_option
def push_command(
    path: str,
    repo: str,
    private: bool,
    metrics: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Publish the adapter in a folder as REPO ('user/repository') on the Hub, with a card.

    Everything goes into one commit. The token is that of `hf auth login` or HF_TOKEN; there is no
    option for it, because other users could read it in the list of processes.
    """
    results = dict(_metric(metric) for metric in metrics)

    check_push(path, repo)

    from adapterzoo import hub

    be_quiet(wants_progress(as_json))
    known = {name: options.pop(name) for name in ("base_model", "datasets", "license", "language")}
    text = hub.CardText(results=results, **known)
    url = hub.push(path, repo, text=text, private=private or None, **options)
    if as_json:
        print_json({"url": url, "repo": repo})
    else:
        click.echo(url)


@command("list", example="adapterzoo list --model google-bert/bert-base-uncased --limit 20")
@click.option("--model", "base_model", metavar="TEXT",
              help="Only adapters for this base model, by its name on the Hub.")  # fmt: skip
@click.option("--task", help="Only those for this task, such as text-classification.")
@click.option("--library", help="Only those written by adapterzoo, adapters or peft.")
@click.option("--search", help="Only those with these words in the name.")
@click.option("--author", help="Only those of this user or organization.")
@click.option("--limit", default=20, type=click.IntRange(min=1), help="Maximum number of adapters.")
@json_option
def list_command(as_json: bool, **options: Any) -> None:
    """List adapters of the Hub that can be loaded here, the most downloaded first."""
    from adapterzoo.hub.client import refuse_if_offline

    refuse_if_offline("nothing can be asked of the Hub")

    from adapterzoo import hub

    found = hub.list_adapters(**options)
    if as_json:
        print_json([dataclasses.asdict(info) for info in found])
        return
    if not found:
        click.echo("No adapter found.")
        return
    titles = ("adapter", "library", "task", "base model", "downloads")
    print_table(
        titles, [(i.adapter_id, i.library, i.task, i.model_name, i.downloads) for i in found]
    )


def _metric(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not name.strip() or not math.isfinite(number):
        raise click.UsageError(
            f"--metric {text!r} is not a name with a number. Write --metric accuracy=0.91."
        )
    return name, number
