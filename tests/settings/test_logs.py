"""Logs: one event per line, for programs and for people."""

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from settings.logs import configure_logs


@pytest.fixture(autouse=True)
def logging_restored() -> Iterator[None]:
    """Leaves the process's logging as it was."""
    handlers, level = logging.getLogger().handlers[:], logging.getLogger().level
    yield
    logging.getLogger().handlers[:] = handlers
    logging.getLogger().setLevel(level)
    structlog.reset_defaults()


def test_json_has_one_event_per_line_with_its_fields() -> None:
    """A line break in a value does not break the line."""
    stream = io.StringIO()
    configure_logs("info", "json", stream)
    structlog.get_logger().info("pod_admitted", pod="a/b", note="two\nlines")
    logging.getLogger("urllib3").warning("retrying %s", "soon", extra={"attempt": 2})
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["event"], first["level"], first["pod"], first["note"]) == (
        "pod_admitted",
        "info",
        "a/b",
        "two\nlines",
    )
    assert first["timestamp"].endswith("Z")
    assert (second["event"], second["level"], second["attempt"]) == ("retrying soon", "warning", 2)


def test_a_traceback_is_a_field_of_its_event() -> None:
    stream = io.StringIO()
    configure_logs("info", "json", stream)
    structlog.get_logger().error("failed", exc_info=RuntimeError("boom"))
    (line,) = stream.getvalue().splitlines()
    assert "RuntimeError: boom" in json.loads(line)["exception"]


def test_the_level_applies_to_our_events_and_to_libraries() -> None:
    stream = io.StringIO()
    configure_logs("warning", "json", stream)
    structlog.get_logger().info("hidden")
    logging.getLogger("urllib3").info("hidden")
    structlog.get_logger().warning("shown")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["shown"]


def test_text_has_no_colours_outside_a_terminal() -> None:
    stream = io.StringIO()
    configure_logs("info", "console", stream)
    structlog.get_logger().info("pod_admitted", pod="a/b")
    assert "pod_admitted" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_auto_is_json_outside_a_terminal() -> None:
    stream = io.StringIO()
    configure_logs("info", "auto", stream)
    structlog.get_logger().info("pod_admitted")
    assert json.loads(stream.getvalue())["event"] == "pod_admitted"
