"""The chart renders to what the code expects, rejects invalid values, and the manifests are up to date with it."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.render import MANIFESTS, render_chart, render_manifests
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
    return [each for each in yaml.safe_load_all(render_chart(IMAGE, *values, namespace=namespace)) if each]


def one(rendered: list[Obj], kind: str, name: str) -> Obj:
    (match,) = [each for each in rendered if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return match


def test_the_manifests_are_up_to_date() -> None:
    """Run `python -m deploy.render` if not."""
    assert MANIFESTS.read_text() == render_manifests()


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
    ids=["defaults", "domain and namespace", "nvidia.com/gpu", "HAMi and binders"],
)
def test_the_chart_registers_the_webhook_as_the_code_does(configuration: Configuration) -> None:
    """Except for the metadata, and failurePolicy, which the controller changes to Fail later."""
    config = {
        "domain": configuration.domain,
        "vocabularies": {"nvidiaGpu": configuration.vocabularies.nvidia_gpu, "hami": configuration.vocabularies.hami},
        "webhook": {"binders": list(configuration.webhook.binders)},
    }
    rendered = objects(f"config={json.dumps(config)}", namespace=configuration.system_namespace)
    service = f"{configuration.system_namespace}/quotient-webhook"
    for expected in registration(admission_config_of(configuration), service):
        actual = one(rendered, expected["kind"], expected["metadata"]["name"])
        for hook in actual.get("webhooks", ()):
            assert hook.pop("failurePolicy") == "Ignore"
        for hook in expected.get("webhooks", ()):
            assert hook.pop("failurePolicy") == "Fail"
        assert {key: actual[key] for key in actual if key != "metadata"} == {
            key: expected[key] for key in expected if key != "metadata"
        }


def test_the_configuration_holds_the_values_and_the_releases_namespace(tmp_path: Path) -> None:
    rendered = objects('config={"mode": "audit", "webhook": {"drainS": 5}}', namespace="gpus")
    file = tmp_path / "configuration.yaml"
    file.write_text(one(rendered, "ConfigMap", "quotient")["data"]["configuration.yaml"])
    configuration = load(file, {}).configuration
    assert (configuration.system_namespace, configuration.mode, configuration.webhook.drain_s) == ("gpus", "audit", 5)
    assert configuration.certificates.manage
    grace = one(rendered, "Deployment", "quotient-webhook")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace == 35


INVALID = {
    "no image": (['image=""'], "image: required; build one"),
    "an unknown enum value": (['webhook={"arm": "sometimes"}'], "value must be one of 'auto', 'never'"),
    "an unknown key": (["webhok=1"], "additional properties 'webhok' not allowed"),
    "another namespace": (['config={"systemNamespace": "x"}'], "set it with helm install --namespace"),
    "certificates.manage": (['config={"certificates": {"manage": true}}'], "set certificates.mode instead"),
    "a provided certificate without a Secret": (['certificates={"mode": "provided"}'], "certificates.secretName"),
    "a provided certificate without a CA": (
        ['certificates={"mode": "provided", "secretName": "s"}'],
        "certificates.caBundle",
    ),
}


@pytest.mark.parametrize(("values", "message"), INVALID.values(), ids=INVALID.keys())
def test_invalid_values_are_rejected_with_a_remedy(values: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("'", ".")):
        render_chart(IMAGE, *values)


def test_containers_of_deployments_meet_the_restricted_standard() -> None:
    """And have a read-only root file system."""
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


def test_the_node_plugin_replaces_gpu_manager_and_awss_plugin() -> None:
    """It runs on nodes labelled for them, and its Service has gpu-manager's name."""
    rendered = objects()
    pod = one(rendered, "DaemonSet", "quotient-nodeplugin")["spec"]["template"]["spec"]
    terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    labels = {(each["matchExpressions"][0]["key"], *each["matchExpressions"][0]["values"]) for each in terms}
    assert {("nvidia-device-enable", "enable"), ("k8s.amazonaws.com/accelerator", "vgpu")} <= labels
    assert pod["tolerations"] == [{"operator": "Exists"}]
    service = one(rendered, "Service", "gpu-manager-metric")
    assert service["spec"]["ports"][0]["port"] == 5678
    assert (
        service["spec"]["selector"].items()
        <= one(rendered, "DaemonSet", "quotient-nodeplugin")["spec"]["template"]["metadata"]["labels"].items()
    )


