"""The webhook configurations: which requests the API server sends to the webhook.

A rule cannot select pods by their resources, but matchConditions (CEL, evaluated by the API server) can. Objects that
neither request GPUs nor carry an annotation of Quotient's are not sent, so `failurePolicy: Fail` can only affect GPU
pods. No label exempts an object; only Quotient's own namespace is excluded, by its immutable name label.
"""

import base64
from collections.abc import Iterable
from typing import Any

from vcuda.names import ANCESTOR_ANNOTATIONS, API_GROUP, APP, APP_LABEL, WEBHOOK_CONFIGURATION
from vcuda.predicates import MAX_PREDICATES
from vcuda.workload_kinds import CRON_JOB_TEMPLATE, TEMPLATE, WORKLOAD_KINDS
from webhook.admission_config import KUBE_SCHEDULER, AdmissionConfig
from webhook.quota_policy import other_namespaces_selector, quota_expression, quota_policy_objects

MUTATING, VALIDATING = "MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"
# Kubernetes' default. The webhook itself gives up before, after `webhook.answerWithinS`.
TIMEOUT_S = 10


def registration(config: AdmissionConfig, target: str, ca_bundle: bytes = b"") -> list[dict[str, Any]]:
    """Return both webhook configurations and the quota policy.

    `target` is an https URL, or a Service as NAMESPACE/NAME.
    """
    return [
        webhook_configuration(config, target, ca_bundle, mutating=True),
        webhook_configuration(config, target, ca_bundle, mutating=False),
        *quota_policy_objects(config),
    ]


def webhook_configuration(config: AdmissionConfig, target: str, ca_bundle: bytes, *, mutating: bool) -> dict[str, Any]:
    route = "mutate" if mutating else "validate"
    webhooks = [
        webhook_entry(f"pods.{route}", pod_rules(), [gpu_condition(config, "spec", "metadata")]),
        # A condition reads one path, so workloads are grouped by where they have their template.
        webhook_entry(
            f"workloads.{route}",
            workload_rules(TEMPLATE),
            [not_controlled_condition(), template_gpu_condition(config, TEMPLATE)],
        ),
        webhook_entry(
            f"cronjobs.{route}", workload_rules(CRON_JOB_TEMPLATE), [template_gpu_condition(config, CRON_JOB_TEMPLATE)]
        ),
    ]
    if not mutating:
        webhooks += [
            # Schedulers bind through the subresource; the API still serves the older form too.
            webhook_entry(
                "bindings.validate", [pod_rule(["CREATE"], "pods/binding", "bindings")], [binder_condition(config)]
            ),
            # An update of the status can change annotations as well.
            webhook_entry(
                "status.validate", [pod_rule(["UPDATE"], "pods/status")], [annotation_change_condition(config)]
            ),
            webhook_entry("quotas.validate", create_update_rules({"": ["configmaps"]}), [quota_condition(config)]),
        ]
    for each in webhooks:
        each["clientConfig"] = client_config(target, route, ca_bundle)
        each["namespaceSelector"] = other_namespaces_selector(config.system_namespace)
        if mutating:
            # Containers that another webhook adds have to be rewritten too.
            each["reinvocationPolicy"] = "IfNeeded"
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": MUTATING if mutating else VALIDATING,
        "metadata": {"name": WEBHOOK_CONFIGURATION, "labels": {APP_LABEL: APP}},
        "webhooks": webhooks,
    }


def webhook_entry(name: str, rules: list[dict[str, Any]], conditions: list[dict[str, str]]) -> dict[str, Any]:
    return {
        "name": f"{name}.{API_GROUP}",
        "admissionReviewVersions": ["v1"],
        # A validated pod is charged to its quota, but not in a dry run.
        "sideEffects": "NoneOnDryRun",
        "failurePolicy": "Fail",
        "matchPolicy": "Equivalent",
        "timeoutSeconds": TIMEOUT_S,
        "rules": rules,
        "matchConditions": conditions,
    }


def client_config(target: str, route: str, ca_bundle: bytes) -> dict[str, Any]:
    if target.startswith("https://"):
        address: dict[str, Any] = {"url": f"{target.rstrip('/')}/{route}"}
    else:
        namespace, _, name = target.partition("/")
        address = {"service": {"namespace": namespace, "name": name, "path": f"/{route}", "port": 443}}
    return address | ({"caBundle": base64.b64encode(ca_bundle).decode()} if ca_bundle else {})


def pod_rules() -> list[dict[str, Any]]:
    return [pod_rule(["CREATE", "UPDATE"], "pods"), pod_rule(["UPDATE"], "pods/ephemeralcontainers")]


def pod_rule(operations: list[str], *resources: str) -> dict[str, Any]:
    """Return a rule for pods, or for subresources of them."""
    return {
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "scope": "Namespaced",
        "operations": operations,
        "resources": list(resources),
    }


