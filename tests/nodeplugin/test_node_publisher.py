"""What the plugin writes on pods that it placed itself."""

from typing import Any, cast

import pytest

from cluster.errors import Conflict, NotFound, Rejected
from cluster.interface import Cluster
from nodeplugin.cards import NodeCards
from nodeplugin.checkpoint import PodAllocation
from nodeplugin.node_publisher import NodePublisher
from vcuda.names import Names


class Server:
    """Takes placements, but for those that it denies."""

    def __init__(self, **denied: Exception) -> None:
        self.denied, self.asked, self.written = denied, list[str](), list[str]()

    def patch(self, _kind: Any, name: str, _namespace: str, _changes: Any) -> None:
        self.asked.append(name)
        if name in self.denied:
            raise self.denied[name]
        self.written.append(name)


def publisher(server: Server, *names: str) -> NodePublisher:
    """A publisher of a node with pods that it placed."""
    holds = [PodAllocation(uid=f"uid-{name}", namespace="team", name=name, placed={}, usage={}) for name in names]
    return NodePublisher(
        cast("Cluster", server),
        "n1",
        Names(),
        NodeCards(),
        on_change=lambda: None,
        deviating=lambda: holds,
        driver=lambda: "",
    )


def test_a_pod_whose_placement_is_denied_holds_up_no_other() -> None:
    """Somebody's policy does not like it: it is tried again, and the others are written at once."""
    server = Server(first=Rejected("a policy says no"))
    made = publisher(server, "first", "last")
    assert not made._write_placements(), "it is to be tried again"
    assert server.written == ["last"]


@pytest.mark.parametrize(
    "gone", [NotFound("no such pod"), Rejected("metadata.uid: immutable"), Conflict("UID in precondition")], ids=str
)
def test_a_pod_that_is_another_by_now_is_left_alone(gone: Exception) -> None:
    """Under its name there is none any more, or another one."""
    server = Server(first=gone)
    made = publisher(server, "first")
    assert made._write_placements()
    assert made._write_placements()
    assert server.asked == ["first"]
