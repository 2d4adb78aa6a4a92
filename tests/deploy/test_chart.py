"""The chart renders to what the code expects, rejects invalid values, and the manifests are up to date with it."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from deploy.render import CHART, MANIFESTS, render_chart, render_manifests
from scheduler.kube_scheduler import feature_gates, kube_scheduler_configuration
from scheduler.metrics import GAUGE_HELP
from settings.configuration import Configuration, MonitorSettings, WebhookSettings
from settings.loading import load
from tests.deploy.permissions import EVERYWHERE, OWN_NAMESPACE, documented_permissions, permissions_of
from vcuda.decoding import convert
from vcuda.names import MONITOR_SECRET, MONITOR_SERVICE, SECRET_PATHS_ANNOTATION
from vcuda.vocabulary import VocabularyOptions
from webhook.registration import registration
from webhook.service import admission_config_of

pytestmark = pytest.mark.kubernetes
IMAGE = 'image="registry.example/quotient:1"'
TAG = 'scheduler.kubeScheduler.tag="v1.36.4"'
SYSTEM = "quotient-system"

Obj = dict[str, Any]


def objects(*values: str, namespace: str = SYSTEM) -> list[Obj]:
    return [each for each in yaml.safe_load_all(render_chart(IMAGE, TAG, *values, namespace=namespace)) if each]


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
    """Except for the metadata, for failurePolicy, which the controller changes to Fail later, and the path."""
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
            del hook["clientConfig"]["service"]["path"]
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
    "another Lease": (['config={"scheduler": {"lease": "x"}}'], "value must be 'quotient-scheduler'"),
    "an extender that others can reach": (
        ['config={"scheduler": {"address": "0.0.0.0"}}'],
        "value must be '127.0.0.1'",
    ),
    "an offline rendering without kube-scheduler's version": (
        ['scheduler.kubeScheduler.tag=""'],
        "scheduler.kubeScheduler.tag: required",
    ),
}


@pytest.mark.parametrize(("values", "message"), INVALID.values(), ids=INVALID.keys())
def test_invalid_values_are_rejected_with_a_remedy(values: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("'", ".")):
        render_chart(IMAGE, TAG, *values)


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


@pytest.mark.parametrize(
    ("system_namespace", "config"),
    [
        ("quotient-system", {}),
        ("gpus", {"domain": "gpu.example.org"}),
        ("quotient-system", {"scheduler": {"port": 13456}}),
        ("quotient-system", {"scheduler": {"initialBackoffS": 2, "maxBackoffS": 10}}),
    ],
    ids=["defaults", "domain and namespace", "another port", "backoff"],
)
def test_the_chart_configures_kube_scheduler_as_the_code_does(system_namespace: str, config: Obj) -> None:
    rendered = objects(f"config={json.dumps(config)}", namespace=system_namespace)
    actual = yaml.safe_load(one(rendered, "ConfigMap", "quotient-scheduler")["data"]["kube-scheduler.yaml"])
    configuration = msgspec.convert(config | {"systemNamespace": system_namespace}, Configuration)
    assert actual == kube_scheduler_configuration(configuration)


def scheduler_pod(rendered: list[Obj]) -> Obj:
    pod: Obj = one(rendered, "Deployment", "quotient-scheduler")["spec"]["template"]
    return pod


def test_a_replica_of_the_scheduler_is_a_stock_kube_scheduler_and_the_extender() -> None:
    rendered = objects('kubernetesService={"host": "10.0.0.1", "port": "6443"}')
    kube_scheduler, extender = scheduler_pod(rendered)["spec"]["containers"]
    assert kube_scheduler["image"] == "registry.k8s.io/kube-scheduler:v1.36.4"
    assert (extender["image"], extender["args"]) == ("registry.example/quotient:1", ["scheduler"])
    addresses = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert {each["name"]: each["value"] for each in kube_scheduler["env"]} == addresses
    (flag,) = [each for each in kube_scheduler["command"] if each.startswith("--config=")]
    (mount,) = kube_scheduler["volumeMounts"]
    assert flag == f"--config={mount['mountPath']}/kube-scheduler.yaml"
    assert one(rendered, "Deployment", "quotient-scheduler")["spec"]["replicas"] == 2


def test_the_kubelet_probes_both_containers_of_the_scheduler() -> None:
    kube_scheduler, extender = scheduler_pod(objects())["spec"]["containers"]
    (flag,) = [each for each in kube_scheduler["command"] if each.startswith("--authorization-always-allow-paths=")]
    allowed = flag.partition("=")[2].split(",")
    for container, port, scheme in ((kube_scheduler, 10259, "HTTPS"), (extender, 8080, None)):
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        for probe in ("startupProbe", "readinessProbe"):
            request = container[probe]["httpGet"]
            assert (ports[request["port"]], request.get("scheme")) == (port, scheme)
            assert request["path"] in allowed


def test_a_kube_scheduler_whose_extender_stays_away_is_restarted() -> None:
    """It would keep the Lease and place nothing; the other replica takes over."""
    kube_scheduler, extender = scheduler_pod(objects('config={"scheduler": {"opsPort": 8099}}'))["spec"]["containers"]
    assert extender["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert kube_scheduler["livenessProbe"]["httpGet"] == {"path": "/livez", "port": 8099}


@pytest.mark.parametrize("tag", ["v1.32.9", "v1.33.0", "v1.36.4", "v1.37.1"])
def test_the_backoff_is_respected_in_every_version(tag: str) -> None:
    """The same flags as `scheduler.kube_scheduler` returns, with which the scheduler is tested."""
    kube_scheduler, _ = scheduler_pod(objects(f'scheduler.kubeScheduler.tag="{tag}"'))["spec"]["containers"]
    assert [each for each in kube_scheduler["command"] if "feature-gates" in each] == feature_gates(tag)


CHANGES = {
    "the backoff": 'config.scheduler={"maxBackoffS": 20}',
    "the placement policy": 'config.scheduler={"policy": "spread"}',
}


@pytest.mark.parametrize("value", CHANGES.values(), ids=CHANGES.keys())
def test_the_scheduler_restarts_when_its_configuration_changes(value: str) -> None:
    assert scheduler_pod(objects())["metadata"] != scheduler_pod(objects(value))["metadata"]
    assert scheduler_pod(objects())["spec"] == scheduler_pod(objects(value))["spec"]


def test_without_the_scheduler_nothing_of_it_is_left() -> None:
    """And no version of kube-scheduler is needed."""
    rendered = objects("scheduler.enabled=false", 'scheduler.kubeScheduler.tag=""', 'monitoring={"rules": true}')
    names = [each["metadata"]["name"] for each in rendered]
    assert not [name for name in names if "scheduler" in name]
    assert "quotient_scheduler" not in json.dumps(one(rendered, "PrometheusRule", "quotient"))


def evaluate(tmp_path: Path, expression: str) -> str:
    """Return what a Helm expression gives in the chart; raises ValueError with Helm's message."""
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart, dirs_exist_ok=True)
    (chart / "templates" / "evaluated.yaml").write_text(f"kind: Evaluated\nvalue: {{{{ {expression} | quote }}}}\n")
    rendered = yaml.safe_load_all(render_chart(IMAGE, TAG, chart=chart))
    (value,) = [each["value"] for each in rendered if each and each["kind"] == "Evaluated"]
    return str(value)


