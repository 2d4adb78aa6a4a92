"""Objects: what an API server does to them, and the in-memory cluster likewise."""

import re
import threading
from typing import Any

import pytest
from msgspec.structs import replace

from cluster import api
from cluster.errors import AlreadyExists, Conflict, NotFound, Rejected
from cluster.events import WARNING, EventRecorder
from cluster.interface import Cluster, Selector
from cluster.objects import (
    CONFIG_MAPS,
    EVENTS,
    NAMESPACES,
    NODES,
    PODS,
    VALIDATING_WEBHOOKS,
    Metadata,
    ObjectReference,
    Pod,
)
from tests.cluster.objects import config_map, gpu_pod, pod
from tests.waiting import eventually


def test_a_created_object_has_identity_and_version(cluster: Cluster, namespace: str) -> None:
    created = cluster.create(CONFIG_MAPS, config_map(namespace, "one", key="value"))
    assert re.fullmatch(r"[0-9a-f-]{36}", created.metadata.uid)
    assert created.metadata.resource_version.isdecimal()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", created.metadata.creation_timestamp or "")
    assert cluster.get(CONFIG_MAPS, "one", namespace) == created


def test_a_name_can_be_generated(cluster: Cluster, namespace: str) -> None:
    made = [cluster.create(PODS, pod(namespace)) for _ in range(2)]
    assert made[0].metadata.name != made[1].metadata.name
    assert all(re.fullmatch(r"pod-[bcdfghjklmnpqrstvwxz2456789]{5}", each.metadata.name) for each in made)


def test_a_name_can_be_used_once(cluster: Cluster, namespace: str) -> None:
    """The second create fails and changes nothing."""
    first = cluster.create(CONFIG_MAPS, config_map(namespace, "one", key="first"))
    with pytest.raises(AlreadyExists):
        cluster.create(CONFIG_MAPS, config_map(namespace, "one", key="second"))
    assert cluster.get(CONFIG_MAPS, "one", namespace) == first


def test_a_deleted_name_can_be_used_again_with_another_uid(cluster: Cluster, namespace: str) -> None:
    first = cluster.create(CONFIG_MAPS, config_map(namespace, "one"))
    cluster.delete(CONFIG_MAPS, "one", namespace)
    second = cluster.create(CONFIG_MAPS, config_map(namespace, "one"))
    assert first.metadata.uid != second.metadata.uid
    assert int(first.metadata.resource_version) < int(second.metadata.resource_version)


def test_a_missing_object_or_namespace_is_not_found(cluster: Cluster, namespace: str) -> None:
    for attempt in (
        lambda: cluster.get(CONFIG_MAPS, "none", namespace),
        lambda: cluster.patch(CONFIG_MAPS, "none", namespace, {"data": {}}),
        lambda: cluster.delete(CONFIG_MAPS, "none", namespace),
        lambda: cluster.create(CONFIG_MAPS, config_map("no-such-namespace", "one")),
    ):
        with pytest.raises(NotFound):
            attempt()


@pytest.mark.parametrize("name", ["Upper", "under_score", "-dash", "x" * 254])
def test_an_invalid_name_is_rejected(cluster: Cluster, namespace: str, name: str) -> None:
    with pytest.raises(Rejected):
        cluster.create(CONFIG_MAPS, config_map(namespace, name))


def test_an_update_of_a_changed_object_conflicts(cluster: Cluster, namespace: str) -> None:
    """Of two writers that read the same version, one succeeds and the other gets a Conflict."""
    read = cluster.create(CONFIG_MAPS, config_map(namespace, "one", n="0"))
    first = cluster.update(CONFIG_MAPS, replace(read, data={"n": "1"}))
    with pytest.raises(Conflict):
        cluster.update(CONFIG_MAPS, replace(read, data={"n": "2"}))
    assert cluster.get(CONFIG_MAPS, "one", namespace) == first
    assert first.data == {"n": "1"}
    assert first.metadata.uid == read.metadata.uid


