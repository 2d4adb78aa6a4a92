"""Admission reviews as an API server sends them: one of 3 kB, and one of 30 kB with managed fields."""

import json
from typing import Any

from vcuda.names import DEFAULT_SCHEDULER, Names

NAMES = Names()
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


def reviewed_pod(environment_variables: int = 8) -> dict[str, Any]:
    """Return a pod with half a card, with the defaults that the API server sets before admission."""
    share = {NAMES.core: "50", NAMES.memory: "30", "cpu": "4", "memory": "16Gi"}
    environment = [
        {"name": f"SETTING_{index}", "value": f"value-{index}" * 3} for index in range(environment_variables)
    ]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": "train-7c9d8f6b5-",
            "namespace": "team-a",
            "labels": {"app": "train", "pod-template-hash": "7c9d8f6b5"},
            "annotations": {"prometheus.io/scrape": "true", NAMES.use_models: "A100"},
            "ownerReferences": [
                {
                    "apiVersion": "apps/v1",
                    "kind": "ReplicaSet",
                    "name": "train-7c9d8f6b5",
                    "uid": "5b3c1a52-8a2f-4b6e-9e07-1f4f4b1d2c3a",
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        "spec": {
            "volumes": [
                {
                    "name": "kube-api-access-x7k2p",
                    "projected": {
                        "sources": [
                            {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
                            {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
                        ],
                        "defaultMode": 420,
                    },
                },
                {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
            ],
            "containers": [
                {
                    "name": "train",
                    "image": "registry.example.org/team-a/train:2026.11",
                    "command": ["python", "-m", "train", "--epochs", "40"],
                    "env": environment,
                    "resources": {"limits": share, "requests": share},
                    "volumeMounts": [
                        {"name": "data", "mountPath": "/data"},
                        {"name": "kube-api-access-x7k2p", "readOnly": True, "mountPath": ACCOUNT},
                    ],
                    "terminationMessagePath": "/dev/termination-log",
                    "terminationMessagePolicy": "File",
                    "imagePullPolicy": "IfNotPresent",
                }
            ],
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": 30,
            "dnsPolicy": "ClusterFirst",
            "serviceAccountName": "default",
            "serviceAccount": "default",
            "securityContext": {},
            "schedulerName": DEFAULT_SCHEDULER,
            "tolerations": [
                {
                    "key": f"node.kubernetes.io/{condition}",
                    "operator": "Exists",
                    "effect": "NoExecute",
                    "tolerationSeconds": 300,
                }
                for condition in ("not-ready", "unreachable")
            ],
            "priority": 0,
            "enableServiceLinks": True,
            "preemptionPolicy": "PreemptLowerPriority",
        },
        "status": {},
    }


def managed_fields(entries: int) -> list[dict[str, Any]]:
    """Return field managers as server-side apply records them; in real pods they are often the largest part."""
    fields: dict[str, Any] = {
        f"f:field{index}": {"f:inner": {}, 'k:{"name":"x"}': {".": {}, "f:name": {}, "f:value": {}}}
        for index in range(30)
    }
    return [
        {
            "manager": f"manager-{index}",
            "operation": "Update",
            "apiVersion": "v1",
            "time": "2026-11-16T04:00:00Z",
            "fieldsType": "FieldsV1",
            "fieldsV1": {"f:spec": fields},
        }
        for index in range(entries)
    ]


def creation_review(pod: dict[str, Any]) -> bytes:
    """Return the AdmissionReview of a pod's creation."""
    request = {
        "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "requestKind": {"group": "", "version": "v1", "kind": "Pod"},
        "requestResource": {"group": "", "version": "v1", "resource": "pods"},
        "namespace": "team-a",
        "operation": "CREATE",
        "userInfo": {
            "username": "system:serviceaccount:kube-system:replicaset-controller",
            "uid": "a3a8f6d0-5a7c-4f77-8fd1-0c8f5b8f9f63",
            "groups": ["system:serviceaccounts", "system:serviceaccounts:kube-system", "system:authenticated"],
        },
        "object": pod,
        "oldObject": None,
        "dryRun": False,
        "options": {"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"},
    }
    return json.dumps({"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": request}).encode()


def small_pod() -> dict[str, Any]:
    """Return the pod of the 3 kB review."""
    return reviewed_pod()


def large_pod() -> dict[str, Any]:
    """Return the pod of the 30 kB review."""
    pod = reviewed_pod(environment_variables=40)
    pod["metadata"]["managedFields"] = managed_fields(10)
    return pod