# The API server's version to the tag of kube-scheduler's image.
RELEASES = {
    "v1.36.4": "v1.36.4",
    "v1.31.4-eks-2d5f260": "v1.31.4",
    "v1.30.5-gke.1014001": "v1.30.5",
    "v1.30.2+k3s1": "v1.30.2",
    "v1.33.0-rc.1": "v1.33.0",
    "v1.32.10+rke2r1": "v1.32.10",
    "": "",
    "latest": "",
}


@pytest.mark.parametrize(("version", "tag"), RELEASES.items())
def test_the_tag_is_the_clusters_version_without_a_vendors_suffix(tmp_path: Path, version: str, tag: str) -> None:
    assert evaluate(tmp_path, f'include "quotient.kubernetesRelease" "{version}"') == tag


# Tag and version of the API server.
COMPATIBLE = {
    "the same version": ("v1.31.4", "v1.31.4-eks-2d5f260"),
    "one minor older": ("v1.30.1", "v1.31.4"),
    "a newer patch of the same minor": ("v1.31.9", "v1.31.4"),
    "not a version": ("stable", "v1.31.4"),
    "an unknown API server": ("v1.32.0", ""),
}
INCOMPATIBLE = {
    "two minors older": ("v1.29.1", "v1.31.4"),
    "newer": ("v1.32.0", "v1.31.4"),
    "newer, with a digest": ("v1.32.0@sha256:00", "v1.31.4"),
    "newer than 1.9": ("v1.10.0", "v1.9.3"),
}


