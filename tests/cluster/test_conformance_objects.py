"""Objects: what an API server does to them, and the cluster in memory as well."""

import re
import threading
from typing import Any

import pytest
from msgspec.structs import replace

from cluster.errors import AlreadyExists, Conflict, NotFound, Rejected
from cluster.interface import Cluster, Selector
from cluster.objects import CONFIG_MAPS, NAMESPACES, NODES, PODS, VALIDATING_WEBHOOKS, Metadata, Pod
from tests.cluster.objects import config_map, gpu_pod, pod
from tests.waiting import eventually


def test_a_created_object_has_identity_and_version(cluster: Cluster, namespace: str) -> None:
    """A uid, a time, a version; what was read again is what was created."""
    created = cluster.create(CONFIG_MAPS, config_map(namespace, "one", key="value"))
    assert re.fullmatch(r"[0-9a-f-]{36}", created.metadata.uid)
    assert created.metadata.resource_version.isdecimal()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", created.metadata.creation_timestamp or "")
    assert cluster.get(CONFIG_MAPS, "one", namespace) == created


def test_a_name_can_be_generated(cluster: Cluster, namespace: str) -> None:
    """Two pods of one template get different names."""
    made = [cluster.create(PODS, pod(namespace)) for _ in range(2)]
    assert made[0].metadata.name != made[1].metadata.name
    assert all(re.fullmatch(r"pod-[bcdfghjklmnpqrstvwxz2456789]{5}", each.metadata.name) for each in made)


def test_a_name_is_taken_once(cluster: Cluster, namespace: str) -> None:
    """The second create is refused and changes nothing."""
    first = cluster.create(CONFIG_MAPS, config_map(namespace, "one", key="first"))
    with pytest.raises(AlreadyExists):
        cluster.create(CONFIG_MAPS, config_map(namespace, "one", key="second"))
    assert cluster.get(CONFIG_MAPS, "one", namespace) == first


def test_a_deleted_name_comes_back_as_another_object(cluster: Cluster, namespace: str) -> None:
    """Names return, uids do not."""
    first = cluster.create(CONFIG_MAPS, config_map(namespace, "one"))
    cluster.delete(CONFIG_MAPS, "one", namespace)
    second = cluster.create(CONFIG_MAPS, config_map(namespace, "one"))
    assert first.metadata.uid != second.metadata.uid
    assert int(first.metadata.resource_version) < int(second.metadata.resource_version)


def test_what_is_not_there_is_not_found(cluster: Cluster, namespace: str) -> None:
    """Reading, patching, deleting, and creating in a namespace that does not exist."""
    for attempt in (
        lambda: cluster.get(CONFIG_MAPS, "none", namespace),
        lambda: cluster.patch(CONFIG_MAPS, "none", namespace, {"data": {}}),
        lambda: cluster.delete(CONFIG_MAPS, "none", namespace),
        lambda: cluster.create(CONFIG_MAPS, config_map("no-such-namespace", "one")),
    ):
        with pytest.raises(NotFound):
            attempt()


@pytest.mark.parametrize("name", ["Upper", "under_score", "-dash", "x" * 254])
def test_a_name_that_is_none_is_refused(cluster: Cluster, namespace: str, name: str) -> None:
    """DNS names in lower case only."""
    with pytest.raises(Rejected):
        cluster.create(CONFIG_MAPS, config_map(namespace, name))


def test_an_update_swaps_only_what_was_read(cluster: Cluster, namespace: str) -> None:
    """Of two writers that read the same version, one wins and the other is told."""
    read = cluster.create(CONFIG_MAPS, config_map(namespace, "one", n="0"))
    won = cluster.update(CONFIG_MAPS, replace(read, data={"n": "1"}))
    with pytest.raises(Conflict):
        cluster.update(CONFIG_MAPS, replace(read, data={"n": "2"}))
    assert cluster.get(CONFIG_MAPS, "one", namespace) == won
    assert won.data == {"n": "1"}
    assert won.metadata.uid == read.metadata.uid


