"""The guard of quotas: a ValidatingAdmissionPolicy, so that it holds while nothing of Quotient runs.

The right to edit ConfigMaps is not the right to change a quota. Who may do that is said by RBAC on a resource that
exists for nothing else, `gpuquotas` of group `quotient.dev`, with the verb of the operation. A quota is known by its
label, under every configured domain, or by the name of the ancestors' one; before and after the change, so that it can
be neither relabelled away nor brought in. What the controller shows to a namespace is guarded by the subresource
`status`. A namespace that is being deleted may always be emptied.
"""

from typing import Any

from vcuda.names import (
    API_GROUP,
    APP,
    APP_LABEL,
    LEGACY_NAME,
    LEGACY_NAMESPACE,
    QUOTA_POLICY,
    QUOTA_RESOURCE,
    QUOTA_STATUS,
)
from webhook.admission_config import AdmissionConfig


def quota_policy_objects(config: AdmissionConfig) -> list[dict[str, Any]]:
    """Write the policy, and what puts it in force."""
    policy = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": QUOTA_POLICY, "labels": {APP_LABEL: APP}},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {
                "matchPolicy": "Equivalent",
                # There are the ledgers, large and often written; and nobody but us may write anything there.
                "namespaceSelector": elsewhere(config.system_namespace),
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
                {"name": "is-a-quota-or-its-status", "expression": f"{is_quota(config)} || {is_status()}"},
            ],
            "variables": [
                {"name": "verb", "expression": "request.operation.lowerAscii()"},
                {
                    "name": "name",
                    "expression": "[object, oldObject].filter(o, o != null && has(o.metadata.name))"
                    ".map(o, o.metadata.name).join(' ').split(' ')[0]",
                },
                {"name": "isQuota", "expression": is_quota(config)},
                {
                    "name": "resource",
                    "expression": f"variables.isQuota ? '{QUOTA_RESOURCE}' : '{QUOTA_RESOURCE}/status'",
                },
                {
                    "name": "isGoing",
                    "expression": "request.operation == 'DELETE' && namespaceObject != null && "
                    "has(namespaceObject.metadata.deletionTimestamp)",
                },
            ],
            "validations": [
                {
                    "expression": "variables.isGoing || ("
                    + may("variables.isQuota", f".resource('{QUOTA_RESOURCE}')")
                    + " && "
                    + may(is_status(), f".resource('{QUOTA_RESOURCE}').subresource('status')")
                    + ")",
                    "messageExpression": "request.userInfo.username + ' may not ' + variables.verb + ' the GPU quota ' "
                    "+ request.namespace + '/' + variables.name + ': that takes the verb ' + variables.verb + "
                    f"' on ' + variables.resource + ' of {API_GROUP}, and the right to edit ConfigMaps is not enough; "
                    "ask those who run the cluster'",
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


def is_quota(config: AdmissionConfig) -> str:
    """Match a quota, before or after the change."""
    labels = ", ".join(f"'{names.quota_label}'" for names in config.scheme.all_names)
    labelled = (
        "[object, oldObject].exists(o, o != null && has(o.metadata.labels) && "
        f"[{labels}].exists(l, l in o.metadata.labels && o.metadata.labels[l] == 'true'))"
    )
    return f"({labelled} || (request.namespace == '{LEGACY_NAMESPACE}' && {is_named(LEGACY_NAME)}))"


def is_status() -> str:
    """Match what the controller shows to a namespace."""
    return f"({is_named(QUOTA_STATUS)})"


def is_named(name: str) -> str:
    """Match an object's name. A request has none where a collection is deleted, as at the end of a namespace."""
    return f"[object, oldObject].exists(o, o != null && has(o.metadata.name) && o.metadata.name == '{name}')"


def may(condition: str, resource: str) -> str:
    """Demand a right where something is so."""
    check = f"authorizer.group('{API_GROUP}'){resource}.namespace(request.namespace).name(variables.name)"
    return f"(!{condition} || {check}.check(variables.verb).allowed())"


def elsewhere(namespace: str) -> dict[str, Any]:
    """Select all namespaces but one."""
    expression = {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": [namespace]}
    return {"matchExpressions": [expression]}
