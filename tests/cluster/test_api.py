"""Calls to an API server over HTTP: lists of several pages, and responses that do not come from an API server."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from cluster.api import ApiCluster, connect
from cluster.errors import Expired
from cluster.interface import ChangeType
from cluster.objects import CONFIG_MAPS, DEPLOYMENTS
from vcuda.decision import Unavailable

RESPONSES = {
    "a page": (200, b"<html>Sign in</html>"),
    "a redirect": (302, b""),
    "an error page": (502, b"<html>Bad gateway</html>"),
    "nothing": (200, b""),
    "half an object": (200, b'{"metadata": {"name": "o'),
    "an object of another shape": (200, b'{"metadata": []}'),
}


class FakeServer:
    """An HTTP server whose responses a function of path and query returns, and a cluster connected to it."""

    def __init__(self, respond: Callable[[str, dict[str, str]], tuple[int, bytes]], folder: Path) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                url = urlsplit(self.path)
                status, body = respond(url.path, dict(parse_qsl(url.query)))
                self.send_response(status)
                self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, name="fake-server", daemon=True).start()
        config = {
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{self._server.server_address[1]}"}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        (folder / "kubeconfig").write_text(json.dumps(config))
        self.cluster = connect(str(folder / "kubeconfig"))

    def __enter__(self) -> ApiCluster:
        return self.cluster

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(params=list(RESPONSES.values()), ids=list(RESPONSES))
def other_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ApiCluster]:
    """A cluster at whose address another server responds."""
    with FakeServer(lambda *_: request.param, tmp_path) as cluster:
        yield cluster


def test_an_unexpected_response_is_unavailable(other_server: ApiCluster) -> None:
    """Retryable, and without the decoder's own words."""
    with pytest.raises(Unavailable) as unavailable:
        other_server.get(CONFIG_MAPS, "one", "default")
    assert "`" not in str(unavailable.value)
    with pytest.raises(Unavailable):
        other_server.list(CONFIG_MAPS)


BOOKMARK = {
    "type": "BOOKMARK",
    "object": {
        "kind": "Deployment",
        "apiVersion": "apps/v1",
        "metadata": {"resourceVersion": "4711", "creationTimestamp": None},
        "spec": {"selector": None, "strategy": {}, "template": {"metadata": {}, "spec": {"containers": None}}},
        "status": {},
    },
}


def test_a_bookmark_is_read_although_its_other_fields_are_null(tmp_path: Path) -> None:
    """An API server sends one a minute; an informer that cannot read it lists everything again."""
    with FakeServer(lambda *_: (200, json.dumps(BOOKMARK).encode() + b"\n"), tmp_path) as cluster:
        (change,) = cluster.watch(DEPLOYMENTS, "1")
    assert (change.type, change.object.metadata.resource_version) == (ChangeType.BOOKMARK, "4711")


def test_a_missing_kubeconfig_is_unavailable_and_the_message_says_how_to_name_one(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"cluster\.kubeconfig"):
        connect(str(tmp_path / "none"))


def config_map_page(numbers: list[int], token: str) -> tuple[int, bytes]:
    items = [{"metadata": {"name": f"m-{number}", "namespace": "default"}} for number in numbers]
    return 200, json.dumps({"metadata": {"resourceVersion": "7", "continue": token}, "items": items}).encode()


def test_all_pages_of_a_list_are_read_at_one_version(tmp_path: Path) -> None:
    def respond(_: str, query: dict[str, str]) -> tuple[int, bytes]:
        first = int(query.get("continue", "0"))
        return config_map_page([first, first + 1], str(first + 2) if first < 8 else "")

    with FakeServer(respond, tmp_path) as cluster:
        pages = list(cluster.pages(CONFIG_MAPS))
        listing = cluster.list(CONFIG_MAPS)
    assert len(pages) == 5
    assert [item.metadata.name for item in listing.items] == [f"m-{number}" for number in range(10)]
    assert listing.resource_version == "7"


def test_a_list_whose_version_expires_between_pages_is_read_in_one_page(tmp_path: Path) -> None:
    """The informer, which uses pages, lists again instead."""

    def respond(_: str, query: dict[str, str]) -> tuple[int, bytes]:
        if "continue" in query:
            return 410, json.dumps({"reason": "Expired", "message": "too old", "code": 410}).encode()
        return config_map_page([0], "1") if "limit" in query else config_map_page([0, 1, 2], "")

    with FakeServer(respond, tmp_path) as cluster:
        assert len(cluster.list(CONFIG_MAPS).items) == 3
        with pytest.raises(Expired):
            list(cluster.pages(CONFIG_MAPS))