def test_an_update_of_a_recreated_object_conflicts(cluster: Cluster, namespace: str) -> None:
    """The same name is not the same object."""
    read = cluster.create(CONFIG_MAPS, config_map(namespace, "one"))
    cluster.delete(CONFIG_MAPS, "one", namespace)
    cluster.create(CONFIG_MAPS, config_map(namespace, "one"))
    with pytest.raises(Conflict):
        cluster.update(CONFIG_MAPS, replace(read, data={"n": "1"}))


def test_an_update_that_changes_nothing_keeps_the_version(cluster: Cluster, namespace: str) -> None:
    """And so wakes nobody up."""
    read = cluster.create(CONFIG_MAPS, config_map(namespace, "one", n="0"))
    assert cluster.update(CONFIG_MAPS, read).metadata.resource_version == read.metadata.resource_version


def test_an_update_without_a_version_or_of_a_partial_kind_is_a_fault(cluster: Cluster, namespace: str) -> None:
    """Blind writes and writes that drop unknown fields cannot be made through the interface."""
    cluster.create(CONFIG_MAPS, config_map(namespace, "one"))
    with pytest.raises(TypeError, match="resourceVersion"):
        cluster.update(CONFIG_MAPS, config_map(namespace, "one"))
    with pytest.raises(TypeError, match="in part"):
        cluster.update(PODS, Pod(metadata=Metadata(name="p", namespace=namespace, resource_version="1")))


def test_a_patch_merges_and_null_removes(cluster: Cluster, namespace: str) -> None:
    """RFC 7386."""
    cluster.create(CONFIG_MAPS, config_map(namespace, "one", a="1", b="2"))
    patched = cluster.patch(
        CONFIG_MAPS, "one", namespace, {"data": {"a": None, "c": "3"}, "metadata": {"labels": {"x": "y"}}}
    )
    assert patched.data == {"b": "2", "c": "3"}
    assert patched.metadata.labels == {"x": "y"}


def test_a_patch_with_a_version_is_compare_and_swap(cluster: Cluster, namespace: str) -> None:
    """The version in the patch has to be the present one."""
    read = cluster.create(CONFIG_MAPS, config_map(namespace, "one"))
    change = {"metadata": {"resourceVersion": read.metadata.resource_version}, "data": {"n": "1"}}
    assert cluster.patch(CONFIG_MAPS, "one", namespace, change).data == {"n": "1"}
    with pytest.raises(Conflict):
        cluster.patch(CONFIG_MAPS, "one", namespace, change)


def test_fields_are_applied_by_name(cluster: Cluster) -> None:
    """Only what is named changes; and only of the object that was meant."""
    hooks = [unused_hook(name) for name in ("one.quotient.dev", "two.quotient.dev")]
    made = cluster.create(VALIDATING_WEBHOOKS, {"metadata": {"name": "applied"}, "webhooks": hooks})
    try:
        fields = {"webhooks": [{"name": "two.quotient.dev", "failurePolicy": "Fail"}]}
        after = cluster.apply(VALIDATING_WEBHOOKS, made, fields, manager="test")
        policies = [(each.name, each.failure_policy) for each in after.webhooks]
        assert policies == [("one.quotient.dev", "Ignore"), ("two.quotient.dev", "Fail")]
    finally:
        cluster.delete(VALIDATING_WEBHOOKS, "applied")
    with pytest.raises(Conflict):
        cluster.apply(VALIDATING_WEBHOOKS, made, fields, manager="test")
    other = cluster.create(VALIDATING_WEBHOOKS, {"metadata": {"name": "applied"}, "webhooks": hooks})
    try:
        with pytest.raises(Conflict):
            cluster.apply(VALIDATING_WEBHOOKS, made, fields, manager="test")
        assert cluster.get(VALIDATING_WEBHOOKS, "applied") == other
    finally:
        cluster.delete(VALIDATING_WEBHOOKS, "applied")


