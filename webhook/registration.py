"""The objects that make an API server call the webhook: what for, and above all what not for.

Rules cannot select pods by the resources they ask for, but matchConditions can. An object that neither speaks one of
our vocabularies nor carries an annotation of ours never leaves the API server, so `failurePolicy: Fail` can only ever
hold up GPU pods. No label exempts anything; only our own namespace is left out, by a label nobody can change.
"""

import base64
from collections.abc import Iterable
from typing import Any

from vcuda.names import ANCESTOR_OWNED, API_GROUP, APP, APP_LABEL, WEBHOOK_CONFIGURATION
from vcuda.workload_kinds import CRON_JOB_TEMPLATE, TEMPLATE, WORKLOAD_KINDS
from webhook.admission_config import KUBE_SCHEDULER, AdmissionConfig
from webhook.quota_policy import elsewhere, is_quota, quota_policy_objects

MUTATING, VALIDATING = "MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"
TIMEOUT_S = 10


def registration(config: AdmissionConfig, target: str, ca_bundle: bytes = b"") -> list[dict[str, Any]]:
    """Write both configurations for a webhook at a URL or behind a Service written as NAMESPACE/NAME; and the guard."""
    return [
        configuration(config, target, ca_bundle, mutating=True),
        configuration(config, target, ca_bundle, mutating=False),
        *quota_policy_objects(config),
    ]


def configuration(config: AdmissionConfig, target: str, ca_bundle: bytes, *, mutating: bool) -> dict[str, Any]:
    """Write one configuration."""
    route = "mutate" if mutating else "validate"
    hooks = [
        hook(f"pods.{route}", pod_rules(), [speaks(config, "spec", "metadata")]),
        # One condition names one path: workloads are registered by where they keep their template.
        hook(f"workloads.{route}", workload_rules(TEMPLATE), [uncontrolled(), speaks_in_template(config, TEMPLATE)]),
        hook(f"cronjobs.{route}", workload_rules(CRON_JOB_TEMPLATE), [speaks_in_template(config, CRON_JOB_TEMPLATE)]),
    ]
    if not mutating:
        hooks.append(
            hook("bindings.validate", [pod_rule(["CREATE"], "pods/binding", "bindings")], [foreign_binder(config)])
        )
        status = pod_rule(["UPDATE"], "pods/status")
        hooks.append(hook("status.validate", [status], [changes_ours(config)]))
        hooks.append(hook("quotas.validate", created_and_updated({"": ["configmaps"]}), [quota(config)]))
    for each in hooks:
        each["clientConfig"] = client_config(target, route, ca_bundle)
        each["namespaceSelector"] = elsewhere(config.system_namespace)
        if mutating:
            each["reinvocationPolicy"] = "IfNeeded"
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": MUTATING if mutating else VALIDATING,
        "metadata": {"name": WEBHOOK_CONFIGURATION, "labels": {APP_LABEL: APP}},
        "webhooks": hooks,
    }


def hook(name: str, config: list[dict[str, Any]], conditions: list[dict[str, str]]) -> dict[str, Any]:
    """Write one webhook."""
    return {
        "name": f"{name}.{API_GROUP}",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "NoneOnDryRun",
        "failurePolicy": "Fail",
        "matchPolicy": "Equivalent",
        "timeoutSeconds": TIMEOUT_S,
        "rules": config,
        "matchConditions": conditions,
    }


def client_config(target: str, route: str, ca_bundle: bytes) -> dict[str, Any]:
    """Say where the webhook is."""
    if target.startswith("https://"):
        found: dict[str, Any] = {"url": f"{target.rstrip('/')}/{route}"}
    else:
        namespace, _, name = target.partition("/")
        found = {"service": {"namespace": namespace, "name": name, "path": f"/{route}", "port": 443}}
    return found | ({"caBundle": base64.b64encode(ca_bundle).decode()} if ca_bundle else {})


def pod_rules() -> list[dict[str, Any]]:
    """Say for which operations on pods to call; containers may be added later, too."""
    return [pod_rule(["CREATE", "UPDATE"], "pods"), pod_rule(["UPDATE"], "pods/ephemeralcontainers")]


def pod_rule(operations: list[str], *resources: str) -> dict[str, Any]:
    """Write a rule on pods, or on what belongs to them."""
    return {
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "scope": "Namespaced",
        "operations": operations,
        "resources": list(resources),
    }


