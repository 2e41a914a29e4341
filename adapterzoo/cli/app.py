"""The command `adapterzoo`: its subcommands, their options and examples, and exit codes.

0: success; 1: an error, with one message on standard error; 2: invalid usage. `checks` refuses
wrong values before torch is imported; the library refuses the rest, and `spell` writes its hints
with the options of the command. The modules that do the work are imported when a command runs.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from adapterzoo import __version__
from adapterzoo.errors import AdapterZooError, ConfigError, listing, naming
from adapterzoo.registry import RECOMMENDED

from . import checks
from .checks import change_forms, check_method
from .output import (
    be_quiet,
    note,
    print_facts,
    print_json,
    print_table,
    printable,
    wants_progress,
)
from .resuming import check, digest
from .rows import DataTable, nearest, read
from .tasks import tasks

if TYPE_CHECKING:
    from .checkpoints import CheckpointFolder

F = TypeVar("F", bound=Callable[..., Any])

# copies of names in checkpoint.formats, heads.Pooling and serving.servers, which import torch; a
# test compares them
FORMATS = ("native", "adapterhub", "adapterhub-safetensors", "peft")
POOLINGS = ("auto", "cls", "mean", "last", "eos", "pooler")
SERVERS = ("vllm", "sglang", "lorax", "tgi", "gguf", "any")

# arguments of Python that have other names as options
_OPTIONS = {"format": ("to",), "load_as": ("name",), "model": ("model", "base"),
            "with_head": ("head",)}  # fmt: skip


def spell(name: str, value: object) -> str:
    """Return an argument of Python as the reader of the current command writes it.

    An option of another command is shown as one of `convert`, which writes an adapter that follows
    the hint.

    Args:
        name: of the argument.
        value: of the argument.
    """
    for command in (click.get_current_context().command, convert_command):
        found = {parameter.name: parameter for parameter in command.params}
        parameter = next((found[n] for n in _OPTIONS.get(name, (name,)) if n in found), None)
        if isinstance(parameter, click.Argument):
            return parameter.human_readable_name
        if parameter is not None:
            option = f"{parameter.opts[0]} {value}"
            if isinstance(value, bool):
                option = parameter.opts[0] if value else parameter.secondary_opts[0]
            other = command is not click.get_current_context().command
            return f"`adapterzoo convert {option}`" if other else option
    return f"{name}={value!r}"


class RefusedError(click.ClickException):
    """An error of the library, shown as its one message."""

    def show(self, file: Any = None) -> None:
        """Print the message.

        Args:
            file: instead of standard error.
        """
        # it may quote names from files; some messages have several lines
        message = printable(self.message, allowed="\n")
        click.echo(f"adapterzoo: {message}", file=file, err=True)


class StoppedError(RefusedError):
    """Ctrl-C was pressed."""

    exit_code = 130


class NamedCommand(click.Command):
    """A command whose errors name it with its positional arguments."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command.

        Args:
            ctx: of this call.

        Raises:
            RefusedError: the library raised an error, or a file cannot be read or written.
            StoppedError: Ctrl-C was pressed.
        """
        given = [str(ctx.params[p.name]) for p in self.params if isinstance(p, click.Argument)]
        call = " ".join([str(ctx.info_name), *given])
        try:
            with naming(call, spell):
                checks.check_options(ctx.params)
                return super().invoke(ctx)
        except AdapterZooError as error:
            raise RefusedError(str(error)) from error
        except KeyboardInterrupt as stop:
            raise StoppedError(f"{call}: {str(stop) or 'stopped'}") from stop
        except BrokenPipeError:
            # click ends quietly
            raise
        # RuntimeError: of torch
        except (OSError, RuntimeError) as error:
            raise RefusedError(f"{call}: {error}") from error


class App(click.Group):
    """The commands, in the order in which users need them; suggests one for a misspelled name."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Return the command that is called.

        Args:
            ctx: of this call.
            args: of the command line.

        Raises:
            UsageError: there is no such command.
        """
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            near = get_close_matches(args[0], self.commands, 1)
            hint = (
                f"Did you mean {near[0]!r}?"
                if near
                else f"Write one of {', '.join(self.commands)}."
            )
            ctx.fail(f"No such command {args[0]!r}. {hint}")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return their names.

        Args:
            ctx: of this call.
        """
        return list(self.commands)


# the contexts of the commands inherit the settings
@click.group(
    cls=App, context_settings={"help_option_names": ["-h", "--help"], "show_default": True}
)
@click.version_option(__version__, prog_name="adapterzoo")
def main() -> None:
    """Adapters for transformers: train, use, inspect, convert, merge and publish them."""


