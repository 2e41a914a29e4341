"""`doctor`: installed packages and devices of this machine, and missing ones."""

from __future__ import annotations

from typing import Any

import click

from .app import command, json_option
from .output import be_quiet, print_facts, print_json


@command("doctor", example="adapterzoo doctor --json")
@json_option
def doctor_command(as_json: bool) -> None:
    """Show versions, devices, dtypes, kernels and the Hub's cache.

    Exits with 1 if a library is missing or too old.
    """
    from .health import examine

    be_quiet(False)
    found = examine()
    if as_json:
        print_json(found)
    else:
        _show(found)
    if found["problems"]:
        click.get_current_context().exit(1)


def _show(found: dict[str, Any]) -> None:
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
    if not found["problems"]:
        click.echo("No problem found.")
