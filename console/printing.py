"""Printing for people, without harm to those who read through a pipe."""

import sys
from collections.abc import Iterable
from typing import Any

import yaml
from rich.console import Console

PIPE_WIDTH = 200


def wide_console() -> Console:
    """Give a console as wide as the terminal; into a pipe, wide enough to cut nothing off."""
    return Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)


class PlainDumper(yaml.SafeDumper):
    """YAML as people write it: the same thing twice rather than a reference to it."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ANN401, ARG002
        """Write no references."""
        return True


def as_yaml(documents: Iterable[Any]) -> str:
    """Write documents as YAML."""
    return yaml.dump_all(documents, Dumper=PlainDumper, sort_keys=False, width=PIPE_WIDTH, allow_unicode=True)