def workload_rules(template: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return rules for the workloads that have their pod template at this path."""
    plurals: dict[str, list[str]] = {}
    for each in WORKLOAD_KINDS:
        if each.template == template:
            plurals.setdefault(each.group, []).append(each.plural)
    return create_update_rules(plurals)


def create_update_rules(resources: dict[str, list[str]]) -> list[dict[str, Any]]:
    """Return a rule for CREATE and UPDATE per API group."""
    return [
        {
            "apiGroups": [group],
            "apiVersions": ["v1"],
            "scope": "Namespaced",
            "operations": ["CREATE", "UPDATE"],
            "resources": names,
        }
        for group, names in resources.items()
    ]


def template_gpu_condition(config: AdmissionConfig, template: tuple[str, ...]) -> dict[str, str]:
    path = ".".join(template)
    return gpu_condition(config, f"{path}.spec", f"{path}.metadata")


def gpu_condition(config: AdmissionConfig, spec: str, metadata: str) -> dict[str, str]:
    """Match objects that request GPUs in any vocabulary, or have an annotation that only Quotient may write.

    On UPDATE the old object counts as well, otherwise removing an annotation would not be sent.
    """
    # An error in a condition rejects the request, and every field may be absent: so each access is guarded. The API
    # server limits the cost of a condition, so it must not grow with the number of a pod's annotations: the keys are
    # looked up in the map, the map is not searched.
    containers = " + ".join(field_or_default(f"o.{spec}.{field}", "[]") for field in ("containers", "initContainers"))
    resources = ", ".join(field_or_default(f"c.resources.{part}", "{}") for part in ("limits", "requests"))
    has_key = f"[{cel_strings(config.scheme.by_key)}].exists(k, k in r)"
    requests_gpu = f"({containers}).exists(c, has(c.resources) && [{resources}].exists(r, {has_key}))"
    owned = cel_strings(owned_annotations(config))
    has_annotation = f"has(o.{metadata}.annotations) && [{owned}].exists(k, k in o.{metadata}.annotations)"
    expression = (
        f"[object, oldObject].exists(o, o != null && "
        f"(({has_path(f'o.{spec}')} && {requests_gpu}) || ({has_path(f'o.{metadata}')} && {has_annotation})))"
    )
    return {"name": "speaks-of-gpus", "expression": expression}


def owned_annotations(config: AdmissionConfig) -> list[str]:
    """Return the annotations by which a pod without GPUs could pass for one with them.

    A key that ends in the index of a container is listed for container 0 only: CEL would have to search the annotations
    for the others. Pods with GPUs are matched by their resources anyway.
    """
    keys = [f"{key}0" if key.endswith("-") else key for key in ANCESTOR_ANNOTATIONS]
    ancestors = [f"{names.domain}/{key}" for names in config.scheme.all_names for key in keys]
    return [config.names.limits, config.names.placement, *ancestors]


def annotation_change_condition(config: AdmissionConfig) -> dict[str, str]:
    """Match updates of a pod's status that change an owned or a frozen annotation; a kubelet's never do."""
    # GPU pods too are matched by their annotations here: so by those of every container.
    predicates = [
        f"{names.domain}/{ANCESTOR_ANNOTATIONS[0]}{index}"
        for names in config.scheme.all_names
        for index in range(1, MAX_PREDICATES)
    ]
    keys = cel_strings([*owned_annotations(config), *predicates, *config.frozen_annotations])
    after, before = (field_or_default(f"{which}.metadata.annotations", "{}") for which in ("object", "oldObject"))
    value = "(k in {0} ? {0}[k] : '')"
    # Kubelets update status all the time: comparing the whole maps first is cheap, and false for nearly all of them.
    expression = f"{after} != {before} && [{keys}].exists(k, {value.format(after)} != {value.format(before)})"
    return {"name": "changes-annotations-of-ours", "expression": expression}


def quota_condition(config: AdmissionConfig) -> dict[str, str]:
    return {"name": "is-a-quota", "expression": quota_expression(config)}


def not_controlled_condition() -> dict[str, str]:
    """Exclude objects of a controller: their owner was validated, and refusing them would only stall the controller."""
    return {
        "name": "made-by-a-person",
        "expression": "!has(object.metadata.ownerReferences) || "
        "!object.metadata.ownerReferences.exists(o, has(o.controller) && o.controller)",
    }


def binder_condition(config: AdmissionConfig) -> dict[str, str]:
    """Exclude users that may bind any pod, so that scheduling of other pods never depends on the webhook."""
    known = cel_strings((KUBE_SCHEDULER, *config.binders))
    return {
        "name": "not-by-a-scheduler",
        "expression": f"!(request.userInfo.username in [{known}]) && "
        f"!request.userInfo.username.startsWith('system:serviceaccount:{config.system_namespace}:')",
    }


def field_or_default(path: str, default: str) -> str:
    """Return CEL for a field, or for a default where it is absent."""
    return f"(has({path}) ? {path} : {default})"


def has_path(path: str) -> str:
    """Return CEL that is true if every field on a path is present."""
    steps = path.split(".")
    return " && ".join(f"has({'.'.join(steps[: length + 1])})" for length in range(1, len(steps)))


def cel_strings(values: Iterable[str]) -> str:
    """Return values as CEL string literals, separated by commas."""
    return ", ".join(f"'{value}'" for value in values)
