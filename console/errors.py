"""Errors of commands that are not wrong usage: files, quotas, configuration, the cluster."""

import click


class CommandError(click.ClickException):
    """Printed as `Error: ...` without click's usage lines, which help only with a wrong command line."""

    # As click's usage errors: scripts rely on 2 for anything that kept a command from deciding.
    exit_code = 2