def test_an_update_of_a_recreated_object_conflicts(cluster: Cluster, namespace: str) -> None:
    read = cluster.create(CONFIG_MAPS, config_map(namespace, "one"))
    cluster.delete(CONFIG_MAPS, "one", namespace)
    cluster.create(CONFIG_MAPS, config_map(namespace, "one"))
    with pytest.raises(Conflict):
        cluster.update(CONFIG_MAPS, replace(read, data={"n": "1"}))


def test_an_update_that_changes_nothing_keeps_the_version(cluster: Cluster, namespace: str) -> None:
    """And causes no watch event."""
    read = cluster.create(CONFIG_MAPS, config_map(namespace, "one", n="0"))
    assert cluster.update(CONFIG_MAPS, read).metadata.resource_version == read.metadata.resource_version


def test_an_update_without_a_version_or_of_a_partial_kind_is_a_type_error(cluster: Cluster, namespace: str) -> None:
    """The interface does not offer blind writes, nor writes that drop unknown fields."""
    cluster.create(CONFIG_MAPS, config_map(namespace, "one"))
    with pytest.raises(TypeError, match="resourceVersion"):
        cluster.update(CONFIG_MAPS, config_map(namespace, "one"))
    with pytest.raises(TypeError, match="in part"):
        cluster.update(PODS, Pod(metadata=Metadata(name="p", namespace=namespace, resource_version="1")))


def test_a_patch_merges_and_null_removes(cluster: Cluster, namespace: str) -> None:
    cluster.create(CONFIG_MAPS, config_map(namespace, "one", a="1", b="2"))
    patched = cluster.patch(
        CONFIG_MAPS, "one", namespace, {"data": {"a": None, "c": "3"}, "metadata": {"labels": {"x": "y"}}}
    )
    assert patched.data == {"b": "2", "c": "3"}
    assert patched.metadata.labels == {"x": "y"}


def test_a_patch_with_a_version_is_compare_and_swap(cluster: Cluster, namespace: str) -> None:
    read = cluster.create(CONFIG_MAPS, config_map(namespace, "one"))
    change = {"metadata": {"resourceVersion": read.metadata.resource_version}, "data": {"n": "1"}}
    assert cluster.patch(CONFIG_MAPS, "one", namespace, change).data == {"n": "1"}
    with pytest.raises(Conflict):
        cluster.patch(CONFIG_MAPS, "one", namespace, change)


def test_apply_merges_list_entries_by_name(cluster: Cluster) -> None:
    """Other entries stay as they are; and an object that was deleted or replaced is a Conflict."""
    hooks = [unused_webhook(name) for name in ("one.quotient.dev", "two.quotient.dev")]
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


def unused_webhook(name: str) -> dict[str, Any]:
    """Return a webhook whose rules match nothing."""
    rule = {"apiGroups": ["test.quotient.dev"], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["tests"]}
    return {
        "name": name,
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Ignore",
        "clientConfig": {"url": "https://127.0.0.1:1/"},
        "rules": [rule],
    }


def test_concurrent_patches_are_all_applied(cluster: Cluster, namespace: str) -> None:
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


def test_of_concurrent_updates_of_one_version_one_succeeds(cluster: Cluster, namespace: str) -> None:
    """So a counter that four writers increment by compare-and-swap loses no increment."""
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


def test_status_and_spec_are_patched_separately(cluster: Cluster, namespace: str) -> None:
    cluster.create(PODS, pod(namespace, "p"))
    both = {"metadata": {"labels": {"a": "b"}}, "status": {"phase": "Running"}}
    assert cluster.patch(PODS, "p", namespace, both).status.phase == "Pending"
    patched = cluster.patch(PODS, "p", namespace, {"status": {"phase": "Running"}}, subresource="status")
    assert (patched.status.phase, patched.metadata.labels) == ("Running", {"a": "b"})


