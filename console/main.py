"""The command `quotient`."""

import faulthandler
import math
import os
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import msgspec
import yaml
from rich.markup import escape
from rich.table import Table

from console.errors import CommandError
from console.printing import wide_console
from settings.configuration import Configuration
from settings.loading import ConfigurationError, Loaded, environment_variable, load, lookup, value_paths
from settings.logs import configure_logs

# Each command, and the module that defines it. A new command is a line here and a click command of that name there.
COMMANDS = {
    "admit": "console.admit",
    "arm": "console.failure_policy",
    "certs": "console.certs",
    "controller": "console.controller",
    "disarm": "console.failure_policy",
    "doctor": "console.doctor",
    "lint": "console.lint",
    "local": "console.local",
    "nodeplugin": "console.nodeplugin",
    "quota": "console.quota",
    "scheduler": "console.scheduler",
    "simulate": "console.simulate",
    "top": "console.top",
    "webhook": "console.webhook",
    "what-if": "console.what_if",
    "why": "console.why",
}


class Commands(click.Group):
    """Imports a command's module only when it is called: a component's process must not carry all the others."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted([*super().list_commands(context), *COMMANDS])

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name in COMMANDS:
            command: click.Command = getattr(import_module(COMMANDS[name]), name.replace("-", "_"))
            return command
        return super().get_command(context, name)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(version("quotient"), prog_name="quotient")
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="QUOTIENT_CONFIG",
    help="Configuration file (YAML); defaults apply without one.",
)
@click.option("--set", "flags", multiple=True, metavar="PATH=VALUE", help="Override one value, as in log.level=debug.")
@click.pass_context
def main(context: click.Context, file: Path | None, flags: tuple[str, ...]) -> None:
    """Quotient divides GPUs among Kubernetes pods and holds every namespace to its quota.

    Start with `quotient local`: it needs no cluster and no GPU. `quotient config` shows the effective configuration.
    """
    try:
        loaded = load(file, os.environ, flags)
    except ConfigurationError as error:
        raise CommandError(str(error)) from None
    configure_logs(loaded.configuration.log.level, loaded.configuration.log.format)
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        # A crash in a library's C code prints the stacks of all threads instead of nothing.
        faulthandler.enable(sys.__stderr__)
    context.obj = loaded


@main.command(short_help="Show the effective configuration.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.pass_obj
def config(loaded: Loaded, output: str) -> None:
    """Show the effective configuration, and where each value comes from."""
    values = msgspec.to_builtins(loaded.configuration)
    if output == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(values), indent=2).decode())
        return
    table = Table("setting", "value", "from", "environment variable", box=None)
    for path in value_paths(Configuration):
        row = (
            path,
            format_setting(lookup(values, path)),
            loaded.sources.get(path, "default"),
            environment_variable(path),
        )
        table.add_row(*map(escape, row))
    wide_console().print(table)


def format_setting(value: Any) -> str:  # noqa: ANN401 - any value of the configuration
    """Return a value as a configuration file would have it; text without quotes."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return yaml.safe_dump(list(value), default_flow_style=True, width=math.inf).strip()
    return str(value)


if __name__ == "__main__":
    main()
