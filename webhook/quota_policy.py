"""The ValidatingAdmissionPolicy that restricts who may change quotas.

Permission to edit ConfigMaps is not permission to change a quota. RBAC grants that on a resource that exists for this
purpose only: `gpuquotas` of group `quotient.dev`, with the verb of the operation. `gpu-quota-status`, which the
controller writes, is guarded by the subresource `status`. The API server evaluates the policy itself, so it applies
while no component of Quotient runs.

A ConfigMap is a quota by its label under any configured domain, or by the name of the ancestors' quota. The object is
checked as it is before and after the operation: removing the label from a quota, and adding it, need permission too.
"""

from typing import Any

from vcuda.names import (
    API_GROUP,
    APP,
    APP_LABEL,
    LEGACY_NAME,
    LEGACY_NAMESPACE,
    NAMESPACE_NAME_LABEL,
    QUOTA_POLICY,
    QUOTA_RESOURCE,
    QUOTA_STATUS,
)
from webhook.admission_config import AdmissionConfig


def quota_policy_objects(config: AdmissionConfig) -> list[dict[str, Any]]:
    """Return the policy and its binding."""
    policy = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": QUOTA_POLICY, "labels": {APP_LABEL: APP}},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {
                "matchPolicy": "Equivalent",
                # The system namespace holds the ledgers, which are large and written often; only Quotient has access.
                "namespaceSelector": other_namespaces_selector(config.system_namespace),
                "resourceRules": [
                    {
                        "apiGroups": [""],
                        "apiVersions": ["v1"],
                        "operations": ["CREATE", "UPDATE", "DELETE"],
                        "resources": ["configmaps"],
                        "scope": "Namespaced",
                    }
                ],
            },
            "matchConditions": [
                {
                    "name": "is-a-quota-or-its-status",
                    "expression": f"{quota_expression(config)} || {status_expression()}",
                },
            ],
            "variables": [
                {"name": "verb", "expression": "request.operation.lowerAscii()"},
                # Not request.name: it may be empty for a generated name, and is when a collection is deleted.
                {
                    "name": "name",
                    "expression": "[object, oldObject].filter(o, o != null && has(o.metadata.name))"
                    ".map(o, o.metadata.name).join(' ').split(' ')[0]",
                },
                {"name": "isQuota", "expression": quota_expression(config)},
                {
                    "name": "resource",
                    "expression": f"variables.isQuota ? '{QUOTA_RESOURCE}' : '{QUOTA_RESOURCE}/status'",
                },
                # The namespace controller has no RBAC on quotas, and has to be able to empty a terminating namespace.
                {
                    "name": "isGoing",
                    "expression": "request.operation == 'DELETE' && namespaceObject != null && "
                    "has(namespaceObject.metadata.deletionTimestamp)",
                },
            ],
            "validations": [
                {
                    "expression": "variables.isGoing || ("
                    + authorized_expression("variables.isQuota", f".resource('{QUOTA_RESOURCE}')")
                    + " && "
                    + authorized_expression(status_expression(), f".resource('{QUOTA_RESOURCE}').subresource('status')")
                    + ")",
                    "messageExpression": "'user ' + request.userInfo.username + ' may not ' + variables.verb + "
                    "' the GPU quota ' + request.namespace + '/' + variables.name + ': RBAC must allow the verb ' + "
                    f"variables.verb + ' on ' + variables.resource + ' in API group {API_GROUP} (permission to edit "
                    "ConfigMaps is not enough); ask a cluster administrator for it'",
                    "reason": "Forbidden",
                }
            ],
        },
    }
    binding = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": QUOTA_POLICY, "labels": {APP_LABEL: APP}},
        "spec": {"policyName": QUOTA_POLICY, "validationActions": ["Deny"]},
    }
    return [policy, binding]


def quota_expression(config: AdmissionConfig) -> str:
    """Return CEL that is true for a quota, as it is before or after the operation."""
    labels = ", ".join(f"'{names.quota_label}'" for names in config.scheme.all_names)
    labelled = (
        "[object, oldObject].exists(o, o != null && has(o.metadata.labels) && "
        f"[{labels}].exists(l, l in o.metadata.labels && o.metadata.labels[l] == 'true'))"
    )
    return f"({labelled} || (request.namespace == '{LEGACY_NAMESPACE}' && {name_expression(LEGACY_NAME)}))"


def status_expression() -> str:
    """Return CEL that is true for the ConfigMap in which the controller shows the quota's usage."""
    return f"({name_expression(QUOTA_STATUS)})"


def name_expression(name: str) -> str:
    # Not request.name, which is empty when a collection is deleted, as the namespace controller does.
    return f"[object, oldObject].exists(o, o != null && has(o.metadata.name) && o.metadata.name == '{name}')"


def authorized_expression(condition: str, resource: str) -> str:
    """Return CEL that is true unless the condition holds and the user lacks the verb on the resource."""
    check = f"authorizer.group('{API_GROUP}'){resource}.namespace(request.namespace).name(variables.name)"
    return f"(!{condition} || {check}.check(variables.verb).allowed())"


def other_namespaces_selector(namespace: str) -> dict[str, Any]:
    """Select every namespace but this one, by the label that the API server sets and keeps."""
    expression = {"key": NAMESPACE_NAME_LABEL, "operator": "NotIn", "values": [namespace]}
    return {"matchExpressions": [expression]}