def version_skew(tag: str, version: str) -> str:
    return f'include "quotient.checkVersionSkew" (dict "tag" "{tag}" "version" "{version}")'


@pytest.mark.parametrize(("tag", "version"), COMPATIBLE.values(), ids=COMPATIBLE.keys())
def test_a_compatible_kube_scheduler(tmp_path: Path, tag: str, version: str) -> None:
    assert evaluate(tmp_path, version_skew(tag, version)) == ""


@pytest.mark.parametrize(("tag", "version"), INCOMPATIBLE.values(), ids=INCOMPATIBLE.keys())
def test_an_incompatible_kube_scheduler_is_rejected(tmp_path: Path, tag: str, version: str) -> None:
    with pytest.raises(ValueError, match=f"{tag} does not work with an API server of version {version}"):
        evaluate(tmp_path, version_skew(tag, version))


def test_the_permissions_of_the_scheduler_are_documented() -> None:
    """Those of the extender; the others are Kubernetes' own roles, and listed by name."""
    rendered = objects()
    for kind, where in (("ClusterRole", EVERYWHERE), ("Role", OWN_NAMESPACE)):
        rules = one(rendered, kind, "quotient-scheduler")["rules"]
        assert permissions_of(rules) == documented_permissions("quotient-scheduler", where)
    bound = {
        (each["kind"], each["metadata"].get("namespace"), each["roleRef"]["name"])
        for each in rendered
        if each["kind"] in ("RoleBinding", "ClusterRoleBinding") and each["subjects"][0]["name"] == "quotient-scheduler"
    }
    assert bound == {
        ("ClusterRoleBinding", None, "quotient-scheduler"),
        ("ClusterRoleBinding", None, "system:kube-scheduler"),
        ("ClusterRoleBinding", None, "system:volume-scheduler"),
        ("RoleBinding", "kube-system", "extension-apiserver-authentication-reader"),
        ("RoleBinding", SYSTEM, "quotient-scheduler"),
    }


def test_no_path_of_the_webhook_is_rendered() -> None:
    """The controller writes it, with a secret: neither an upgrade nor GitOps may reset it."""
    rendered = objects()
    for kind in ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"):
        for hook in one(rendered, kind, "quotient")["webhooks"]:
            service = {"namespace": SYSTEM, "name": "quotient-webhook", "port": 443}
            assert hook["clientConfig"] == {"service": service}
    deployment = one(rendered, "Deployment", "quotient-webhook")
    for metadata in (deployment["metadata"], deployment["spec"]["template"]["metadata"]):
        assert metadata["annotations"][SECRET_PATHS_ANNOTATION] == "true"


