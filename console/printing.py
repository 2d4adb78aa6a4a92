"""Printing for people, without harm to those who read through a pipe."""

import sys

from rich.console import Console

PIPE_WIDTH = 200


def wide_console() -> Console:
    """Give a console as wide as the terminal; into a pipe, wide enough to cut nothing off."""
    return Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)
