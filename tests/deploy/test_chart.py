"""The chart renders to what the code wants, says what is wrong with values, and the manifests are the chart."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.render import MANIFESTS, REGISTRATION, manifests, registration_template, rendered
from settings.configuration import Configuration, WebhookSettings
from settings.loading import load
from vcuda.vocabulary import VocabularyOptions
from webhook.registration import registration
from webhook.service import admission_config_of

pytestmark = pytest.mark.kubernetes
IMAGE = 'image="registry.example/quotient:1"'
SYSTEM = "quotient-system"

Obj = dict[str, Any]


def objects(*values: str, namespace: str = SYSTEM) -> list[Obj]:
    return [each for each in yaml.safe_load_all(rendered(IMAGE, *values, namespace=namespace)) if each]


def one(found: list[Obj], kind: str, name: str) -> Obj:
    (match,) = [each for each in found if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return match


def test_what_is_generated_is_up_to_date() -> None:
    """`python -m deploy.render` writes it."""
    assert REGISTRATION.read_text() == registration_template()
    assert MANIFESTS.read_text() == manifests()


@pytest.mark.parametrize(
    "configuration",
    [
        Configuration(),
        Configuration(domain="gpu.example.org", system_namespace="gpus"),
        Configuration(vocabularies=VocabularyOptions(nvidia_gpu=True)),
        Configuration(
            vocabularies=VocabularyOptions(hami=True), webhook=WebhookSettings(binders=("a", "system:node:b"))
        ),
    ],
    ids=["as it comes", "names", "whole cards", "HAMi and binders"],
)
def test_the_registration_is_the_codes(configuration: Configuration) -> None:
    """Whatever is configured, but for what the chart and the controller say of it."""
    config = {
        "domain": configuration.domain,
        "vocabularies": {"nvidiaGpu": configuration.vocabularies.nvidia_gpu, "hami": configuration.vocabularies.hami},
        "webhook": {"binders": list(configuration.webhook.binders)},
    }
    found = objects(f"config={json.dumps(config)}", namespace=configuration.system_namespace)
    service = f"{configuration.system_namespace}/quotient-webhook"
    for wanted in registration(admission_config_of(configuration), service):
        made = one(found, wanted["kind"], wanted["metadata"]["name"])
        for hook in made.get("webhooks", ()):
            assert hook.pop("failurePolicy") == "Ignore", "until there is an answer"
        for hook in wanted.get("webhooks", ()):
            assert hook.pop("failurePolicy") == "Fail"
        assert {key: made[key] for key in made if key != "metadata"} == {
            key: wanted[key] for key in wanted if key != "metadata"
        }


def test_the_configuration_is_one(tmp_path: Path) -> None:
    """With the release's namespace, and the values over the defaults."""
    found = objects('config={"mode": "audit", "webhook": {"drainS": 5}}', namespace="gpus")
    file = tmp_path / "configuration.yaml"
    file.write_text(one(found, "ConfigMap", "quotient")["data"]["configuration.yaml"])
    read = load(file, {}).configuration
    assert (read.system_namespace, read.mode, read.webhook.drain_s) == ("gpus", "audit", 5)
    assert read.certificates.manage
    grace = one(found, "Deployment", "quotient-webhook")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace == 35


WRONG = {
    "no image": (['image=""'], "image is empty: build one"),
    "a wrong word": (['webhook={"arm": "sometimes"}'], "value must be one of 'auto', 'never'"),
    "an unknown value": (["webhok=1"], "additional properties 'webhok' not allowed"),
    "another namespace": (['config={"systemNamespace": "x"}'], "name it with helm install --namespace"),
    "certificates twice": (['config={"certificates": {"manage": true}}'], "say who makes certificates"),
    "a certificate without a secret": (['certificates={"mode": "provided"}'], "certificates.secretName"),
    "a certificate without a CA": (['certificates={"mode": "provided", "secretName": "s"}'], "certificates.caBundle"),
}


@pytest.mark.parametrize(("values", "told"), WRONG.values(), ids=WRONG.keys())
def test_wrong_values_are_refused(values: list[str], told: str) -> None:
    """With the value and the remedy."""
    with pytest.raises(ValueError, match=told.replace("'", ".")):
        rendered(IMAGE, *values)