def command(name: str, example: str) -> Callable[[Callable[..., None]], click.Command]:
    """Decorate a function to make it a command; its docstring is the help.

    Args:
        name: of the command.
        example: the line that a user types.
    """

    def make(function: Callable[..., None]) -> click.Command:
        # the first sentence, uncut
        short = (function.__doc__ or "").partition(".")[0].replace("\n", " ") + "."
        # click does not wrap the paragraph after \b
        epilog = f"\b\nExample:\n  {example}"
        return main.command(name, NamedCommand, epilog=epilog, short_help=short)(function)

    return make


_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
_model = click.option(
    "--model",
    metavar="MODEL",
    help="Folder or Hub name of the base model.  [default: the one named by the adapter]",
)
_revision = click.option("--revision", is_eager=True,
                         help="Branch, tag or commit of the adapter on the Hub.")  # fmt: skip
_head = click.option("--head/--no-head", default=True, help="Write the adapter's head too.")
_columns = click.option("--column", "columns", multiple=True, metavar="ROLE=NAME",
                        callback=lambda _ctx, option, given: _pairs(option, given),
                        help="Name of a column, such as text=review; may be repeated.")  # fmt: skip
_batch_size = click.option(
    "--batch-size", default=16, type=click.IntRange(min=1), help="Rows per batch."
)
_device = click.option("--device", help="cpu or cuda.  [default: cuda if available]")