def test_the_resources_of_a_stored_pod_cannot_be_changed(cluster: Cluster, namespace: str) -> None:
    """So an admitted pod cannot outgrow its charge."""
    cluster.create(PODS, gpu_pod(namespace, "p", **{"example.com/gpu": "1"}))
    other = [{"name": "c0", "image": "example/image", "resources": {"limits": {"example.com/gpu": "2"}}}]
    with pytest.raises(Rejected):
        cluster.patch(PODS, "p", namespace, {"spec": {"containers": other}})


def test_a_dry_run_returns_the_object_and_stores_nothing(cluster: Cluster, namespace: str) -> None:
    tried = cluster.create(PODS, pod(namespace, "p"), dry_run=True)
    assert tried.metadata.uid
    with pytest.raises(NotFound):
        cluster.get(PODS, "p", namespace)


def test_a_delete_with_a_uid_deletes_only_that_object(cluster: Cluster, namespace: str) -> None:
    """And not another one that has its name by now."""
    made = cluster.create(CONFIG_MAPS, config_map(namespace, "one"))
    with pytest.raises(Conflict):
        cluster.delete(CONFIG_MAPS, "one", namespace, uid="11111111-2222-3333-4444-555555555555")
    cluster.delete(CONFIG_MAPS, "one", namespace, uid=made.metadata.uid)
    with pytest.raises(NotFound):
        cluster.get(CONFIG_MAPS, "one", namespace)


def test_a_bound_pod_is_deleted_gracefully_and_an_unbound_one_at_once(cluster: Cluster, namespace: str) -> None:
    """The kubelet has to stop it first; until then it has a deletion timestamp and a grace period."""
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
    eventually(lambda: "bound" not in names(cluster, namespace), "the bound pod to be gone")


def test_an_object_with_finalizers_is_deleted_when_they_are_removed(cluster: Cluster, namespace: str) -> None:
    held = config_map(namespace, "one")
    held = replace(held, metadata=replace(held.metadata, finalizers=["quotient.dev/test"]))
    cluster.create(CONFIG_MAPS, held)
    cluster.delete(CONFIG_MAPS, "one", namespace)
    assert cluster.get(CONFIG_MAPS, "one", namespace).metadata.deletion_timestamp
    cluster.patch(CONFIG_MAPS, "one", namespace, {"metadata": {"finalizers": None}})
    with pytest.raises(NotFound):
        cluster.get(CONFIG_MAPS, "one", namespace)


def test_a_bind_sets_node_and_annotations_in_one_write(cluster: Cluster, namespace: str) -> None:
    """So a bound pod always has its placement."""
    made = cluster.create(PODS, pod(namespace, "p", metadata={"annotations": {"kept": "yes"}}))
    cluster.bind("p", namespace, "node-x", uid=made.metadata.uid, annotations={"example.com/placement": "{}"})
    bound = cluster.get(PODS, "p", namespace)
    assert bound.spec.node_name == "node-x"
    assert bound.metadata.annotations == {"kept": "yes", "example.com/placement": "{}"}


def test_a_bind_of_a_bound_or_replaced_pod_conflicts(cluster: Cluster, namespace: str) -> None:
    """As with a late bind of a former leader."""
    made = cluster.create(PODS, pod(namespace, "p"))
    with pytest.raises(Conflict):
        cluster.bind("p", namespace, "node-x", uid="11111111-2222-3333-4444-555555555555", annotations={})
    cluster.bind("p", namespace, "node-x", uid=made.metadata.uid, annotations={})
    with pytest.raises(Conflict):
        cluster.bind("p", namespace, "node-y", uid=made.metadata.uid, annotations={"late": "yes"})
    assert "late" not in cluster.get(PODS, "p", namespace).metadata.annotations


