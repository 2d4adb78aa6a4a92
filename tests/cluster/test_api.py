"""The API behind something that is not an API server: a proxy's page, a redirect, a cut connection."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cluster.api import ApiCluster, connect
from cluster.objects import CONFIG_MAPS
from vcuda.decision import Unavailable

ANSWERS = {
    "a page": (200, b"<html>Sign in</html>"),
    "a redirect": (302, b""),
    "an error page": (502, b"<html>Bad gateway</html>"),
    "nothing": (200, b""),
    "half an object": (200, b'{"metadata": {"name": "o'),
    "an object of another shape": (200, b'{"metadata": []}'),
}


@pytest.fixture(params=list(ANSWERS.values()), ids=list(ANSWERS))
def impostor(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ApiCluster]:
    """A cluster whose API server is something else."""
    status, body = request.param

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, name="impostor", daemon=True).start()
    config = {
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_address[1]}"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    yield connect(str(tmp_path / "kubeconfig"))
    server.shutdown()
    server.server_close()


def test_what_is_no_answer_of_an_api_server_is_unavailable(impostor: ApiCluster) -> None:
    """Retryable, and nothing of a decoder's own errors."""
    with pytest.raises(Unavailable):
        impostor.get(CONFIG_MAPS, "one", "default")
    with pytest.raises(Unavailable):
        impostor.list(CONFIG_MAPS)


def test_a_server_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    """And a kubeconfig that is not there says how to name one."""
    with pytest.raises(Unavailable, match=r"cluster\.kubeconfig"):
        connect(str(tmp_path / "none"))
