"""Generates two files of `deploy/`: the chart's registration template, and the plain manifests.

    python -m deploy.render [--check]

The webhook configurations and the admission policy for quotas come from webhook/registration.py, because their CEL
conditions have to match what the webhook reads. They are generated with placeholders, which are then replaced by Helm
expressions. The manifests are the chart rendered by Helm with its default values. --check writes nothing, lists the
files that differ and fails if there are any.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from deploy.toolchain import helm
from settings.configuration import Configuration, WebhookSettings
from vcuda.names import HAMI_CORES, HAMI_MEMORY, HAMI_MEMORY_PERCENT, HAMI_PRIORITY, NVIDIA_GPU
from vcuda.vocabulary import VocabularyOptions
from webhook.registration import registration
from webhook.service import admission_config_of

HERE = Path(__file__).parent
CHART = HERE / "chart"
REGISTRATION = CHART / "templates" / "registration.yaml"
MANIFESTS = HERE / "manifests" / "quotient.yaml"
NAMESPACE, IMAGE = "quotient-system", "localhost/quotient:0.1.0"
# Stands for the cluster's version in the manifests. A real version would start on clusters of any version, and does not
# work with older ones.
CLUSTER_VERSION = "CLUSTER_VERSION"

# Placeholders for what depends on the release. They are valid names, so the webhook's code accepts them.
DOMAIN, SYSTEM, BINDER = "domain.sentinel", "namespace-sentinel", "binder-sentinel"
# Resource names that are registered only if this Helm template of the chart is not empty.
OPTIONAL = {
    NVIDIA_GPU: "quotient.nvidiaGpu",
    HAMI_MEMORY: "quotient.hami",
    HAMI_CORES: "quotient.hami",
    HAMI_MEMORY_PERCENT: "quotient.hami",
    HAMI_PRIORITY: "quotient.hami",
}
POLICY, LABELS, ANNOTATIONS, BUNDLE = "sentinel-policy", "sentinel-labels", "sentinel-annotations", "sentinel-bundle"
PATH = "sentinel-path"
HEADER = """{{/* Written by `python -m deploy.render` from webhook/registration.py: change that, not this. */}}
"""


class QuotingDumper(yaml.SafeDumper):
    """Prefers double quotes: in single ones, the quotes of CEL string literals would be doubled and hard to read."""


def represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if "'" in text or "{" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


QuotingDumper.add_representer(str, represent_text)


def render_registration_template() -> str:
    """Return the text of templates/registration.yaml."""
    configuration = Configuration(
        domain=DOMAIN,
        system_namespace=SYSTEM,
        vocabularies=VocabularyOptions(nvidia_gpu=True, hami=True),
        webhook=WebhookSettings(binders=(BINDER,)),
    )
    objects = registration(admission_config_of(configuration), f"{SYSTEM}/quotient-webhook")
    return HEADER + "---\n".join(object_template(each) for each in objects)


def object_template(obj: dict[str, Any]) -> str:
    """Return the template of one object: YAML with Helm expressions in place of the placeholders."""
    kind = obj["kind"]
    obj["metadata"] = {"name": obj["metadata"]["name"], "labels": LABELS}
    if "webhooks" in obj:
        obj["metadata"]["annotations"] = ANNOTATIONS
        for hook in obj["webhooks"]:
            hook["failurePolicy"] = POLICY
            service = {key: value for key, value in hook["clientConfig"]["service"].items() if key != "path"}
            hook["clientConfig"] = {"service": service | {PATH: PATH}, BUNDLE: BUNDLE}
    text = yaml.dump(obj, Dumper=QuotingDumper, sort_keys=False, width=sys.maxsize, allow_unicode=True)
    if "{{" in text:
        raise ValueError(f"{kind} contains {{{{, which Helm would evaluate")
    component = '(dict "root" . "component" "admission")'
    for sentinel, value in {
        f" {LABELS}": '\n    {{- include "quotient.labels" ' + component + " | nindent 4 }}",
        f" {ANNOTATIONS}": '\n    {{- include "quotient.registrationAnnotations" . | nindent 4 }}',
        POLICY: '{{ include "quotient.failurePolicy" (dict "root" . "kind" "' + kind + '") }}',
        f"      {PATH}: {PATH}\n": '      {{- include "quotient.path" "' + kind + '" | nindent 6 }}\n',
        f"    {BUNDLE}: {BUNDLE}\n": '    {{- include "quotient.caBundle" . | nindent 4 }}\n',
        f", '{BINDER}'": """{{ range dig "webhook" "binders" list .Values.config }}, '{{ . }}'{{ end }}""",
        **{
            f", '{key}'": f"""{{{{ if include "{when}" . }}}}, '{key}'{{{{ end }}}}""" for key, when in OPTIONAL.items()
        },
        DOMAIN: '{{ include "quotient.domain" . }}',
        SYSTEM: "{{ .Release.Namespace }}",
    }.items():
        text = text.replace(sentinel, value)
    return text


def render_chart(*values: str, namespace: str = NAMESPACE, hooks: bool = True, chart: Path = CHART) -> str:
    """Render the chart with `helm template`; values are written as KEY=JSON. Raises ValueError with Helm's message."""
    flags = [flag for value in values for flag in ("--set-json", value)] + ([] if hooks else ["--no-hooks"])
    command = [str(helm()), "template", "quotient", str(chart), "--namespace", namespace, "--kube-version", "1.36.4"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, check=False)  # noqa: S603 - fixed arguments
    if done.returncode:
        raise ValueError(done.stderr.strip())
    return done.stdout


def render_manifests() -> str:
    """Return the text of manifests/quotient.yaml. Without hooks: they are run by Helm only."""
    header = (
        "# Quotient, rendered from deploy/chart by `python -m deploy.render`. Build an image (README, Install),\n"
        f"# replace {IMAGE} by its name and {CLUSTER_VERSION} by the server's version as `kubectl version`\n"
        "# shows it, such as v1.36.4, and run: kubectl apply --server-side -f quotient.yaml\n"
    )
    values = (f"image={json.dumps(IMAGE)}", f"scheduler.kubeScheduler.tag={json.dumps(CLUSTER_VERSION)}")
    return header + render_chart(*values, "namespace.create=true", hooks=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; list the files that differ, and fail")
    options = parser.parse_args()
    differing = []
    # In this order: the manifests are rendered from the chart, and so from the registration template.
    for path, render in ((REGISTRATION, render_registration_template), (MANIFESTS, render_manifests)):
        text = render()
        if not path.exists() or path.read_text() != text:
            differing.append(str(path))
            if not options.check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
    for name in differing:
        print(name if options.check else f"wrote {name}")  # noqa: T201 - the output of this command
    sys.exit(1 if options.check and differing else 0)


if __name__ == "__main__":
    main()