def test_defaults_are_set_and_quantities_made_canonical(cluster: Cluster, namespace: str) -> None:
    """What components read differs from the manifest."""
    made = cluster.create(PODS, gpu_pod(namespace, "p", **{"example.com/gpu": 1000, "memory": "8192Mi"}))
    resources = (made.spec.containers or [])[0].resources
    assert resources is not None
    assert resources.limits == resources.requests == {"example.com/gpu": "1k", "memory": "8Gi"}
    assert made.spec.scheduler_name == "default-scheduler"
    assert made.status.phase == "Pending"


@pytest.mark.parametrize("amount", ["1_000", "NaN", "1 Gi", "8GB"])
def test_an_invalid_quantity_is_rejected(cluster: Cluster, namespace: str, amount: str) -> None:
    """Before any webhook is called."""
    with pytest.raises(Rejected):
        cluster.create(PODS, gpu_pod(namespace, "p", **{"example.com/gpu": amount}))


MALFORMED = {
    "no spec": {"spec": None},
    "no containers": {"spec": {}},
    "containers that are text": {"spec": {"containers": "c"}},
    "a container that is a number": {"spec": {"containers": [5]}},
    "limits that are a list": {"spec": {"containers": [{"name": "c", "image": "i", "resources": {"limits": [1]}}]}},
    "an annotation that is a number": {"metadata": {"name": "p", "annotations": {"a": 50}}},
}


@pytest.mark.parametrize("changes", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_pod_is_rejected(cluster: Cluster, namespace: str, changes: dict[str, Any]) -> None:
    made = pod(namespace, "p")
    made["metadata"] |= changes.get("metadata", {})
    if "spec" in changes:
        made["spec"] = changes["spec"]
    with pytest.raises(Rejected):
        cluster.create(PODS, made)


def test_nulls_count_as_absent(cluster: Cluster, namespace: str) -> None:
    """As in YAML's `annotations:` without a value."""
    made = pod(namespace, "p", metadata={"annotations": None, "labels": None})
    assert cluster.create(PODS, made).metadata.annotations == {}


def test_calls_for_one_object_need_its_name_and_namespace(cluster: Cluster, namespace: str) -> None:
    """The API would take an empty name for the whole collection, also in a delete."""
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
    "a fraction of an extended resource": {"limits": {"example.com/gpu": "0.3"}},
    "requests that differ from limits": {"limits": {"example.com/gpu": "2"}, "requests": {"example.com/gpu": "1"}},
    "requests without limits": {"requests": {"example.com/gpu": "1"}},
}


@pytest.mark.parametrize("resources", UNCREATABLE.values(), ids=UNCREATABLE.keys())
def test_extended_resources_must_be_whole_and_requests_equal_to_limits(
    cluster: Cluster, namespace: str, resources: dict[str, Any]
) -> None:
    """Checked after admission, so a mutating webhook may still correct them."""
    containers = [{"name": "c0", "image": "i", "resources": resources}]
    with pytest.raises(Rejected):
        cluster.create(PODS, pod(namespace, "p", spec={"containers": containers}))


def test_objects_that_are_too_large_or_invalid_are_rejected(cluster: Cluster, namespace: str) -> None:
    """Limits that ledgers, placements and labels have to respect."""
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


def test_an_immutable_config_map_cannot_be_changed(cluster: Cluster, namespace: str) -> None:
    """Nor made mutable again."""
    made = cluster.create(CONFIG_MAPS, replace(config_map(namespace, "one", a="1"), immutable=True))
    for changed in (replace(made, data={"a": "2"}), replace(made, immutable=None)):
        with pytest.raises(Rejected):
            cluster.update(CONFIG_MAPS, changed)


