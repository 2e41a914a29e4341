"""Hints in terms of the command line: the current command, and options in place of arguments.

The library's hints name arguments by `errors.argument`; `spell` returns the matching option.
"""

from __future__ import annotations

import click

# Python arguments whose options have other names
_OPTIONS = {"format": ("to",), "load_as": ("name",), "model": ("model", "base"),
            "with_head": ("head",)}  # fmt: skip
# Python arguments that are set by environment variables
_VARIABLES = {"cache_dir": "HF_HUB_CACHE=…", "token": "HF_TOKEN=…"}
_NO_TOKEN = "HF_HUB_DISABLE_IMPLICIT_TOKEN=1"


def this_call() -> str:
    """Return the command as the user wrote it, without its options."""
    context = click.get_current_context(silent=True)
    if context is None:
        return "adapterzoo"
    given = [
        str(context.params[parameter.name])
        for parameter in context.command.params
        if isinstance(parameter, click.Argument) and parameter.name in context.params
    ]
    return " ".join([str(context.info_name), *given])


def spell(name: str, value: object) -> str:
    """Return a Python argument as an option of the current command.

    Args:
        name: of the argument.
        value: of the argument.
    """
    context = click.get_current_context()
    if (own := _option(context.command, name)) is not None:
        return _written(own, value)
    if name in _VARIABLES:
        return _NO_TOKEN if value is False else _VARIABLES[name]
    app = context.find_root().command
    # `convert` writes an adapter that follows the hint
    convert = app.get_command(context, "convert") if isinstance(app, click.Group) else None
    if convert is not None and (other := _option(convert, name)) is not None:
        return f"`adapterzoo convert {_written(other, value)}`"
    return f"{name}={value!r}"


def _option(command: click.Command, name: str) -> click.Parameter | None:
    parameters = {parameter.name: parameter for parameter in command.params}
    names = (option for option in _OPTIONS.get(name, (name,)) if option in parameters)
    return next((parameters[option] for option in names), None)


def _written(parameter: click.Parameter, value: object) -> str:
    if isinstance(parameter, click.Argument):
        return parameter.human_readable_name
    if isinstance(value, bool):
        return parameter.opts[0] if value else parameter.secondary_opts[0]
    return f"{parameter.opts[0]} {value}"
