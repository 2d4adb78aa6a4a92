"""Permissions of Quotient's service accounts: as documented, as in the chart, and as the API server grants them."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from tests.cluster.real import RealCluster
from tests.cluster.supervisor import ROOT

COLUMNS = 7
EVERYWHERE, OWN_NAMESPACE = "everywhere", "own namespace"

# API group, resource, object name or "", verb.
Permission = tuple[str, str, str, str]


def documented_permissions(account: str, where: str) -> set[Permission]:
    """Read the table in docs/rbac.md."""
    permissions: set[Permission] = set()
    for line in (ROOT / "docs" / "rbac.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == COLUMNS and cells[0] == account and cells[1] == where:
            _, _, group, resources, names, verbs, _ = cells
            permissions |= {
                (group, resource, name, verb)
                for resource in resources.split(", ")
                for name in names.split(", ")
                for verb in verbs.split(", ")
            }
    return permissions


def permissions_of(rules: Iterable[Mapping[str, Any]]) -> set[Permission]:
    """Return what rules of a role, or of a review, grant on objects."""
    return {
        (group, resource, name, verb)
        for rule in rules
        if "nonResourceURLs" not in rule
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames") or [""]
        for verb in rule["verbs"]
    }


def role_permissions(real: RealCluster, cluster_role: str) -> set[Permission]:
    return permissions_of(json.loads(real.kubectl("get", "clusterrole", cluster_role, "-o", "json"))["rules"])


def impersonation_flags(account: str) -> list[str]:
    """Return kubectl's flags to act as a service account, written as NAMESPACE:NAME."""
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{account.partition(':')[0]}", "system:authenticated"]
    return [f"--as=system:serviceaccount:{account}", *(f"--as-group={group}" for group in groups)]


def granted_permissions(real: RealCluster, account: str, namespace: str) -> set[Permission]:
    """Ask the API server what an account may do in a namespace."""
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": namespace},
    }
    flags = [*impersonation_flags(account), "-o", "json", "--validate=false", "-f-"]
    answer = json.loads(real.kubectl("create", *flags, stdin=json.dumps(review)))
    return permissions_of(answer["status"]["resourceRules"])
