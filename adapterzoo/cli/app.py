"""The command `adapterzoo`: its subcommands, their examples, and exit codes.

0: success; 1: an error, with one message on standard error; 2: invalid usage.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import click

from adapterzoo import __version__
from adapterzoo.errors import AdapterZooError, naming

from .hints import spell, this_call
from .output import printable

F = TypeVar("F", bound=Callable[..., Any])

# commands → modules, in the order in which users need them
_HOMES = {
    "train": "learning",
    "predict": "learning",
    "info": "inspecting",
    "verify": "inspecting",
    "convert": "changing",
    "merge": "changing",
    "push": "publishing",
    "list": "publishing",
    "doctor": "diagnosing",
}


class RefusedError(click.ClickException):
    """An error of the library, shown as its one message."""

    exit_code = 1

    def show(self, file: Any = None) -> None:
        """Print the message.

        Args:
            file: instead of standard error.
        """
        # it may quote names from files; some messages have several lines
        message = printable(self.message, kept="\n")
        click.echo(f"adapterzoo: {message}", file=file, err=True)


class ExampleCommand(click.Command):
    """A command whose epilog is an example, in the lines that a user types."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the example.

        Args:
            ctx: of this call.
            formatter: takes the lines.
        """
        with formatter.section("Example"):
            for line in (self.epilog or "").splitlines():
                formatter.write(f"{'':>{formatter.current_indent}}{line}\n")

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command.

        Args:
            ctx: of this call.

        Raises:
            RefusedError: the library raised an error.
        """
        try:
            with naming(this_call(), spell):
                return super().invoke(ctx)
        except AdapterZooError as error:
            raise RefusedError(str(error)) from error


class App(click.Group):
    """The commands, each imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return their names.

        Args:
            ctx: of this call.
        """
        return list(_HOMES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of a name; None where there is none.

        Args:
            ctx: of this call.
            cmd_name: the name that the user wrote.
        """
        if cmd_name not in _HOMES:
            return None
        module = importlib.import_module(f".{_HOMES[cmd_name]}", __package__)
        found: click.Command = vars(module)[f"{cmd_name}_command"]
        return found


@click.group(cls=App, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="adapterzoo")
def main() -> None:
    """Adapters for transformers: train, use, inspect, convert, merge and publish them."""


def command(name: str, example: str) -> Callable[[Callable[..., None]], ExampleCommand]:
    """Decorate a function to make it a command; its docstring is the help.

    Args:
        name: of the command.
        example: the lines that a user types.
    """
    settings = {"help_option_names": ["-h", "--help"], "show_default": True}

    def make(function: Callable[..., None]) -> ExampleCommand:
        # the first sentence, uncut
        short = (function.__doc__ or "").partition(".")[0].replace("\n", " ") + "."
        return click.command(
            name, ExampleCommand, epilog=example, short_help=short, context_settings=settings
        )(function)

    return make


def json_option(function: F) -> F:
    """Add the option `--json`, for programs."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")(
        function
    )


def model_option(function: F) -> F:
    """Add the option `--model`, for commands whose checkpoint may name its base model."""
    return click.option(
        "--model",
        metavar="MODEL",
        help="Folder or Hub name of the base model.  [default: the one named by the adapter]",
    )(function)
