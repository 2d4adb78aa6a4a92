"""Watches: every change, in order, from a version on; and a clear word when that cannot be."""

import threading

import pytest
from msgspec.structs import replace

from cluster.errors import Expired, Rejected
from cluster.interface import Change, ChangeType, Cluster, Selector
from cluster.objects import CONFIG_MAPS, PODS, ConfigMap, Pod
from tests.cluster.conftest import Tenant
from tests.cluster.objects import config_map, pod

ADDED, MODIFIED, DELETED = ChangeType.ADDED, ChangeType.MODIFIED, ChangeType.DELETED


def seen_until(
    cluster: Cluster, since: str, namespace: str, last: str, selector: Selector | None = None
) -> list[tuple[str, str]]:
    """Follow ConfigMaps until one of this name is deleted; give type and name of what was seen."""
    watch = cluster.watch(CONFIG_MAPS, since, namespace, selector or Selector(), timeout_s=20)
    seen: list[tuple[str, str]] = []
    for change in watch:
        if change.type is not ChangeType.BOOKMARK and change.object.metadata.name != "kube-root-ca.crt":
            seen.append((change.type, change.object.metadata.name))
        if seen and seen[-1] == (DELETED, last):
            watch.close()
    return seen


def test_a_watch_reports_each_change_in_order(cluster: Cluster, namespace: str) -> None:
    """From the version of a list on, nothing is missed and nothing told twice."""
    cluster.create(CONFIG_MAPS, config_map(namespace, "before"))
    since = cluster.list(CONFIG_MAPS, namespace).resource_version
    cluster.create(CONFIG_MAPS, config_map(namespace, "one"))
    cluster.patch(CONFIG_MAPS, "one", namespace, {"data": {"n": "1"}})
    cluster.delete(CONFIG_MAPS, "before", namespace)
    cluster.delete(CONFIG_MAPS, "one", namespace)
    assert seen_until(cluster, since, namespace, "one") == [
        (ADDED, "one"),
        (MODIFIED, "one"),
        (DELETED, "before"),
        (DELETED, "one"),
    ]


def test_a_watch_can_be_taken_up_again_where_it_ended(cluster: Cluster, namespace: str) -> None:
    """The version of the last change seen is the place to go on from."""
    since = cluster.list(CONFIG_MAPS, namespace).resource_version
    made = cluster.create(CONFIG_MAPS, config_map(namespace, "one"))
    assert int(since) < int(made.metadata.resource_version)
    cluster.patch(CONFIG_MAPS, "one", namespace, {"data": {"n": "1"}})
    cluster.delete(CONFIG_MAPS, "one", namespace)
    seen = seen_until(cluster, made.metadata.resource_version, namespace, "one")
    assert seen == [(MODIFIED, "one"), (DELETED, "one")]


def test_a_deletion_carries_a_version_and_the_last_state(cluster: Cluster, namespace: str) -> None:
    """The version is that of the deletion, so that a watch can go on from it."""
    made = cluster.create(CONFIG_MAPS, config_map(namespace, "one", n="1"))
    cluster.delete(CONFIG_MAPS, "one", namespace)
    watch = cluster.watch(CONFIG_MAPS, made.metadata.resource_version, namespace, timeout_s=20)
    change: Change[ConfigMap] = next(change for change in watch if change.type is DELETED)
    watch.close()
    assert change.object.data == {"n": "1"}
    assert int(change.object.metadata.resource_version) > int(made.metadata.resource_version)


def test_through_a_selector_leaving_looks_like_deletion_and_entering_like_creation(
    cluster: Cluster, namespace: str
) -> None:
    """A cache behind a selector holds exactly what it selects."""
    since = cluster.list(CONFIG_MAPS, namespace).resource_version
    cluster.create(CONFIG_MAPS, config_map(namespace, "one"))
    for labels in ({"in": "1"}, {"in": "1", "more": "x"}, {"in": None}):
        cluster.patch(CONFIG_MAPS, "one", namespace, {"metadata": {"labels": labels}})
    seen = seen_until(cluster, since, namespace, "one", Selector(labels="in=1"))
    assert seen == [(ADDED, "one"), (MODIFIED, "one"), (DELETED, "one")]


def test_what_leaves_a_selector_is_shown_as_it_was_within(cluster: Cluster, namespace: str) -> None:
    """The state that was selected, at the version at which it no longer was."""
    made = config_map(namespace, "one")
    created = cluster.create(CONFIG_MAPS, replace(made, metadata=replace(made.metadata, labels={"in": "1"})))
    left = cluster.patch(CONFIG_MAPS, "one", namespace, {"metadata": {"labels": {"in": None}}})
    since = created.metadata.resource_version
    watch = cluster.watch(CONFIG_MAPS, since, namespace, Selector(labels="in=1"), timeout_s=20)
    change: Change[ConfigMap] = next(change for change in watch if change.type is DELETED)
    watch.close()
    assert change.object.metadata.labels == {"in": "1"}
    assert change.object.metadata.resource_version == left.metadata.resource_version


def test_a_version_that_is_none_is_refused(cluster: Cluster, namespace: str) -> None:
    """Not taken for the beginning."""
    with pytest.raises(Rejected):
        list(cluster.watch(CONFIG_MAPS, "abc", namespace, timeout_s=1))


def test_a_field_selector_follows_the_binding(cluster: Cluster, namespace: str) -> None:
    """The pods of a node: how a node plugin watches."""
    since = cluster.list(PODS, namespace).resource_version
    made = cluster.create(PODS, pod(namespace, "p"))
    cluster.create(PODS, pod(namespace, "other"))
    cluster.bind("p", namespace, "node-x", uid=made.metadata.uid, annotations={})
    watch = cluster.watch(PODS, since, namespace, Selector(fields="spec.nodeName=node-x"), timeout_s=20)
    first: Change[Pod] = next(change for change in watch if change.type is not ChangeType.BOOKMARK)
    watch.close()
    assert (first.type, first.object.metadata.name, first.object.spec.node_name) == (ADDED, "p", "node-x")


def test_the_server_ends_a_watch_in_time(cluster: Cluster, namespace: str) -> None:
    """The iteration ends by itself, without an error."""
    since = cluster.list(CONFIG_MAPS, namespace).resource_version
    assert all(change.type is ChangeType.BOOKMARK for change in cluster.watch(PODS, since, namespace, timeout_s=1))


def test_a_watch_can_be_closed_from_another_thread(cluster: Cluster, namespace: str) -> None:
    """Also while it waits for something to happen, and without an error."""
    since = cluster.list(CONFIG_MAPS, namespace).resource_version
    watch = cluster.watch(CONFIG_MAPS, since, namespace, timeout_s=60)
    seen: list[Change[ConfigMap]] = []
    follower = threading.Thread(target=lambda: seen.extend(watch), name="follower")
    follower.start()
    watch.close()
    follower.join(5)
    assert not follower.is_alive()


def test_a_version_that_is_forgotten_is_said_to_be(tenant: Tenant) -> None:
    """Whoever watches from it has to list again."""
    since = tenant.old_version()
    with pytest.raises(Expired):
        list(tenant.cluster.watch(CONFIG_MAPS, since, timeout_s=5))