def test_every_container_is_restricted() -> None:
    """As the Pod Security Standard of that name wants, and with a root that nobody can write."""
    for deployment in (each for each in objects() if each["kind"] == "Deployment"):
        pod = deployment["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]


def test_the_node_plugin_runs_where_ancestors_ran() -> None:
    """On nodes that were marked for gpu-manager or for AWS's plugin; and its Service has gpu-manager's name."""
    found = objects()
    pod = one(found, "DaemonSet", "quotient-nodeplugin")["spec"]["template"]["spec"]
    terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    marks = {(each["matchExpressions"][0]["key"], *each["matchExpressions"][0]["values"]) for each in terms}
    assert {("nvidia-device-enable", "enable"), ("k8s.amazonaws.com/accelerator", "vgpu")} <= marks
    assert pod["tolerations"] == [{"operator": "Exists"}]
    service = one(found, "Service", "gpu-manager-metric")
    assert service["spec"]["ports"][0]["port"] == 5678
    assert (
        service["spec"]["selector"].items()
        <= one(found, "DaemonSet", "quotient-nodeplugin")["spec"]["template"]["metadata"]["labels"].items()
    )


def test_folders_of_the_node_plugin_are_the_same_on_the_host_and_in_the_pod() -> None:
    """The kubelet is told host paths below them."""
    config = {"nodePlugin": {"folder": "/data/quotient", "devicePlugins": "/data/kubelet/device-plugins"}}
    pod = one(objects(f"config={json.dumps(config)}"), "DaemonSet", "quotient-nodeplugin")["spec"]["template"]["spec"]
    volumes = {each["name"]: each["hostPath"]["path"] for each in pod["volumes"] if "hostPath" in each}
    mounts = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
    assert volumes["state"] == mounts["state"] == "/data/quotient"
    assert volumes["device-plugins"] == mounts["device-plugins"] == "/data/kubelet/device-plugins"
    assert all(volumes[name] == mounts[name] for name in ("pod-resources", "cdi"))


def test_without_the_node_plugin_nothing_is_privileged() -> None:
    """Whoever has another one installs the rest alone, in a namespace that allows less."""
    found = objects('nodePlugin={"enabled": false}', "namespace.create=true")
    assert not [each for each in found if "nodeplugin" in each["metadata"]["name"]]
    labels = one(found, "Namespace", SYSTEM)["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_no_rule_has_a_wildcard() -> None:
    """And none grants secrets to the webhook, or all secrets to anybody."""
    for role in (each for each in objects() if each["kind"] in ("Role", "ClusterRole")):
        for rule in role["rules"]:
            assert "*" not in [*rule["verbs"], *rule.get("resources", ()), *rule.get("apiGroups", ())]
            if "secrets" in rule.get("resources", ()):
                assert role["metadata"]["name"] == "quotient-controller"
                assert role["kind"] == "Role"
                assert rule["verbs"] == ["create"] or rule["resourceNames"] == ["quotient-ca", "quotient-webhook-tls"]


def test_certificates_of_cert_manager() -> None:
    """Its own objects, its annotation, and a controller that leaves certificates alone."""
    found = objects('certificates={"mode": "cert-manager"}')
    certificate = one(found, "Certificate", "quotient-webhook")
    assert certificate["spec"]["secretName"] == "quotient-webhook-tls"
    hooks = one(found, "MutatingWebhookConfiguration", "quotient")["metadata"]["annotations"]
    assert hooks["cert-manager.io/inject-ca-from"] == f"{SYSTEM}/quotient-webhook"
    assert "manage: false" in one(found, "ConfigMap", "quotient")["data"]["configuration.yaml"]
    assert not any("secrets" in rule["resources"] for rule in one(found, "Role", "quotient-controller")["rules"])


def test_certificates_of_ones_own() -> None:
    """The secret is mounted, and its CA is where the API server looks."""
    found = objects('certificates={"mode": "provided", "secretName": "mine", "caBundle": "PEM"}')
    volumes = one(found, "Deployment", "quotient-webhook")["spec"]["template"]["spec"]["volumes"]
    assert {"name": "certificate", "secret": {"secretName": "mine"}} in volumes
    hooks = one(found, "ValidatingWebhookConfiguration", "quotient")["webhooks"]
    assert {hook["clientConfig"]["caBundle"] for hook in hooks} == {"UEVN"}


def test_what_is_optional() -> None:
    """Monitoring comes when it is asked for, and the rest goes."""
    kinds = {each["kind"] for each in objects()}
    assert "ServiceMonitor" not in kinds
    assert "Namespace" not in kinds
    more = objects('monitoring={"serviceMonitor": true, "rules": true, "labels": {"release": "p"}}')
    assert one(more, "PrometheusRule", "quotient")["metadata"]["labels"]["release"] == "p"
    less = {each["kind"] for each in objects("networkPolicy.create=false", "priorityClass.create=false")}
    assert not {"NetworkPolicy", "PriorityClass"} & less
    admins = objects('quotaAdmins=[{"kind": "Group", "name": "gpu-admins"}]')
    assert one(admins, "ClusterRoleBinding", "quotient-quota-admin")["subjects"][0]["name"] == "gpu-admins"
