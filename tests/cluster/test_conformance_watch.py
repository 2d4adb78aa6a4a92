"""Watches: every change after a version, in order; and an error if some of them are not available any more."""

import threading

import pytest
from msgspec.structs import replace

from cluster.errors import Expired, Rejected
from cluster.interface import Change, ChangeType, Cluster, Selector
from cluster.objects import CONFIG_MAPS, PODS, ConfigMap, Pod
from tests.cluster.conftest import Implementation
from tests.cluster.objects import config_map, pod

ADDED, MODIFIED, DELETED = ChangeType.ADDED, ChangeType.MODIFIED, ChangeType.DELETED


def changes_until(
    cluster: Cluster, since: str, namespace: str, last: str, selector: Selector | None = None
) -> list[tuple[str, str]]:
    """Watch ConfigMaps until the one named `last` is deleted; returns type and name of each change."""
    watch = cluster.watch(CONFIG_MAPS, since, namespace, selector or Selector(), timeout_s=20)
    changes: list[tuple[str, str]] = []
    for change in watch:
        if change.type is not ChangeType.BOOKMARK and change.object.metadata.name != "kube-root-ca.crt":
            changes.append((change.type, change.object.metadata.name))
        if changes and changes[-1] == (DELETED, last):
            watch.close()
    return changes


def test_a_watch_reports_each_change_in_order(cluster: Cluster, namespace: str) -> None:
    """From the version of a list on, no change is missing and none is reported twice."""
    cluster.create(CONFIG_MAPS, config_map(namespace, "before"))
    since = cluster.list(CONFIG_MAPS, namespace).resource_version
    cluster.create(CONFIG_MAPS, config_map(namespace, "one"))
    cluster.patch(CONFIG_MAPS, "one", namespace, {"data": {"n": "1"}})
    cluster.delete(CONFIG_MAPS, "before", namespace)
    cluster.delete(CONFIG_MAPS, "one", namespace)
    assert changes_until(cluster, since, namespace, "one") == [
        (ADDED, "one"),
        (MODIFIED, "one"),
        (DELETED, "before"),
        (DELETED, "one"),
    ]


def test_a_watch_continues_from_the_version_of_the_last_change(cluster: Cluster, namespace: str) -> None:
    since = cluster.list(CONFIG_MAPS, namespace).resource_version
    made = cluster.create(CONFIG_MAPS, config_map(namespace, "one"))
    assert int(since) < int(made.metadata.resource_version)
    cluster.patch(CONFIG_MAPS, "one", namespace, {"data": {"n": "1"}})
    cluster.delete(CONFIG_MAPS, "one", namespace)
    changes = changes_until(cluster, made.metadata.resource_version, namespace, "one")
    assert changes == [(MODIFIED, "one"), (DELETED, "one")]


def test_a_deletion_carries_a_version_and_the_last_state(cluster: Cluster, namespace: str) -> None:
    """The version is that of the deletion, so that a watch can continue from it."""
    made = cluster.create(CONFIG_MAPS, config_map(namespace, "one", n="1"))
    cluster.delete(CONFIG_MAPS, "one", namespace)
    watch = cluster.watch(CONFIG_MAPS, made.metadata.resource_version, namespace, timeout_s=20)
    change: Change[ConfigMap] = next(change for change in watch if change.type is DELETED)
    watch.close()
    assert change.object.data == {"n": "1"}
    assert int(change.object.metadata.resource_version) > int(made.metadata.resource_version)


def test_an_object_that_starts_or_stops_matching_a_selector_is_reported_as_added_or_deleted(
    cluster: Cluster, namespace: str
) -> None:
    """So a cache with a selector holds exactly the objects that match."""
    since = cluster.list(CONFIG_MAPS, namespace).resource_version
    cluster.create(CONFIG_MAPS, config_map(namespace, "one"))
    for labels in ({"in": "1"}, {"in": "1", "more": "x"}, {"in": None}):
        cluster.patch(CONFIG_MAPS, "one", namespace, {"metadata": {"labels": labels}})
    changes = changes_until(cluster, since, namespace, "one", Selector(labels="in=1"))
    assert changes == [(ADDED, "one"), (MODIFIED, "one"), (DELETED, "one")]


def test_an_object_that_stops_matching_is_reported_in_its_last_matching_state(cluster: Cluster, namespace: str) -> None:
    """But with the version of the write by which it stopped matching."""
    made = config_map(namespace, "one")
    created = cluster.create(CONFIG_MAPS, replace(made, metadata=replace(made.metadata, labels={"in": "1"})))
    left = cluster.patch(CONFIG_MAPS, "one", namespace, {"metadata": {"labels": {"in": None}}})
    since = created.metadata.resource_version
    watch = cluster.watch(CONFIG_MAPS, since, namespace, Selector(labels="in=1"), timeout_s=20)
    change: Change[ConfigMap] = next(change for change in watch if change.type is DELETED)
    watch.close()
    assert change.object.metadata.labels == {"in": "1"}
    assert change.object.metadata.resource_version == left.metadata.resource_version


def test_an_invalid_version_is_rejected(cluster: Cluster, namespace: str) -> None:
    """It is not taken for the first version."""
    with pytest.raises(Rejected):
        list(cluster.watch(CONFIG_MAPS, "abc", namespace, timeout_s=1))


def test_a_field_selector_follows_the_binding(cluster: Cluster, namespace: str) -> None:
    """As a node plugin watches the pods of its node."""
    since = cluster.list(PODS, namespace).resource_version
    made = cluster.create(PODS, pod(namespace, "p"))
    cluster.create(PODS, pod(namespace, "other"))
    cluster.bind("p", namespace, "node-x", uid=made.metadata.uid, annotations={})
    watch = cluster.watch(PODS, since, namespace, Selector(fields="spec.nodeName=node-x"), timeout_s=20)
    first: Change[Pod] = next(change for change in watch if change.type is not ChangeType.BOOKMARK)
    watch.close()
    assert (first.type, first.object.metadata.name, first.object.spec.node_name) == (ADDED, "p", "node-x")


def test_a_watch_ends_without_an_error_after_its_timeout(cluster: Cluster, namespace: str) -> None:
    since = cluster.list(CONFIG_MAPS, namespace).resource_version
    assert all(change.type is ChangeType.BOOKMARK for change in cluster.watch(PODS, since, namespace, timeout_s=1))


def test_a_watch_can_be_closed_from_another_thread(cluster: Cluster, namespace: str) -> None:
    """Also while it waits for a change; the iteration ends without an error."""
    since = cluster.list(CONFIG_MAPS, namespace).resource_version
    watch = cluster.watch(CONFIG_MAPS, since, namespace, timeout_s=60)
    changes: list[Change[ConfigMap]] = []
    reader = threading.Thread(target=lambda: changes.extend(watch), name="reader")
    reader.start()
    watch.close()
    reader.join(5)
    assert not reader.is_alive()


def test_a_version_that_is_too_old_is_reported_as_expired(implementation: Implementation) -> None:
    """The client has to list again."""
    since = implementation.expired_version()
    with pytest.raises(Expired):
        list(implementation.cluster.watch(CONFIG_MAPS, since, timeout_s=5))