def _path(ctx: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """Return a folder or a name on the Hub; refuse a misspelled folder.

    Raises:
        BadParameter: there is no such folder, but one of a similar name.
    """
    if value is None:
        return value
    path = Path(value.partition("@")[0])
    # unlike Path.exists, os.access does not raise if a parent is not accessible
    is_here = ctx.params.get("revision") is not None or os.access(path, os.F_OK)
    if not is_here and (near := nearest(path)):
        raise click.BadParameter(f"there is no folder {value!r}.{near}", param=option)
    return value


def _checkpoint(path: str, revision: str | None, progress: str = "") -> CheckpointFolder:
    """Return the checkpoint of an adapter or a head, before anything slow is imported.

    Args:
        path: see `checkpoints.open_checkpoint`.
        revision: see `checkpoints.open_checkpoint`.
        progress: "bar" shows the progress of a download.
    """
    from adapterzoo.hub.requests import hide_progress

    from .checkpoints import open_checkpoint

    if progress != "bar":
        hide_progress()
    return open_checkpoint(path, revision)


class _Above0(click.FloatRange):
    """A finite number above 0."""

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True)

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Return the number.

        Args:
            value: to convert.
            param: the option.
            ctx: of this call.
        """
        number = super().convert(value, param, ctx)
        return number if math.isfinite(number) else self.fail(f"{value} is not finite.", param, ctx)


def _pairs(option: click.Parameter, given: Sequence[str]) -> dict[str, str]:
    """Return the values of an option of the form NAME=VALUE by name."""
    found = dict(text.partition("=")[::2] for text in given)
    if not all({*found, *found.values()}):
        raise click.BadParameter(f"{listing(given)}: write {option.metavar}.", param=option)
    return found


# --- train and predict ---


@command(
    "train",
    example="adapterzoo train --model bert-base-uncased --train train.csv --eval test.csv "
    "--output runs/reviews",
)
@click.option("--model", required=True, help="Folder or Hub name of the base model.")
@click.option("--task", default=next(iter(tasks)), type=click.Choice([*tasks]),
              help="What is learned.")  # fmt: skip
@click.option("--train", "train_files", required=True, multiple=True, metavar="FILE",
              help="Training data; repeated: an adapter for each file.")  # fmt: skip
@click.option("--eval", "eval_files", multiple=True, metavar="FILE",
              help="Test data; repeat it as often as --train.")  # fmt: skip
@click.option("--output", required=True, metavar="FOLDER",
              help="Folder for the adapter; several adapters get one each inside it.")  # fmt: skip
@click.option("--sweep", "sweeps", multiple=True, metavar="OPTION=VALUES",
              help="Try each of the values, such as lr=1e-4,1e-3; may be repeated. The best "
              "adapter is saved.")  # fmt: skip
@click.option("--method", default=RECOMMENDED,
              help="Config string of the adapter, see `adapterzoo methods`.")  # fmt: skip
@click.option("--name", help="Name of adapter and head.  [default: last part of FOLDER]")
@click.option("--epochs", default=3.0, type=_Above0(), help="Passes over the training data.")
@click.option("--lr", default=1e-3, type=_Above0(),
              help="Initial learning rate; decays to 0.")  # fmt: skip
@_batch_size
@click.option("--max-length", type=click.IntRange(min=1),
              help="Maximum tokens per text.  [default: that of the task]")  # fmt: skip
@click.option("--pooling", type=click.Choice(POOLINGS),
              help="How the head reduces a text or image to one vector.  [default: auto]"
              )  # fmt: skip
@click.option("--layers", type=click.IntRange(min=1), help="Layers of the head.  [default: 1]")
@click.option("--seed", default=0, type=click.IntRange(0, 2**32 - 1),
              help="Seed of weights and row order.")  # fmt: skip
@click.option("--save-steps", type=click.IntRange(min=1),
              help="Steps between two checkpoints.  [default: an epoch]")  # fmt: skip
@click.option("--resume", is_flag=True, help="Continue a run that has not ended, to the same bits.")
@_device
@_columns
@_json
def train_command(
    train_files: tuple[str, ...],
    eval_files: tuple[str, ...],
    task: str,
    output: str,
    name: str | None,
    sweeps: tuple[str, ...],
    columns: dict[str, str],
    resume: bool,
    save_steps: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Train adapters, with heads if the task needs them; the base model does not change.

    Data are .csv, .tsv, .jsonl or .json files, a folder that datasets has saved, or a folder with a
    subfolder of images for each label. Text classification reads the columns text and label; those
    of the other tasks are in the documentation, and --column names others. With --eval, the metrics
    on the test data are printed. Several adapters are trained in one run.

    Ctrl-C keeps a checkpoint and ends with 130; the same command with --resume continues.
    """
    kind = tasks[task]
    if eval_files and len(eval_files) != len(train_files):
        raise click.UsageError("Write --eval as often as --train, in the same order.")
    if len(train_files) > 1 and name:
        raise click.UsageError("Several --train files name their adapters; leave out --name.")
    if len(train_files) > 1 and sweeps:
        raise click.UsageError("A sweep has one --train file; leave out --sweep.")
    names = [name or Path(output).name]
    if len(train_files) > 1:
        names = [Path(file).stem for file in train_files]
        if len({*names}) < len(names):
            twice = next(each for each in names if names.count(each) > 1)
            raise click.UsageError(
                f"Two --train files would name their adapter {twice!r}. Rename one of them."
            )
    for every in names:
        checks.check_name(every)
    tried = _tried(sweeps)
    head = {key: value for key in ("pooling", "layers")
            if (value := options.pop(key)) is not None}  # fmt: skip
    for key in {**head, **dict.fromkeys(key for each in tried for key in each)}:
        if key in ("pooling", "layers") and key not in kind.head_options:
            raise click.UsageError(f"--{key} has no effect on --task {task}. Leave it out.")
    kind.check_columns(columns)
    for each in tried:
        check_method(each.get("method"))
    folders = [Path(output)] if len(names) == 1 else [Path(output) / each for each in names]
    for folder in folders:
        checks.check_folder(str(folder))
        checks.refuse_to_replace(str(folder), "native")
    data = []
    for file, tested in itertools.zip_longest(map(Path, train_files), map(Path, eval_files)):
        rows = kind.read(read(file), columns)
        classes = kind.classes(file, rows)
        test = None if tested is None else kind.read(read(tested), columns)
        if test is not None:
            kind.check_test(tested, test, classes)
        data.append((rows, test, classes))
    given = {**options, **head, "task": task, "name": name, "sweep": sweeps, "column": columns,
             "train": digest([names[1:] and names, *(rows for rows, _, _ in data)]),
             "eval": digest([test for _, test, _ in data]), "save_steps": save_steps}  # fmt: skip
    check(Path(output), given, resume)
    from .training import Job, train

    shown = wants_progress(as_json)
    be_quiet(shown)
    keys = ("method", "epochs", "lr", "batch_size", "seed")
    own = {key: options.pop(key) for key in keys}

    def job(number: int, name: str, folder: Path | None, changes: dict[str, Any]) -> Job:
        rows, tested, classes = data[number]
        heads = {key: value for key, value in changes.items() if key == "layers"}
        others = {key: value for key, value in changes.items() if key != "layers"}
        return Job(name=name, rows=rows, tested=tested, classes=classes, output=folder,
                   head={**head, **heads}, **{**own, **others})  # fmt: skip

    options |= {"task": task, "folder": Path(output), "progress": shown, "columns": columns,
                "save_steps": save_steps, "options": given}  # fmt: skip
    if tried:
        jobs = [job(0, f"{names[0]}-{i}", None, each) for i, each in enumerate(tried, 1)]
        found = train(jobs, best=names[0], **options)
        if as_json:
            print_json(found)
            return
        titles = ["name", *tried[0], "steps", "train_loss", *([kind.metric[0]] * bool(eval_files))]
        swept = [{**each, **metrics} for each, metrics in zip(tried, found, strict=True)]
        print_table([*titles, "output"], [[m.get(t) for t in (*titles, "output")] for m in swept])
        return
    found = train([job(i, each, folders[i], {}) for i, each in enumerate(names)], **options)
    if len(found) == 1:
        print_facts(found[0], as_json)
    elif as_json:
        print_json(found)
    else:
        titles = ["name", "train_rows", "steps", "train_loss"]
        titles += [kind.metric[0]] if eval_files else []
        print_table([*titles, "output"], [[m[t] for t in (*titles, "output")] for m in found])