def test_callers_can_be_limited_to_api_servers_by_address() -> None:
    """One setting for the webhook and for its NetworkPolicy, which may have another one."""
    value = 'config={"webhook": {"apiServerCidrs": ["10.0.0.0/28"]}}'
    for more, cidr in (((), "10.0.0.0/28"), (('networkPolicy.apiServerCidrs=["10.1.0.0/28"]',), "10.1.0.0/28")):
        rendered = objects(value, *more)
        ingress = one(rendered, "NetworkPolicy", "quotient-webhook")["spec"]["ingress"]
        controller = {"podSelector": {"matchLabels": selector_of("controller")}}
        assert ingress[0] == {"ports": [{"port": "https"}], "from": [{"ipBlock": {"cidr": cidr}}, controller]}
        assert configuration_in(rendered).webhook.api_server_cidrs == ("10.0.0.0/28",)


def test_the_controller_reaches_the_operations_port_of_the_webhook() -> None:
    """Else no replica could say which paths it accepts."""
    where = {"matchLabels": {"team": "monitoring"}}
    rendered = objects(f"networkPolicy.metricsFrom=[{json.dumps(where)}]")
    ingress = one(rendered, "NetworkPolicy", "quotient-webhook")["spec"]["ingress"][1]
    controller = {"podSelector": {"matchLabels": selector_of("controller")}}
    assert ingress == {"ports": [{"port": "ops"}], "from": [controller, {"namespaceSelector": where}]}