def test_folders_of_the_node_plugin_have_the_same_path_on_the_host_and_in_the_pod() -> None:
    """The plugin gives the kubelet host paths below them."""
    config = {"nodePlugin": {"folder": "/data/quotient", "devicePlugins": "/data/kubelet/device-plugins"}}
    pod = one(objects(f"config={json.dumps(config)}"), "DaemonSet", "quotient-nodeplugin")["spec"]["template"]["spec"]
    volumes = {each["name"]: each["hostPath"]["path"] for each in pod["volumes"] if "hostPath" in each}
    mounts = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
    assert volumes["state"] == mounts["state"] == "/data/quotient"
    assert volumes["device-plugins"] == mounts["device-plugins"] == "/data/kubelet/device-plugins"
    assert all(volumes[name] == mounts[name] for name in ("pod-resources", "cdi"))


def test_without_the_node_plugin_nothing_is_privileged() -> None:
    rendered = objects('nodePlugin={"enabled": false}', "namespace.create=true")
    assert not [each for each in rendered if "nodeplugin" in each["metadata"]["name"]]
    labels = one(rendered, "Namespace", SYSTEM)["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_no_rule_has_a_wildcard() -> None:
    """And only the controller's Role grants access to Secrets, which it names."""
    for role in (each for each in objects() if each["kind"] in ("Role", "ClusterRole")):
        for rule in role["rules"]:
            assert "*" not in [*rule["verbs"], *rule.get("resources", ()), *rule.get("apiGroups", ())]
            if "secrets" in rule.get("resources", ()):
                assert role["metadata"]["name"] == "quotient-controller"
                assert role["kind"] == "Role"
                assert rule["verbs"] == ["create"] or rule["resourceNames"] == ["quotient-ca", "quotient-webhook-tls"]


def test_certificates_issued_by_cert_manager() -> None:
    """The chart has its objects and annotation, and the controller no access to Secrets."""
    rendered = objects('certificates={"mode": "cert-manager"}')
    certificate = one(rendered, "Certificate", "quotient-webhook")
    assert certificate["spec"]["secretName"] == "quotient-webhook-tls"
    annotations = one(rendered, "MutatingWebhookConfiguration", "quotient")["metadata"]["annotations"]
    assert annotations["cert-manager.io/inject-ca-from"] == f"{SYSTEM}/quotient-webhook"
    assert "manage: false" in one(rendered, "ConfigMap", "quotient")["data"]["configuration.yaml"]
    assert not any("secrets" in rule["resources"] for rule in one(rendered, "Role", "quotient-controller")["rules"])


def test_a_provided_certificate() -> None:
    """Its Secret is mounted, and its CA is in the webhook configurations."""
    rendered = objects('certificates={"mode": "provided", "secretName": "mine", "caBundle": "PEM"}')
    volumes = one(rendered, "Deployment", "quotient-webhook")["spec"]["template"]["spec"]["volumes"]
    assert {"name": "certificate", "secret": {"secretName": "mine"}} in volumes
    hooks = one(rendered, "ValidatingWebhookConfiguration", "quotient")["webhooks"]
    assert {hook["clientConfig"]["caBundle"] for hook in hooks} == {"UEVN"}


def test_optional_objects_can_be_switched_on_and_off() -> None:
    kinds = {each["kind"] for each in objects()}
    assert "ServiceMonitor" not in kinds
    assert "Namespace" not in kinds
    more = objects('monitoring={"serviceMonitor": true, "rules": true, "labels": {"release": "p"}}')
    assert one(more, "PrometheusRule", "quotient")["metadata"]["labels"]["release"] == "p"
    less = {each["kind"] for each in objects("networkPolicy.create=false", "priorityClass.create=false")}
    assert not {"NetworkPolicy", "PriorityClass"} & less
    admins = objects('quotaAdmins=[{"kind": "Group", "name": "gpu-admins"}]')
    assert one(admins, "ClusterRoleBinding", "quotient-quota-admin")["subjects"][0]["name"] == "gpu-admins"