_SWEPT = ("method", "epochs", "lr", "batch-size", "seed", "layers")


def _tried(sweeps: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the combinations of the values of `--sweep`.

    Raises:
        UsageError: one is not OPTION=VALUES, or a value is not legal.
    """
    types = {each.opts[0][2:]: each.type for each in click.get_current_context().command.params}
    grid: dict[str, list[Any]] = {}
    for text in sweeps:
        key, _, given = text.partition("=")
        try:
            if key not in _SWEPT:
                raise click.UsageError(f"the options are {', '.join(_SWEPT)}")
            # commas in brackets belong to a config string
            values = re.split(r",(?![^\[]*\])", given)
            grid[key.replace("-", "_")] = [types[key].convert(each, None, None) for each in values]
        except click.UsageError as error:
            raise click.UsageError(
                f"--sweep {text}: {error.message.removesuffix('.')}. Write --sweep lr=1e-4,1e-3 or "
                "--sweep epochs=1,3."
            ) from error
    if not grid:
        return []
    return [dict(zip(grid, each, strict=True)) for each in itertools.product(*grid.values())]


@command(
    "predict", example='adapterzoo predict runs/reviews --text "A film to remember." --format jsonl'
)
@click.argument("path", callback=_path)
@click.option("--text", multiple=True, help="A text, or the words to tag, or a prompt; may be "
              "repeated.")  # fmt: skip
@click.option("--question", help="A question, with --context.")
@click.option("--context", help="The text that answers the question.")
@click.option("--image", multiple=True, metavar="FILE", help="An image; may be repeated.")
@click.option("--file", metavar="FILE", help="Rows, as for `train`, without what is predicted.")
@click.option("--output", metavar="FILE", help="File to write.  [default: standard output]")
@click.option("--format", "written", default="csv", type=click.Choice(("csv", "jsonl")))
@click.option("--json", "as_json", is_flag=True, help="The same as --format jsonl.")
@_model
@_batch_size
@click.option("--max-length", type=click.IntRange(min=1),
              help="Maximum tokens per text.  [default: as in training]")  # fmt: skip
@click.option("--max-new-tokens", default=64, type=click.IntRange(min=1),
              help="Maximum tokens to generate.")  # fmt: skip
@_device
@_columns
@_revision
def predict_command(
    path: str,
    text: tuple[str, ...],
    question: str | None,
    context: str | None,
    image: tuple[str, ...],
    file: str | None,
    output: str | None,
    written: str,
    as_json: bool,
    revision: str | None,
    **options: Any,
) -> None:
    """Predict with an adapter: labels, tags, answers or texts, as the adapter was trained.

    PATH is a folder or 'user/repository'. Labels come with all probabilities, tags for each word,
    answers with the places of their first and last character. A regression head gives its value.
    """
    typed = {
        "text": [{"text": each} for each in text],
        "image": [{"image": each} for each in image],
        "question": [{"question": question, "context": context}] if question and context else [],
    }
    if (question is None) != (context is None):
        raise click.UsageError("Write both --question and --context.")
    if sum(map(bool, typed.values())) + (file is not None) != 1:
        raise click.UsageError("Write one of --text, --image, --file, or --question with "
                               "--context.")  # fmt: skip
    checks.check_file(output)
    if file is not None:
        table = read(Path(file))
    else:
        rows = [row for each in typed.values() for row in each]
        table = DataTable(Path("the command"), rows, [*range(1, len(rows) + 1)], is_typed=True)
    shown = wants_progress(as_json)
    checkpoint = _checkpoint(path, revision, shown)
    settings = checkpoint.settings
    if (task := tasks.get(str(settings.get("task")))) is not None:
        task.read_inputs(table, {**settings.get("columns", {}), **options["columns"]}, path)

    be_quiet(shown)

    from .training import predict, write

    task, predictions = predict(checkpoint, table, progress=shown, **options)
    kind = "jsonl" if as_json else written
    if output is None:
        write(sys.stdout, predictions, kind, task.separator)
        return
    with Path(output).open("w", encoding="utf-8", newline="") as stream:
        write(stream, predictions, kind, task.separator)
    note(f"{output}: {len(predictions):,} rows")


# --- look at a checkpoint ---


@command("info", example="adapterzoo info runs/reviews")
@click.argument("path", callback=_path)
@click.option("--model", metavar="MODEL", help="Base model to compare with, folder or Hub name.")
@_revision
@_json
def info_command(path: str, model: str | None, revision: str | None, as_json: bool) -> None:
    """Describe an adapter: format, config, base model, head, sizes, fingerprint.

    PATH is a folder, or 'user/repository' on the Hub, in the native format, AdapterHub's or PEFT's.
    "pinned" is a name by which every command and load_adapter accept this adapter and no other.
    Configs of other formats are shown unchanged; with --model the adapter is compared with the
    model, and its config is shown as adapterzoo reads it.
    """
    checkpoint = _checkpoint(path, revision)
    if model is None:
        print_facts(checkpoint.facts(), as_json)
        return
    be_quiet()

    from .inspecting import facts_of

    print_facts(facts_of(checkpoint, model), as_json)


@command("verify", example="adapterzoo verify runs/reviews --model bert-base-uncased")
@click.argument("path", callback=_path)
@click.option("--model", metavar="MODEL", help="Base model to compare every tensor with.")
@click.option("--fingerprint", help="Expected fingerprint, as printed by `info`.")
@click.option("--for", "server", type=click.Choice(SERVERS[:-1]),
              help="Prove that this server computes what the adapter computes here.")  # fmt: skip
@click.option("--adapter", metavar="SRC", callback=_path,
              help="With --for: the adapter that was exported to PATH.")  # fmt: skip
@click.option("--converter", metavar="FILE",
              help="With --for gguf: the converter of llama.cpp, to run instead of "
              "following its rules.")  # fmt: skip
@_revision
@_json
def verify_command(
    path: str,
    model: str | None,
    fingerprint: str | None,
    server: str | None,
    adapter: str | None,
    converter: str | None,
    revision: str | None,
    as_json: bool,
) -> None:
    """Check an adapter: complete files, correct digests, finite values; or prove an export.

    Only the native format has digests: in AdapterHub's and PEFT's a changed value cannot be
    detected, and a missing tensor only with --model, which compares every tensor with that model.
    Its weights are read only if the adapter's files hold copies of some. Exits with 1 if anything
    is wrong.

    With --for, PATH is read as that server reads it, by rules from its source, and applied to the
    plain --model. Its logits and weights are compared with those of SRC here. Without SRC, they are
    compared with those of PATH itself, which hides values that are wrong in its files.
    """
    if server is not None and model is None:
        raise click.UsageError("--for needs --model with the base model.")
    for option, value in {"adapter": adapter, "converter": converter}.items():
        if server is None and value is not None:
            raise click.UsageError(f"--{option} needs --for with a server.")

    if server is not None:
        checkpoint = _checkpoint(path, revision)
        original = None if adapter is None else _checkpoint(adapter, None)
        be_quiet()

        from .inspecting import prove

        proof = prove(checkpoint, server, str(model), original, converter)
        if as_json:
            print_json(proof.to_dict())
        else:
            click.echo(printable(str(proof), allowed="\n"))
        sys.exit(not proof.is_equal)
    try:
        checkpoint = _checkpoint(path, revision)
        if fingerprint is not None:
            checks.check_has_fingerprint(checkpoint, model)
        be_quiet()

        from .inspecting import verify

        facts = verify(checkpoint, model, fingerprint)
    except AdapterZooError as error:
        if as_json:
            print_json({"ok": False, "path": path, "error": str(error)})
        raise
    has_digests = checkpoint.format == "native"
    if as_json:
        shown = ("path", "format", "holds", "tensors", "parameters", "fingerprint",
                 "compared_with")  # fmt: skip
        print_json({"ok": True, "digests": has_digests} | {key: facts[key] for key in shown})
        return
    looked_at = "complete, digests correct" if has_digests else "readable"
    what = f"{facts['format']} {facts['holds']}, {facts['tensors']:,} tensors"
    click.echo(f"{path}: {what}: {looked_at}, all values finite")
    if not has_digests:
        click.echo(
            "this format has no digests: a changed value cannot be detected, and a missing tensor "
            "only with --model"
        )
    if facts["compared_with"] is not None:
        click.echo(f"fits {facts['compared_with']}: every tensor has its layer and shape there")
    if facts["fingerprint"] is not None:
        click.echo(f"fingerprint {facts['fingerprint']}")


@command("report", example="adapterzoo report bert-base-uncased runs/reviews --plot report.svg")
@click.argument("model")
@click.argument("adapter", callback=_path)
@click.option("--plot", metavar="FILE", help="Write a heat map too: .svg, .png or .pdf.")
@_revision
@_json
def report_command(
    model: str, adapter: str, plot: str | None, revision: str | None, as_json: bool
) -> None:
    """Show which layers of MODEL an adapter reaches, and how much it changes each of them.

    The table has ‖ΔW‖ / ‖W‖ for each block and kind of layer, with the Frobenius norms of the
    change and of the base model's weight; warnings stand above it. MODEL is loaded with its
    weights; --plot needs matplotlib.
    """
    checks.check_plot(plot)
    shown = wants_progress(as_json)
    checkpoint = _checkpoint(adapter, revision, shown)
    be_quiet(shown)

    from .inspecting import report_on

    report = report_on(checkpoint, model)
    if plot is not None:
        report.plot(plot)
        note(f"{plot}: a heat map of {len(report.blocks):,} blocks")
    if as_json:
        print_json(report.to_dict())
    else:
        click.echo(str(report))


# --- write a checkpoint in another form ---


def _target(ctx: click.Context, option: click.Parameter, value: str) -> str:
    """Check a format or a method.

    Raises:
        BadParameter: it is neither.
    """
    if value not in FORMATS and value not in (forms := change_forms()):
        raise click.BadParameter(
            f"{value!r} is neither a format ({listing(FORMATS)}) nor a conversion method "
            f"({listing(forms)})."
        )
    return value


@command("convert", example="adapterzoo convert runs/reviews served/reviews --to peft")
@click.argument("src", callback=_path)
@click.argument("dst")
@click.option(
    "--to",
    required=True,
    callback=_target,
    metavar=f"[{'|'.join(FORMATS)}|METHOD]",
    help="Format to write, or method to convert to.",
)
@_model
@click.option("--name", help="Name of the adapter in DST.  [default: its own]")
@_head
@_revision
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
    report = options.pop("report")
    checks.check_name(name)
    checks.check_file(report)
    checks.check_folder(dst)
    shown = wants_progress(False)
    if to in FORMATS:
        checks.refuse_to_replace(dst, to)
    checkpoint = _checkpoint(src, revision, shown)
    if to not in FORMATS:
        checks.refuse_to_replace(dst, checkpoint.format)
    be_quiet(shown)

    from .converting import convert, convert_method

    if to in FORMATS:
        convert(checkpoint, dst, to, model, name, head)
        click.echo(f"{dst}: {checkpoint.kind} in the format {to!r}, from {checkpoint.format!r}")
        return
    certificate = convert_method(checkpoint, dst, to, model, name, head, **options)
    click.echo(str(certificate))
    if report is not None:
        Path(report).write_text(f"{json.dumps(certificate.to_dict(), indent=2)}\n", "utf-8")
    click.echo(f"{dst}: {certificate.to} from {certificate.method}, as {checkpoint.format!r}")


@command("export", example="adapterzoo export runs/reviews served/reviews --serve vllm")
@click.argument("src", callback=_path)
@click.argument("dst")
@click.option("--serve", required=True, type=click.Choice(SERVERS),
              help="The server; any: every one of them.")  # fmt: skip
@_model
@click.option("--name", help="Name of the adapter in the commands that are printed.  "
              "[default: its own]")  # fmt: skip
@_head
@_revision
@click.option("--rank", type=click.IntRange(min=1),
              help="Largest rank, if the export is not exact.")  # fmt: skip
@click.option(
    "--energy",
    type=click.FloatRange(0, 1, min_open=True),
    help="Share of the squared singular values to keep in each layer of such an adapter.",
)
@click.option("--dtype", type=click.Choice(checks.DTYPES),
              help="dtype of DST.  [default: that of SRC]")  # fmt: skip
@click.option("--merge", is_flag=True, help="Write a whole model with the adapter merged instead.")
@click.option("--max-shard-size", metavar="SIZE",
              help="With --merge: largest file, such as 5GB.  [default: that of transformers]"
              )  # fmt: skip
@_json
def export_command(
    src: str,
    dst: str,
    serve: str,
    merge: bool,
    max_shard_size: str | None,
    as_json: bool,
    revision: str | None,
    **options: Any,
) -> None:
    """Write an adapter as a server reads it, and print how to start the server.

    SRC is a folder or 'user/repository', DST a folder. DST has PEFT's files with a LoRA that the
    server computes exactly; what it does not read is refused. An adapter whose change has low-rank
    factors becomes a LoRA; for others, --rank or --energy allow the nearest one, and the errors are
    printed. With --merge, DST is a plain model in the class that has the adapter's head.
    """
    lacking = [n for n in ("rank", "energy", "dtype", "name") if merge and options[n] is not None]
    if lacking:
        raise click.UsageError(f"--{lacking[0]} has no effect with --merge.")
    if max_shard_size is not None and not merge:
        raise click.UsageError("--max-shard-size needs --merge.")
    checks.check_name(options["name"])
    if merge:
        checks.check_new(dst)
    else:
        checks.check_folder(dst)
        checks.refuse_to_replace(dst, "peft")
    shown = wants_progress(as_json)
    checkpoint = _checkpoint(src, revision, shown)
    be_quiet(shown)

    from .converting import export, export_merged

    if merge:
        model, head = options["model"], options["head"]
        found = export_merged(checkpoint, dst, serve, model, head, max_shard_size)
        facts, lines = found, [f"{dst}: a {found['class']}", *found["commands"]]
    else:
        written = export(checkpoint, dst, serve, **options)
        facts, lines = written.to_dict(), [str(written), *written.commands]
    if as_json:
        print_json(facts)
    else:
        click.echo(printable("\n".join(lines), allowed="\n"))


@command("merge", example="adapterzoo merge bert-base-uncased runs/reviews merged/reviews")
@click.argument("base")
@click.argument("adapter", callback=_path)
@click.argument("out")
@click.option(
    "--as",
    "architecture",
    metavar="CLASS",
    help="transformers class to write, such as BertForSequenceClassification.  "
    "[default: that of BASE, or one that has the adapter's head]",
)
@_head
@_revision
def merge_command(
    base: str, adapter: str, out: str, architecture: str | None, head: bool, revision: str | None
) -> None:
    """Write a plain transformers model that computes what BASE computes with the adapter.

    OUT is a new folder for `AutoModel.from_pretrained`; adapterzoo is not needed to load it. Only
    methods that change weights can be merged. The adapter's head replaces that of BASE in a class
    of transformers that has such a head; if there is none, BASE keeps its class and head.
    """
    checks.check_new(out)
    shown = wants_progress(False)
    checkpoint = _checkpoint(adapter, revision, shown)
    be_quiet(shown)

    from .converting import merge

    click.echo(f"{out}: a {merge(checkpoint, base, out, architecture, head)}")


# --- serving ---


@command("serve", example="adapterzoo serve org/model --adapters runs/a --adapters b=runs/b")
@click.argument("model")
@click.option("--adapters", multiple=True, metavar="ADAPTER",
              help="Folder or Hub name, or NAME=FOLDER; may be repeated.")  # fmt: skip
@click.option("--name", help="Name of MODEL in requests.  [default: its last part or Hub name]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535))
@_device
@click.option("--dtype", default="auto", type=click.Choice(("auto", *checks.DTYPES)),
              help="dtype of the base model; auto: that of its file.")  # fmt: skip
@click.option("--temperature", type=click.FloatRange(min=0),
              help="For all requests; 0: the likeliest token.  [default: MODEL's]")  # fmt: skip
@click.option("--slots", type=click.IntRange(min=1),
              help="Adapters of one kind in one batch.  [default: all, up to 8]")  # fmt: skip
@click.option("--max-bytes", type=click.IntRange(min=1),
              help="Maximum bytes of adapters, on the device and the CPU.  "
              "[default: no limit]")  # fmt: skip
@click.option("--num-blocks", type=click.IntRange(min=1),
              help="Blocks of the cache.  [default: as the memory allows]")  # fmt: skip
@click.option("--page-size", type=click.IntRange(min=1), help="Tokens of a block.")
@click.option("--max-batch-tokens", type=click.IntRange(min=1), help="Tokens of a step.")
def serve_command(
    model: str,
    adapters: tuple[str, ...],
    host: str,
    port: int,
    num_blocks: int | None,
    page_size: int | None,
    max_batch_tokens: int | None,
    **options: Any,
) -> None:
    """Serve MODEL and adapters over OpenAI's protocol, all in one batch of requests.

    A request names its adapter in "model": NAME:ADAPTER, or NAME for the base model. The server is
    that of transformers, which pip install 'adapterzoo[serve]' installs.
    """
    if not all(map(importlib.util.find_spec, ("openai", "uvicorn"))):
        raise ConfigError("openai or uvicorn is missing. Write pip install 'adapterzoo[serve]'.")
    for each in adapters:
        _checkpoint(each.rpartition("=")[2], None)

    from adapterzoo.serving import server

    be_quiet()
    served = server.load(model, adapters, **options)
    for each in served.names:
        note(each)
    sizes = {"num_blocks": num_blocks, "page_size": page_size, "max_batch_tokens": max_batch_tokens}
    server.run(served, host, port, **{n: v for n, v in sizes.items() if v is not None})


# --- the Hub ---


@command("push", example="adapterzoo push runs/reviews user/reviews --metric accuracy=0.91")
@click.argument("path", callback=_path)
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
@_json
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
    results = {}
    for metric in metrics:
        name, _, value = metric.partition("=")
        try:
            results[name] = float(value)
        except ValueError as error:
            raise click.UsageError(f"--metric {metric!r} is not NAME=NUMBER.") from error
    checks.check_pushable(path)

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
@_json
def list_command(as_json: bool, **options: Any) -> None:
    """List adapters of the Hub that can be loaded here, the most downloaded first."""
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


# --- methods and this machine ---


@command("methods", example="adapterzoo methods --model gpt2")
@click.option("--model", metavar="MODEL",
              help="Folder or Hub name of the model in which parameters are counted.  "
              "[default: BERT base]")  # fmt: skip
@_json
def methods_command(model: str | None, as_json: bool) -> None:
    """List all config strings, for --method of `train` and for `add_adapter`.

    Each has the number of parameters with its default config, whether it can be merged into the
    weights, the servers for which `export` writes it, exactly or as the nearest LoRA ("SVD"), and
    the formula of its adapters. The servers are those for MODEL, or for a Llama; without any, a
    method is served by `serve`.
    """
    from .methods import table

    be_quiet()
    found = table(model)
    if as_json:
        print_json(found)
        return
    rows = [
        (", ".join([each["name"], *each["aliases"]]), each["parameters"],
         {True: "yes", False: "no", None: "-"}[each["merges"]], _servers(each["servers"]),
         each["formula"] or each["problem"].partition("\n")[0])
        for each in found
    ]  # fmt: skip
    print_table(("method", "parameters", "merges", "servers", "formula"), rows)


def _servers(found: dict[str, str]) -> str:
    """Return the names of servers, or "all", and how they take a method; it is the same for all."""
    names = "all" if {*found} == {*SERVERS[:-1]} else ", ".join(found)
    return f"{names} (SVD)" if "SVD" in found.values() else names or "-"


@command("doctor", example="adapterzoo doctor --json")
@_json
def doctor_command(as_json: bool) -> None:
    """Show versions, devices, dtypes, kernels and the Hub's cache.

    Exits with 1 if a library is missing or too old.
    """
    from .doctor import examine

    be_quiet()
    found = examine()
    if as_json:
        print_json(found)
        sys.exit(bool(found["problems"]))
    versions = {name: version or "not installed" for name, version in found["versions"].items()}
    broken = {name: f"cannot be imported ({why})" for name, why in found["peers"].items() if why}
    print_facts({name: broken.get(name, version) for name, version in versions.items()})
    click.echo()
    for device in found["devices"]:
        click.echo(f"{device['name']}: {device['what']}")
        click.echo(f"  dtypes   {', '.join(device['dtypes'])}")
        click.echo(f"  kernels  {device['kernels']}")
    click.echo()
    print_facts(found["hub"])
    click.echo()
    for problem in found["problems"]:
        click.echo(f"problem: {problem}")
    if found["problems"]:
        sys.exit(1)
    click.echo("No problem found.")