def workload_rules(template: tuple[str, ...]) -> list[dict[str, Any]]:
    """Match the workloads that keep their pod template at this path."""
    plurals: dict[str, list[str]] = {}
    for each in WORKLOAD_KINDS:
        if each.template == template:
            plurals.setdefault(each.group, []).append(each.plural)
    return created_and_updated(plurals)


def speaks_in_template(config: AdmissionConfig, template: tuple[str, ...]) -> dict[str, str]:
    path = ".".join(template)
    return speaks(config, f"{path}.spec", f"{path}.metadata")


def created_and_updated(resources: dict[str, list[str]]) -> list[dict[str, Any]]:
    """Say for which workloads to call."""
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


def speaks(config: AdmissionConfig, spec: str, metadata: str) -> dict[str, str]:
    """Match objects whose containers ask in one of our vocabularies, or that carry an annotation only we may write.

    On UPDATE the object before counts as well: otherwise taking an annotation away would go unseen. Every field may be
    missing, and an error in a condition would count against the object. The API server bounds what a condition may
    cost, so nothing here may depend on how many annotations a stranger's pod has: keys are looked up, not searched.
    """
    containers = " + ".join(either(f"o.{spec}.{field}", "[]") for field in ("containers", "initContainers"))
    resources = ", ".join(either(f"c.resources.{part}", "{}") for part in ("limits", "requests"))
    ours = f"[{quoted(config.scheme.by_key)}].exists(k, k in r)"
    asks = f"({containers}).exists(c, has(c.resources) && [{resources}].exists(r, {ours}))"
    carries = f"has(o.{metadata}.annotations) && [{quoted(owned(config))}].exists(k, k in o.{metadata}.annotations)"
    expression = (
        f"[object, oldObject].exists(o, o != null && "
        f"(({guards(f'o.{spec}')} && {asks}) || ({guards(f'o.{metadata}')} && {carries})))"
    )
    return {"name": "speaks-of-gpus", "expression": expression}


def owned(config: AdmissionConfig) -> list[str]:
    """List the annotations that make a pod without GPUs our business: each would make it look like one with them."""
    marks = [f"{key}0" if key.endswith("-") else key for key in ANCESTOR_OWNED]
    first = [f"{names.domain}/{mark}" for names in config.scheme.all_names for mark in marks]
    return [config.names.limits, config.names.placement, *first]


def changes_ours(config: AdmissionConfig) -> dict[str, str]:
    """Match updates of a pod's status that change an annotation of ours; a kubelet's never do.

    Every kubelet and scheduler writes status all the time, so what they all have in common is looked at first.
    """
    keys = quoted([*owned(config), *config.frozen_annotations])
    after, before = (either(f"{which}.metadata.annotations", "{}") for which in ("object", "oldObject"))
    value = "(k in {0} ? {0}[k] : '')"
    expression = f"{after} != {before} && [{keys}].exists(k, {value.format(after)} != {value.format(before)})"
    return {"name": "changes-annotations-of-ours", "expression": expression}


def quota(config: AdmissionConfig) -> dict[str, str]:
    """Match ConfigMaps that are quotas."""
    return {"name": "is-a-quota", "expression": is_quota(config)}


def either(path: str, otherwise: str) -> str:
    """Take a field, or something else where it is missing."""
    return f"(has({path}) ? {path} : {otherwise})"


def guards(path: str) -> str:
    """Make sure of every field on the way."""
    steps = path.split(".")
    return " && ".join(f"has({'.'.join(steps[: length + 1])})" for length in range(1, len(steps)))


def quoted(words: Iterable[str]) -> str:
    """Write a list of CEL strings."""
    return ", ".join(f"'{word}'" for word in words)


def uncontrolled() -> dict[str, str]:
    """Leave out what a controller made: its owner was asked about, and refusing here would only stall it."""
    return {
        "name": "made-by-a-person",
        "expression": "!has(object.metadata.ownerReferences) || "
        "!object.metadata.ownerReferences.exists(o, has(o.controller) && o.controller)",
    }


def foreign_binder(config: AdmissionConfig) -> dict[str, str]:
    """Leave out those who may bind: other pods must not wait for us."""
    known = quoted((KUBE_SCHEDULER, *config.binders))
    return {
        "name": "not-by-a-scheduler",
        "expression": f"!(request.userInfo.username in [{known}]) && "
        f"!request.userInfo.username.startsWith('system:serviceaccount:{config.system_namespace}:')",
    }