def test_fields_of_the_server_cannot_be_changed(cluster: Cluster, namespace: str) -> None:
    """A changed name is rejected; uid and creation time are ignored."""
    made = cluster.create(CONFIG_MAPS, config_map(namespace, "one"))
    for metadata in ({"name": "other"}, {"namespace": "default"}):
        with pytest.raises(Rejected):
            cluster.patch(CONFIG_MAPS, "one", namespace, {"metadata": metadata})
    cluster.patch(CONFIG_MAPS, "one", namespace, {"metadata": {"uid": None, "creationTimestamp": None}})
    assert cluster.get(CONFIG_MAPS, "one", namespace).metadata == made.metadata


def test_no_finalizer_can_be_added_to_an_object_that_is_being_deleted(cluster: Cluster, namespace: str) -> None:
    """And a second delete changes nothing."""
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


def test_a_grace_period_can_only_be_shortened(cluster: Cluster, namespace: str) -> None:
    """By a second delete."""
    made = cluster.create(PODS, pod(namespace, "p"))
    cluster.bind("p", namespace, "no-such-node", uid=made.metadata.uid, annotations={})
    cluster.delete(PODS, "p", namespace, grace_s=20)
    cluster.delete(PODS, "p", namespace)
    assert cluster.get(PODS, "p", namespace).metadata.deletion_grace_period_seconds == 20
    cluster.delete(PODS, "p", namespace, grace_s=5)
    assert cluster.get(PODS, "p", namespace).metadata.deletion_grace_period_seconds == 5
    cluster.delete(PODS, "p", namespace, grace_s=0)


def test_the_status_of_a_new_pod_is_ignored(cluster: Cluster, namespace: str) -> None:
    assert cluster.create(PODS, pod(namespace, "p", status={"phase": "Running"})).status.phase == "Pending"


def test_a_gated_pod_cannot_be_bound(cluster: Cluster, namespace: str) -> None:
    gates = [{"name": "quotient.dev/test"}]
    made = cluster.create(PODS, pod(namespace, "p", spec={"schedulingGates": gates}))
    with pytest.raises(Conflict):
        cluster.bind("p", namespace, "node-x", uid=made.metadata.uid, annotations={})


def test_a_long_prefix_of_a_generated_name_is_cut(cluster: Cluster, namespace: str) -> None:
    """So that the name can be used as a label's value."""
    made = cluster.create(PODS, pod(namespace, metadata={"generateName": "x" * 70}))
    assert len(made.metadata.name) == 63


def test_a_namespace_has_its_name_as_a_label(cluster: Cluster, namespace: str) -> None:
    """Webhook configurations select namespaces by it."""
    created = cluster.get(NAMESPACES, namespace)
    assert created.metadata.labels["kubernetes.io/metadata.name"] == namespace
    assert created.status.phase == "Active"


def test_a_namespace_terminates_when_the_finalizers_in_it_are_removed(cluster: Cluster) -> None:
    """Until then no object can be created in it."""
    cluster.create(NAMESPACES, {"metadata": {"name": "held"}})
    held = config_map("held", "one")
    cluster.create(CONFIG_MAPS, replace(held, metadata=replace(held.metadata, finalizers=["quotient.dev/test"])))
    cluster.delete(NAMESPACES, "held")
    assert cluster.get(NAMESPACES, "held").status.phase == "Terminating"
    with pytest.raises(Rejected):
        cluster.create(CONFIG_MAPS, config_map("held", "two"))
    eventually(lambda: cluster.get(CONFIG_MAPS, "one", "held").metadata.deletion_timestamp, "the deletion timestamp")
    cluster.patch(CONFIG_MAPS, "one", "held", {"metadata": {"finalizers": None}})
    eventually(
        lambda: "held" not in {each.metadata.name for each in cluster.list(NAMESPACES).items},
        "the namespace to be gone",
    )


@pytest.mark.parametrize("selector", ["a=b=c", "a b", "in (x)", "a in x", "=b"])
def test_an_invalid_selector_is_rejected(cluster: Cluster, namespace: str, selector: str) -> None:
    """It does not silently select nothing."""
    with pytest.raises(Rejected):
        cluster.list(PODS, namespace, Selector(labels=selector))
    with pytest.raises(Rejected):
        cluster.list(PODS, namespace, Selector(fields="spec.no-such-field=x"))