def unused_hook(name: str) -> dict[str, Any]:
    """Write a webhook that nothing is asked of."""
    rule = {"apiGroups": ["test.quotient.dev"], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["tests"]}
    return {
        "name": name,
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Ignore",
        "clientConfig": {"url": "https://127.0.0.1:1/"},
        "rules": [rule],
    }


def test_patches_made_at_once_are_all_there(cluster: Cluster, namespace: str) -> None:
    """A patch without a version never undoes another one."""
    cluster.create(CONFIG_MAPS, config_map(namespace, "one"))

    def patch(writer: int) -> None:
        for number in range(20):
            cluster.patch(CONFIG_MAPS, "one", namespace, {"data": {f"{writer}-{number}": "x"}})

    writers = [threading.Thread(target=patch, args=(writer,), name=f"writer-{writer}") for writer in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert len(cluster.get(CONFIG_MAPS, "one", namespace).data) == 80


def test_of_updates_made_at_once_one_wins_each_time(cluster: Cluster, namespace: str) -> None:
    """Compare-and-swap: a counter that four writers raise loses nothing."""
    cluster.create(CONFIG_MAPS, config_map(namespace, "counter", n="0"))

    def count() -> None:
        done = 0
        while done < 10:
            read = cluster.get(CONFIG_MAPS, "counter", namespace)
            try:
                cluster.update(CONFIG_MAPS, replace(read, data={"n": str(int(read.data["n"]) + 1)}))
            except Conflict:
                continue
            done += 1

    writers = [threading.Thread(target=count, name=f"counter-{writer}") for writer in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert cluster.get(CONFIG_MAPS, "counter", namespace).data == {"n": "40"}


def test_status_and_the_rest_are_written_apart(cluster: Cluster, namespace: str) -> None:
    """A patch of the pod leaves its status alone, and a patch of the status its spec."""
    cluster.create(PODS, pod(namespace, "p"))
    both = {"metadata": {"labels": {"a": "b"}}, "status": {"phase": "Running"}}
    assert cluster.patch(PODS, "p", namespace, both).status.phase == "Pending"
    patched = cluster.patch(PODS, "p", namespace, {"status": {"phase": "Running"}}, subresource="status")
    assert (patched.status.phase, patched.metadata.labels) == ("Running", {"a": "b"})


def test_a_stored_pod_keeps_its_spec(cluster: Cluster, namespace: str) -> None:
    """Resources cannot be changed behind the quota's back."""
    cluster.create(PODS, gpu_pod(namespace, "p", **{"example.com/gpu": "1"}))
    other = [{"name": "c0", "image": "example/image", "resources": {"limits": {"example.com/gpu": "2"}}}]
    with pytest.raises(Rejected):
        cluster.patch(PODS, "p", namespace, {"spec": {"containers": other}})


def test_a_dry_run_answers_as_if_and_stores_nothing(cluster: Cluster, namespace: str) -> None:
    """It has a uid, and is not there."""
    tried = cluster.create(PODS, pod(namespace, "p"), dry_run=True)
    assert tried.metadata.uid
    with pytest.raises(NotFound):
        cluster.get(PODS, "p", namespace)


def test_a_delete_with_a_uid_hits_only_that_object(cluster: Cluster, namespace: str) -> None:
    """A successor of the same name is spared."""
    made = cluster.create(CONFIG_MAPS, config_map(namespace, "one"))
    with pytest.raises(Conflict):
        cluster.delete(CONFIG_MAPS, "one", namespace, uid="11111111-2222-3333-4444-555555555555")
    cluster.delete(CONFIG_MAPS, "one", namespace, uid=made.metadata.uid)
    with pytest.raises(NotFound):
        cluster.get(CONFIG_MAPS, "one", namespace)


def test_a_pod_without_a_node_is_deleted_at_once_and_one_with_a_node_waits(cluster: Cluster, namespace: str) -> None:
    """A kubelet has to stop it; until then it is marked, with the grace it has."""
    cluster.create(PODS, pod(namespace, "free"))
    bound = cluster.create(PODS, pod(namespace, "bound"))
    cluster.bind("bound", namespace, "no-such-node", uid=bound.metadata.uid, annotations={})
    cluster.delete(PODS, "free", namespace)
    cluster.delete(PODS, "bound", namespace, grace_s=300)
    with pytest.raises(NotFound):
        cluster.get(PODS, "free", namespace)
    waiting = cluster.get(PODS, "bound", namespace).metadata
    assert waiting.deletion_timestamp
    assert waiting.deletion_grace_period_seconds == 300
    cluster.delete(PODS, "bound", namespace, grace_s=0)
    eventually(lambda: "bound" not in names(cluster, namespace), "the bound pod to go")


def test_finalizers_hold_an_object_until_they_are_removed(cluster: Cluster, namespace: str) -> None:
    """Deleted, it is marked; released, it is gone."""
    held = config_map(namespace, "one")
    held = replace(held, metadata=replace(held.metadata, finalizers=["quotient.dev/test"]))
    cluster.create(CONFIG_MAPS, held)
    cluster.delete(CONFIG_MAPS, "one", namespace)
    assert cluster.get(CONFIG_MAPS, "one", namespace).metadata.deletion_timestamp
    cluster.patch(CONFIG_MAPS, "one", namespace, {"metadata": {"finalizers": None}})
    with pytest.raises(NotFound):
        cluster.get(CONFIG_MAPS, "one", namespace)


def test_a_bind_sets_node_and_annotations_in_one_write(cluster: Cluster, namespace: str) -> None:
    """The placement is there from the first moment the pod has a node."""
    made = cluster.create(PODS, pod(namespace, "p", metadata={"annotations": {"kept": "yes"}}))
    cluster.bind("p", namespace, "node-x", uid=made.metadata.uid, annotations={"example.com/placement": "{}"})
    bound = cluster.get(PODS, "p", namespace)
    assert bound.spec.node_name == "node-x"
    assert bound.metadata.annotations == {"kept": "yes", "example.com/placement": "{}"}


def test_a_pod_is_bound_once_and_only_the_one_that_was_meant(cluster: Cluster, namespace: str) -> None:
    """A late bind of another leader, or of a pod that was replaced, is a conflict."""
    made = cluster.create(PODS, pod(namespace, "p"))
    with pytest.raises(Conflict):
        cluster.bind("p", namespace, "node-x", uid="11111111-2222-3333-4444-555555555555", annotations={})
    cluster.bind("p", namespace, "node-x", uid=made.metadata.uid, annotations={})
    with pytest.raises(Conflict):
        cluster.bind("p", namespace, "node-y", uid=made.metadata.uid, annotations={"late": "yes"})
    assert "late" not in cluster.get(PODS, "p", namespace).metadata.annotations


def test_defaults_are_filled_in_and_quantities_made_canonical(cluster: Cluster, namespace: str) -> None:
    """What components see is not what was typed."""
    made = cluster.create(PODS, gpu_pod(namespace, "p", **{"example.com/gpu": 1000, "memory": "8192Mi"}))
    resources = (made.spec.containers or [])[0].resources
    assert resources is not None
    assert resources.limits == resources.requests == {"example.com/gpu": "1k", "memory": "8Gi"}
    assert made.spec.scheduler_name == "default-scheduler"
    assert made.status.phase == "Pending"


@pytest.mark.parametrize("amount", ["1_000", "NaN", "1 Gi", "8GB"])
def test_what_is_no_quantity_is_refused(cluster: Cluster, namespace: str, amount: str) -> None:
    """Before anybody's hook sees it."""
    with pytest.raises(Rejected):
        cluster.create(PODS, gpu_pod(namespace, "p", **{"example.com/gpu": amount}))


MALFORMED = {
    "no spec": {"spec": None},
    "no containers": {"spec": {}},
    "containers that are no list": {"spec": {"containers": "c"}},
    "a container that is no mapping": {"spec": {"containers": [5]}},
    "limits that are no mapping": {"spec": {"containers": [{"name": "c", "image": "i", "resources": {"limits": [1]}}]}},
    "an annotation that is no text": {"metadata": {"name": "p", "annotations": {"a": 50}}},
}


@pytest.mark.parametrize("changes", MALFORMED.values(), ids=MALFORMED.keys())
def test_what_has_not_the_shape_of_a_pod_is_refused(cluster: Cluster, namespace: str, changes: dict[str, Any]) -> None:
    """With an answer, not a crash."""
    made = pod(namespace, "p")
    made["metadata"] |= changes.get("metadata", {})
    if "spec" in changes:
        made["spec"] = changes["spec"]
    with pytest.raises(Rejected):
        cluster.create(PODS, made)


def test_nulls_count_as_absent(cluster: Cluster, namespace: str) -> None:
    """As in `annotations:` with nothing behind it."""
    made = pod(namespace, "p", metadata={"annotations": None, "labels": None})
    assert cluster.create(PODS, made).metadata.annotations == {}


def test_one_object_has_to_be_named(cluster: Cluster, namespace: str) -> None:
    """An empty name would mean all of them, to a delete as well."""
    cluster.create(CONFIG_MAPS, config_map(namespace, "one"))
    for attempt in (
        lambda: cluster.get(CONFIG_MAPS, "", namespace),
        lambda: cluster.delete(CONFIG_MAPS, "", namespace),
        lambda: cluster.delete(CONFIG_MAPS, "one", ""),
        lambda: cluster.patch(CONFIG_MAPS, "", namespace, {}),
        lambda: cluster.bind("", namespace, "node-x", uid="", annotations={}),
    ):
        with pytest.raises(TypeError, match="do not name one object"):
            attempt()
    assert cluster.get(CONFIG_MAPS, "one", namespace)


UNCREATABLE: dict[str, dict[str, Any]] = {
    "part of an extended resource": {"limits": {"example.com/gpu": "0.3"}},
    "requests other than limits": {"limits": {"example.com/gpu": "2"}, "requests": {"example.com/gpu": "1"}},
    "requests without limits": {"requests": {"example.com/gpu": "1"}},
}


@pytest.mark.parametrize("resources", UNCREATABLE.values(), ids=UNCREATABLE.keys())
def test_extended_resources_are_whole_and_not_overcommitted(
    cluster: Cluster, namespace: str, resources: dict[str, Any]
) -> None:
    """Checked after admission, so a hook may still put it right."""
    containers = [{"name": "c0", "image": "i", "resources": resources}]
    with pytest.raises(Rejected):
        cluster.create(PODS, pod(namespace, "p", spec={"containers": containers}))


def test_what_is_too_large_or_misshapen_is_refused(cluster: Cluster, namespace: str) -> None:
    """A ledger, a placement and a label have limits."""
    for made in (
        config_map(namespace, "large", data="x" * (1024 * 1024 + 1)),
        replace(config_map(namespace, "m"), metadata=Metadata(name="m", namespace=namespace, labels={"a": "b c"})),
        replace(
            config_map(namespace, "m"),
            metadata=Metadata(name="m", namespace=namespace, annotations={"a": "x" * 262145}),
        ),
    ):
        with pytest.raises(Rejected):
            cluster.create(CONFIG_MAPS, made)
    twins = [{"name": "c", "image": "i"}, {"name": "c", "image": "i"}]
    with pytest.raises(Rejected):
        cluster.create(PODS, pod(namespace, "p", spec={"containers": twins}))
    with pytest.raises(Rejected):
        cluster.create(NAMESPACES, {"metadata": {"name": "a.b"}})


def test_an_immutable_config_map_stays(cluster: Cluster, namespace: str) -> None:
    """Also its mark."""
    made = cluster.create(CONFIG_MAPS, replace(config_map(namespace, "one", a="1"), immutable=True))
    for changed in (replace(made, data={"a": "2"}), replace(made, immutable=None)):
        with pytest.raises(Rejected):
            cluster.update(CONFIG_MAPS, changed)


def test_what_is_the_servers_own_cannot_be_written(cluster: Cluster, namespace: str) -> None:
    """Names, times, and the mark of deletion."""
    made = cluster.create(CONFIG_MAPS, config_map(namespace, "one"))
    for metadata in ({"name": "other"}, {"namespace": "default"}):
        with pytest.raises(Rejected):
            cluster.patch(CONFIG_MAPS, "one", namespace, {"metadata": metadata})
    cluster.patch(CONFIG_MAPS, "one", namespace, {"metadata": {"uid": None, "creationTimestamp": None}})
    assert cluster.get(CONFIG_MAPS, "one", namespace).metadata == made.metadata


def test_no_finalizer_is_added_to_what_is_being_deleted(cluster: Cluster, namespace: str) -> None:
    """And deleting it again changes nothing."""
    held = config_map(namespace, "one")
    cluster.create(CONFIG_MAPS, replace(held, metadata=replace(held.metadata, finalizers=["quotient.dev/test"])))
    cluster.delete(CONFIG_MAPS, "one", namespace)
    marked = cluster.get(CONFIG_MAPS, "one", namespace)
    cluster.delete(CONFIG_MAPS, "one", namespace)
    assert cluster.get(CONFIG_MAPS, "one", namespace) == marked
    more = {"metadata": {"finalizers": ["quotient.dev/test", "quotient.dev/late"]}}
    with pytest.raises(Rejected):
        cluster.patch(CONFIG_MAPS, "one", namespace, more)
    cluster.patch(CONFIG_MAPS, "one", namespace, {"metadata": {"finalizers": None}})


def test_grace_is_only_ever_cut_short(cluster: Cluster, namespace: str) -> None:
    """A second delete does not give a pod more time."""
    made = cluster.create(PODS, pod(namespace, "p"))
    cluster.bind("p", namespace, "no-such-node", uid=made.metadata.uid, annotations={})
    cluster.delete(PODS, "p", namespace, grace_s=20)
    cluster.delete(PODS, "p", namespace)
    assert cluster.get(PODS, "p", namespace).metadata.deletion_grace_period_seconds == 20
    cluster.delete(PODS, "p", namespace, grace_s=5)
    assert cluster.get(PODS, "p", namespace).metadata.deletion_grace_period_seconds == 5
    cluster.delete(PODS, "p", namespace, grace_s=0)


def test_a_new_pod_has_not_begun(cluster: Cluster, namespace: str) -> None:
    """Whatever its author writes into its status."""
    assert cluster.create(PODS, pod(namespace, "p", status={"phase": "Running"})).status.phase == "Pending"


def test_a_gated_pod_cannot_be_bound(cluster: Cluster, namespace: str) -> None:
    """Whoever gated it is not done."""
    gates = [{"name": "quotient.dev/test"}]
    made = cluster.create(PODS, pod(namespace, "p", spec={"schedulingGates": gates}))
    with pytest.raises(Conflict):
        cluster.bind("p", namespace, "node-x", uid=made.metadata.uid, annotations={})


def test_a_long_prefix_is_cut_for_a_generated_name(cluster: Cluster, namespace: str) -> None:
    """So that pods' names fit where they are used as labels."""
    made = cluster.create(PODS, pod(namespace, metadata={"generateName": "x" * 70}))
    assert len(made.metadata.name) == 63


def test_a_namespace_carries_its_name_as_a_label(cluster: Cluster, namespace: str) -> None:
    """The label that a webhook configuration selects by."""
    found = cluster.get(NAMESPACES, namespace)
    assert found.metadata.labels["kubernetes.io/metadata.name"] == namespace
    assert found.status.phase == "Active"


def test_a_namespace_waits_for_what_finalizers_hold(cluster: Cluster) -> None:
    """Meanwhile nothing new is made in it."""
    cluster.create(NAMESPACES, {"metadata": {"name": "held"}})
    held = config_map("held", "one")
    cluster.create(CONFIG_MAPS, replace(held, metadata=replace(held.metadata, finalizers=["quotient.dev/test"])))
    cluster.delete(NAMESPACES, "held")
    assert cluster.get(NAMESPACES, "held").status.phase == "Terminating"
    with pytest.raises(Rejected):
        cluster.create(CONFIG_MAPS, config_map("held", "two"))
    eventually(lambda: cluster.get(CONFIG_MAPS, "one", "held").metadata.deletion_timestamp, "the mark")
    cluster.patch(CONFIG_MAPS, "one", "held", {"metadata": {"finalizers": None}})
    eventually(
        lambda: "held" not in {each.metadata.name for each in cluster.list(NAMESPACES).items}, "the namespace to go"
    )


@pytest.mark.parametrize("selector", ["a=b=c", "a b", "in (x)", "a in x", "=b"])
def test_a_selector_that_cannot_be_read_is_refused(cluster: Cluster, namespace: str, selector: str) -> None:
    """It does not quietly select nothing."""
    with pytest.raises(Rejected):
        cluster.list(PODS, namespace, Selector(labels=selector))
    with pytest.raises(Rejected):
        cluster.list(PODS, namespace, Selector(fields="spec.no-such-field=x"))


def test_lists_are_selected_by_namespace_labels_and_fields(cluster: Cluster, namespace: str) -> None:
    """As far as components use selectors."""
    for name, labels in (("a", {"app": "x"}), ("b", {"app": "y"}), ("c", {})):
        cluster.create(PODS, pod(namespace, name, metadata={"labels": labels}))
    found = {
        "app=x": {"a"},
        "app!=x": {"b", "c"},
        "app in (x,y)": {"a", "b"},
        "app in(x,y)": {"a", "b"},
        "app notin (x)": {"b", "c"},
        "app": {"a", "b"},
        "!app": {"c"},
        "app,app!=y": {"a"},
    }
    for selector, expected in found.items():
        assert names(cluster, namespace, Selector(labels=selector)) == expected, selector
    assert names(cluster, namespace, Selector(fields="metadata.name=b")) == {"b"}
    assert names(cluster, namespace, Selector(fields="spec.nodeName=")) == {"a", "b", "c"}
    assert names(cluster, "default", Selector(labels="app")) == set()


def test_a_long_list_comes_whole(cluster: Cluster, namespace: str) -> None:
    """Also when it takes several pages."""
    for number in range(520):
        cluster.create(CONFIG_MAPS, config_map(namespace, f"m-{number}"))
    listing = cluster.list(CONFIG_MAPS, namespace, Selector(fields="metadata.name!=kube-root-ca.crt"))
    assert len({item.metadata.name for item in listing.items}) == len(listing.items) == 520


def test_cluster_wide_objects_have_no_namespace(cluster: Cluster) -> None:
    """Nodes, for one; their status is written apart."""
    cluster.create(NODES, {"metadata": {"name": "n-1", "labels": {"a": "b"}}})
    status = {"status": {"allocatable": {"example.com/gpu": "8"}, "capacity": {"example.com/gpu": "8"}}}
    patched = cluster.patch(NODES, "n-1", "", status, subresource="status")
    assert patched.status.allocatable["example.com/gpu"] == "8"
    assert cluster.get(NODES, "n-1").metadata.namespace == ""
    cluster.delete(NODES, "n-1")


def test_a_namespace_takes_its_objects_along(cluster: Cluster) -> None:
    """Nothing outlives its namespace."""
    cluster.create(NAMESPACES, {"metadata": {"name": "doomed"}})
    cluster.create(CONFIG_MAPS, config_map("doomed", "one"))
    cluster.delete(NAMESPACES, "doomed")
    eventually(
        lambda: "doomed" not in {each.metadata.name for each in cluster.list(NAMESPACES).items}, "the namespace to go"
    )
    assert cluster.list(CONFIG_MAPS, "doomed").items == []


def names(cluster: Cluster, namespace: str, selector: Selector | None = None) -> set[str]:
    """Name the pods of a namespace."""
    return {item.metadata.name for item in cluster.list(PODS, namespace, selector or Selector()).items}
