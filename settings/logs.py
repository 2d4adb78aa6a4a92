"""Logs: one event per line, as JSON for programs or aligned text for people, from our code and from libraries alike."""

import logging
import sys
from typing import Literal, TextIO

import structlog
from structlog.typing import Processor

# Applied to our own events and to the records of libraries, which use the standard library's logging.
SHARED: list[Processor] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.ExtraAdder(),
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.StackInfoRenderer(),
]


def configure_logs(level: str, format_: Literal["auto", "json", "console"], stream: TextIO | None = None) -> None:
    """Set up logging of the whole process, to standard error by default; `auto` is text on a terminal, else JSON."""
    target = stream or sys.stderr
    is_text = format_ == "console" or (format_ == "auto" and target.isatty())
    renderers: list[Processor] = (
        [structlog.dev.ConsoleRenderer(colors=target.isatty())]
        if is_text
        # In JSON a traceback is a field, so that an event stays on one line.
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    handler = logging.StreamHandler(target)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=SHARED,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    root = logging.getLogger()
    # Replaced, not added: a second call must not print every event twice.
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *SHARED,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        # Loggers made at import time have to follow this configuration.
        cache_logger_on_first_use=False,
    )
