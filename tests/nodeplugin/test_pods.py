"""The saved pods: what a plugin knows that starts while the API server is unavailable."""

from pathlib import Path

import msgspec
import pytest

from nodeplugin.pods import read_pods
from tests.nodeplugin.builders import app, bound, init
from vcuda.limits import ContainerLimits, LimitSource
from vcuda.placement_annotation import GpuSlice
from vcuda.pod_options import PodOptions

POD = bound(
    "one",
    init("i", 20, 2),
    app("a", 50, 4),
    placed={"a": (GpuSlice("GPU-0", 50, 1024),)},
    request_error="invalid",
    options=PodOptions(models=("A100",)),
    limits={"a": ContainerLimits(cores=50, core_limit=80, limit_source=LimitSource.USER)},
    predicate_minors={"a": (1,)},
    container_ids={"0123": "a"},
    has_ended=True,
    created="2026-01-01T00:00:00Z",
)
# What earlier versions wrote: every key, in order.
JSON = (
    '[{"metadata":{"name":"one","namespace":"team","uid":"uid-one"},'
    '"request":{"containers":[{"name":"i","role":"init","share":{"cores":20,"memory_units":2,"follows":false},'
    '"vocabulary":""},{"name":"a","role":"app","share":{"cores":50,"memory_units":4,"follows":false},'
    '"vocabulary":""}]},"mistake":"invalid",'
    '"wishes":{"models":["A100"]},'
    '"counts":{"i":{"core":20,"memory":2},"a":{"core":50,"memory":4}},'
    '"placed":{"a":[{"uuid":"GPU-0","cores":50,"memoryMiB":1024}]},'
    '"limits":{"a":{"cores":50,"coreLimit":80,"limitSource":"user"}},"predicates":{"a":[1]},'
    '"containerIds":{"0123":"a"},"hasEnded":true,"created":"2026-01-01T00:00:00Z"}]'
)


def test_the_json_keys_of_saved_pods_are_fixed(tmp_path: Path) -> None:
    """A plugin reads the file of the version before, and of the one it is rolled back from."""
    assert msgspec.json.encode([POD]).decode() == JSON
    (tmp_path / "pods.json").write_text(JSON)
    assert read_pods(tmp_path / "pods.json") == {"uid-one": POD}


@pytest.mark.parametrize("content", [None, b"", b"{", b"[{}, 1]", b"\xff"])
def test_a_missing_or_damaged_file_has_no_pods(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "pods.json").write_bytes(content)
    assert read_pods(tmp_path / "pods.json") == {}
