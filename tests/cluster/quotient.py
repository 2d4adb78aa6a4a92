"""Quotient on a real cluster, for people: what exists of it runs beside the control plane and is registered."""

import json

import trustme

from settings.configuration import Configuration
from tests.cluster.layout import CONTROLLER, WEBHOOK, WEBHOOK_PORT
from tests.cluster.real import RealCluster
from webhook.registration import registration
from webhook.service import rules_of

REFUSED = "neither a part of one GPU"


def install(cluster: RealCluster) -> None:
    """Start controller and webhook inside the cluster's namespaces and make the API server call it."""
    authority = trustme.CA()
    folder = cluster.layout.state / "quotient"
    folder.mkdir(exist_ok=True)
    made = authority.issue_cert("127.0.0.1")
    made.cert_chain_pems[0].write_to_path(str(folder / "tls.crt"))
    made.private_key_pem.write_to_path(str(folder / "tls.key"))
    cluster.kubectl("create", "namespace", Configuration().system_namespace)
    cluster.run(CONTROLLER)
    cluster.run(WEBHOOK)
    target = f"https://127.0.0.1:{WEBHOOK_PORT}"
    for each in registration(rules_of(Configuration()), target, authority.cert_pem.bytes()):
        cluster.kubectl("apply", "-f-", stdin=json.dumps(each))
    cluster.until("the webhook to be called", lambda: is_called(cluster), WEBHOOK)


def is_called(cluster: RealCluster, domain: str = Configuration().domain) -> bool:
    """Tell whether the API server asks the webhook by now: it takes a moment to hear of it."""
    wrong = {"name": "c", "image": "i", "resources": {"limits": {f"{domain}/vcuda-core": "150"}}}
    metadata = {"name": "probe", "namespace": "default"}
    probe = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [wrong]}}
    return REFUSED in cluster.kubectl("create", "--dry-run=server", "-f-", stdin=json.dumps(probe), check=False)
