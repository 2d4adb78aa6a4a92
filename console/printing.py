"""Output for terminals that stays complete when it is piped."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import click
import yaml
from rich.console import Console

PIPE_WIDTH = 200
# Some warnings are about what tenants wrote: they must not hide the answer.
MAX_WARNINGS = 8


def wide_console() -> Console:
    """Return a console as wide as the terminal; into a pipe, wide enough that no table cell is cut off."""
    return Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)


def count_of(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def show_warnings(warnings: Sequence[str]) -> None:
    """Print warnings on standard error, where they are not taken for a part of the output."""
    for warning in warnings[:MAX_WARNINGS]:
        text = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in warning)
        click.echo(f"warning: {text}", err=True)
    if len(warnings) > MAX_WARNINGS:
        click.echo(f"warning: and {len(warnings) - MAX_WARNINGS} more", err=True)


class PlainDumper(yaml.SafeDumper):
    """Writes repeated values out instead of as YAML aliases."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ANN401, ARG002
        return True


def as_yaml(documents: Iterable[Any]) -> str:
    return yaml.dump_all(documents, Dumper=PlainDumper, sort_keys=False, width=PIPE_WIDTH, allow_unicode=True)