def test_lists_are_filtered_by_namespace_labels_and_fields(cluster: Cluster, namespace: str) -> None:
    for name, labels in (("a", {"app": "x"}), ("b", {"app": "y"}), ("c", {})):
        cluster.create(PODS, pod(namespace, name, metadata={"labels": labels}))
    matches = {
        "app=x": {"a"},
        "app!=x": {"b", "c"},
        "app in (x,y)": {"a", "b"},
        "app in(x,y)": {"a", "b"},
        "app notin (x)": {"b", "c"},
        "app": {"a", "b"},
        "!app": {"c"},
        "app,app!=y": {"a"},
    }
    for selector, expected in matches.items():
        assert names(cluster, namespace, Selector(labels=selector)) == expected, selector
    assert names(cluster, namespace, Selector(fields="metadata.name=b")) == {"b"}
    assert names(cluster, namespace, Selector(fields="spec.nodeName=")) == {"a", "b", "c"}
    assert names(cluster, "default", Selector(labels="app")) == set()


def test_events_are_selected_by_their_object_reason_and_component(cluster: Cluster, namespace: str) -> None:
    for name, reason, component in (("a", "FailedCreate", "job-controller"), ("b", "QuotaExceeded", "webhook")):
        about = ObjectReference(api_version="batch/v1", kind="Job", namespace=namespace, name=name, uid=f"uid-{name}")
        EventRecorder(cluster, component).record(about, reason, "text", type_=WARNING)
    for fields, expected in (
        ("involvedObject.uid=uid-a", {"a"}),
        ("involvedObject.kind=Job,involvedObject.name=b", {"b"}),
        ("involvedObject.kind=Pod", set()),
        ("reason=FailedCreate", {"a"}),
        ("reportingComponent=webhook", {"b"}),
        ("type=Warning", {"a", "b"}),
    ):
        found = cluster.list(EVENTS, namespace, Selector(fields=fields)).items
        assert {each.involved_object.name for each in found} == expected, fields


def test_a_list_of_several_pages_is_complete(cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "PAGE_SIZE", 100)
    for number in range(520):
        cluster.create(CONFIG_MAPS, config_map(namespace, f"m-{number}"))
    listing = cluster.list(CONFIG_MAPS, namespace, Selector(fields="metadata.name!=kube-root-ca.crt"))
    assert len({item.metadata.name for item in listing.items}) == len(listing.items) == 520


def test_cluster_wide_objects_have_no_namespace(cluster: Cluster) -> None:
    """Nodes, for example; their status is patched separately."""
    cluster.create(NODES, {"metadata": {"name": "n-1", "labels": {"a": "b"}}})
    status = {"status": {"allocatable": {"example.com/gpu": "8"}, "capacity": {"example.com/gpu": "8"}}}
    patched = cluster.patch(NODES, "n-1", "", status, subresource="status")
    assert patched.status.allocatable["example.com/gpu"] == "8"
    assert cluster.get(NODES, "n-1").metadata.namespace == ""
    cluster.delete(NODES, "n-1")


def test_the_objects_of_a_namespace_are_deleted_with_it(cluster: Cluster) -> None:
    cluster.create(NAMESPACES, {"metadata": {"name": "deleted"}})
    cluster.create(CONFIG_MAPS, config_map("deleted", "one"))
    cluster.delete(NAMESPACES, "deleted")
    eventually(
        lambda: "deleted" not in {each.metadata.name for each in cluster.list(NAMESPACES).items},
        "the namespace to be gone",
    )
    assert cluster.list(CONFIG_MAPS, "deleted").items == []


def names(cluster: Cluster, namespace: str, selector: Selector | None = None) -> set[str]:
    return {item.metadata.name for item in cluster.list(PODS, namespace, selector or Selector()).items}
