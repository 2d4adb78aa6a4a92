"""Events: one object for each incident, with a count of its repetitions."""

from cluster.events import WARNING, EventRecorder
from cluster.in_memory import InMemoryCluster
from cluster.interface import Cluster
from cluster.objects import EVENTS, PODS, Event, ObjectReference, Pod
from tests.cluster.objects import pod


def about(made: Pod) -> ObjectReference:
    return ObjectReference("v1", "Pod", made.metadata.namespace, made.metadata.name, made.metadata.uid)


def events(cluster: Cluster, made: Pod) -> list[Event]:
    found = cluster.list(EVENTS, made.metadata.namespace).items
    return [
        event for event in found if event.involved_object.uid == made.metadata.uid and event.source.component == "test"
    ]


def test_an_event_names_its_object_reason_and_message(cluster: Cluster, namespace: str) -> None:
    """As `kubectl describe pod` shows it."""
    made = cluster.create(PODS, pod(namespace, "p"))
    EventRecorder(cluster, "test").record(about(made), "QuotaExceeded", "short by 50 cores", type_=WARNING)
    event = events(cluster, made)[0]
    assert (event.type, event.reason, event.message, event.count) == (WARNING, "QuotaExceeded", "short by 50 cores", 1)
    assert event.involved_object.name == "p"


def test_repetitions_are_counted_in_one_event(cluster: Cluster, namespace: str) -> None:
    """Also after the API server has deleted the event, and after a restart of the process that wrote it."""
    made = cluster.create(PODS, pod(namespace, "p"))
    recorder = EventRecorder(cluster, "test")
    for _ in range(3):
        recorder.record(about(made), "Waiting", "no free GPU")
    assert [event.count for event in events(cluster, made)] == [3]
    cluster.delete(EVENTS, events(cluster, made)[0].metadata.name, namespace)
    recorder.record(about(made), "Waiting", "no free GPU")
    assert [event.count for event in events(cluster, made)] == [4]
    restarted = EventRecorder(cluster, "test")
    for _ in range(2):
        restarted.record(about(made), "Waiting", "no free GPU")
    assert [event.count for event in events(cluster, made)] == [6], "a restarted process continues the count"
    assert recorder.failures == 0


def test_different_messages_are_different_events(cluster: Cluster, namespace: str) -> None:
    """The numbers in a message matter."""
    made = cluster.create(PODS, pod(namespace, "p"))
    recorder = EventRecorder(cluster, "test")
    for short in (50, 30):
        recorder.record(about(made), "QuotaExceeded", f"short by {short} cores")
    assert len(events(cluster, made)) == 2


def test_an_event_that_cannot_be_written_is_counted_and_raises_nothing() -> None:
    """Its namespace may be deleted."""
    recorder = EventRecorder(InMemoryCluster(), "test")
    recorder.record(ObjectReference("v1", "Pod", "gone", "p", "uid"), "Late", "x" * 5000)
    assert recorder.failures == 1
