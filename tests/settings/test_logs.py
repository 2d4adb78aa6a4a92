"""Logs: one event a line, for programs and for people."""

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from settings.logs import configure_logs


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Leave the process as it was."""
    handlers, level = logging.getLogger().handlers[:], logging.getLogger().level
    yield
    logging.getLogger().handlers[:] = handlers
    logging.getLogger().setLevel(level)
    structlog.reset_defaults()


def test_json_has_one_event_a_line_with_its_fields() -> None:
    """Line breaks within a value do not break the line."""
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


def test_an_exception_stays_on_the_line_of_its_event() -> None:
    """A traceback is a field."""
    stream = io.StringIO()
    configure_logs("info", "json", stream)
    structlog.get_logger().error("failed", exc_info=RuntimeError("boom"))
    (line,) = stream.getvalue().splitlines()
    assert "RuntimeError: boom" in json.loads(line)["exception"]


def test_the_level_holds_for_ours_and_for_libraries() -> None:
    """What is below it costs no line."""
    stream = io.StringIO()
    configure_logs("warning", "json", stream)
    structlog.get_logger().info("quiet")
    logging.getLogger("urllib3").info("quiet")
    structlog.get_logger().warning("loud")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["loud"]


def test_people_get_plain_lines() -> None:
    """Without colours where there is no terminal; `auto` chooses JSON there."""
    stream = io.StringIO()
    configure_logs("info", "console", stream)
    structlog.get_logger().info("pod_admitted", pod="a/b")
    assert "pod_admitted" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()
    other = io.StringIO()
    configure_logs("info", "auto", other)
    structlog.get_logger().info("pod_admitted")
    assert json.loads(other.getvalue())["event"] == "pod_admitted"