def test_callers_can_be_authenticated_by_client_certificates() -> None:
    authority = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----"
    rendered = objects(
        f"webhook.clientCa={json.dumps(authority)}", 'config={"webhook": {"clientNames": ["apiserver"]}}'
    )
    webhook = configuration_in(rendered).webhook
    assert (webhook.client_ca, webhook.client_names) == ("/etc/quotient/client-ca/ca.crt", ("apiserver",))
    assert one(rendered, "ConfigMap", "quotient-client-ca")["data"] == {"ca.crt": f"{authority}\n"}
    spec = one(rendered, "Deployment", "quotient-webhook")["spec"]["template"]["spec"]
    mounts = {mount["name"]: mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
    assert mounts["client-ca"] == "/etc/quotient/client-ca"
    assert {"name": "client-ca", "configMap": {"name": "quotient-client-ca"}} in spec["volumes"]


def configuration_in(rendered: list[Obj]) -> Configuration:
    text = one(rendered, "ConfigMap", "quotient")["data"]["configuration.yaml"]
    return convert(yaml.safe_load(text), Configuration)


def selector_of(component: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "quotient", "app.kubernetes.io/component": component}


def test_only_the_scheduler_s_operations_port_is_reachable() -> None:
    rendered = objects()
    policy = one(rendered, "NetworkPolicy", "quotient-scheduler")["spec"]
    assert policy["ingress"] == [{"ports": [{"port": "ops"}]}]
    assert policy["podSelector"]["matchLabels"].items() <= scheduler_pod(rendered)["metadata"]["labels"].items()
    assert one(rendered, "Service", "quotient-scheduler")["spec"]["ports"] == [
        {"name": "ops", "port": 8080, "targetPort": "ops"}
    ]


def test_alerts_use_metrics_of_the_scheduler() -> None:
    rules = one(objects('monitoring={"rules": true}'), "PrometheusRule", "quotient")["spec"]["groups"][0]["rules"]
    used = {name for rule in rules for name in re.findall(r"quotient_scheduler_\w+", rule["expr"])}
    assert used == {"quotient_scheduler_active", "quotient_scheduler_longest_wait_seconds"}
    assert used <= GAUGE_HELP.keys()


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
                names = ["quotient-ca", "quotient-webhook-tls", "quotient-nodeplugin-tls"]
                assert rule["verbs"] == ["create"] or rule["resourceNames"] == names


@pytest.mark.parametrize("mode", ["self", "cert-manager"])
def test_node_plugins_mount_a_certificate_and_no_ca_key(mode: str) -> None:
    """It may be missing, and its name is that of their Service."""
    rendered = objects(f'certificates={{"mode": "{mode}"}}')
    pod = one(rendered, "DaemonSet", "quotient-nodeplugin")["spec"]["template"]["spec"]
    (secret,) = [each["secret"] for each in pod["volumes"] if "secret" in each]
    assert (secret["secretName"], secret["optional"]) == (MONITOR_SECRET, True)
    assert [each["key"] for each in secret["items"]] == ["tls.crt", "tls.key"]
    mounts = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
    assert mounts["certificate"] == MonitorSettings().certificates
    annotations = one(rendered, "Service", MONITOR_SERVICE)["metadata"]["annotations"]
    assert annotations["prometheus.io/scheme"] == "https"
    if mode == "cert-manager":
        certificate = one(rendered, "Certificate", "quotient-nodeplugin")["spec"]
        assert certificate["secretName"] == MONITOR_SECRET
        assert tuple(certificate["dnsNames"]) == Configuration().monitor_names()


def test_prometheus_scrapes_node_plugins_by_https_with_its_token() -> None:
    """And verifies their certificate; `monitor.open` needs none of it."""
    rendered = objects(
        "monitoring.serviceMonitor=true",
        'metricsViewers=[{"kind": "ServiceAccount", "name": "prometheus", "namespace": "monitoring"}]',
    )
    monitor = one(rendered, "ServiceMonitor", "quotient-nodeplugin")["spec"]
    service = one(rendered, "Service", MONITOR_SERVICE)
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] == service["spec"]["ports"][0]["name"]
    assert endpoint["scheme"] == "https"
    assert endpoint["bearerTokenFile"].endswith("/token")
    assert endpoint["tlsConfig"] == {
        "serverName": Configuration().monitor_names()[0],
        "ca": {"secret": {"name": MONITOR_SECRET, "key": "ca.crt"}},
    }
    binding = one(rendered, "ClusterRoleBinding", "quotient-metrics-viewer")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "prometheus", "namespace": "monitoring"}]
    opened = objects("monitoring.serviceMonitor=true", "config.monitor.open=true")
    (endpoint,) = one(opened, "ServiceMonitor", "quotient-nodeplugin")["spec"]["endpoints"]
    assert endpoint.keys() == {"port", "path", "interval"}
    assert one(opened, "Service", MONITOR_SERVICE)["metadata"]["annotations"]["prometheus.io/scheme"] == "http"


def test_without_a_provided_certificate_node_plugins_are_not_scraped() -> None:
    """They serve no TLS then, and so nothing but probes to other machines."""
    provided = {"mode": "provided", "secretName": "mine", "caBundle": "PEM"}
    rendered = objects(f"certificates={json.dumps(provided)}", "monitoring.serviceMonitor=true")
    pod = one(rendered, "DaemonSet", "quotient-nodeplugin")["spec"]["template"]["spec"]
    assert not [each for each in pod["volumes"] if "secret" in each]
    monitors = [each["metadata"]["name"] for each in rendered if each["kind"] == "ServiceMonitor"]
    assert monitors == ["quotient"]


def test_a_load_aware_scheduler_mounts_the_ca_of_node_plugins_and_not_their_key() -> None:
    pod = scheduler_pod(objects("config.scheduler.loadAware=true"))["spec"]
    (secret,) = [each["secret"] for each in pod["volumes"] if "secret" in each]
    assert (secret["secretName"], secret["items"]) == (MONITOR_SECRET, [{"key": "ca.crt", "path": "ca.crt"}])
    extender = next(each for each in pod["containers"] if each["name"] == "extender")
    assert MonitorSettings().certificates in [each["mountPath"] for each in extender["volumeMounts"]]
    assert not [each for each in scheduler_pod(objects())["spec"]["volumes"] if "secret" in each]


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
