"""The webhook configurations as the controller keeps them: whom the API server trusts, and whether it must be answered.

The chart registers our webhooks with `failurePolicy: Ignore`, so that nobody is held up before they can answer. When
they do, the controller arms them: `Fail`. When the webhook is taken away for good, it disarms them again, so that no
configuration is ever left without its server. Both are written by name, under a field manager of their own, and come
back if somebody wipes them. A webhook that is only away stays armed: pods with GPUs then wait for it.
"""

import base64
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from certs.certificate_secrets import decode_base64
from cluster.errors import Conflict, NotFound
from cluster.interface import Cluster
from cluster.objects import (
    DEPLOYMENTS,
    MUTATING_WEBHOOKS,
    NAMESPACES,
    VALIDATING_WEBHOOKS,
    Kind,
    RegisteredWebhook,
    WebhookConfiguration,
)
from vcuda.names import API_GROUP, WEBHOOK_SERVICE

CONFIGURATION_NAME = "quotient"
# Field managers, one for each thing that is kept.
CERTIFIER, ARMER = "quotient-certificates", "quotient-arming"
WEBHOOK_KINDS: tuple[Kind[WebhookConfiguration], ...] = (MUTATING_WEBHOOKS, VALIDATING_WEBHOOKS)
# Annotation of a configuration: `auto` lets the controller arm it, `never` keeps it disarmed. The emergency exit.
ARM = f"{API_GROUP}/arm"
AUTO, NEVER = "auto", "never"
ARMED, DISARMED = "Fail", "Ignore"
# Of the Deployments; the webhook's Service has its name.
WEBHOOK, CONTROLLER = WEBHOOK_SERVICE, "quotient-controller"


class WebhookConfigurations:
    """Both configurations. Only webhooks behind our own Service are touched; others have certificates of their own."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster, self._namespace = cluster, namespace

    def read(self) -> dict[Kind[WebhookConfiguration], WebhookConfiguration]:
        """Read those that there are."""
        found: dict[Kind[WebhookConfiguration], WebhookConfiguration] = {}
        for kind in WEBHOOK_KINDS:
            try:
                found[kind] = self._cluster.get(kind, CONFIGURATION_NAME)
            except NotFound:
                continue
        return found

    def ours(self, configuration: WebhookConfiguration) -> list[RegisteredWebhook]:
        """Give the webhooks behind our Service."""
        service = WEBHOOK, self._namespace
        return [
            hook
            for hook in configuration.webhooks
            if (hook.client_config.service.name, hook.client_config.service.namespace) == service
        ]

    def bundles(self) -> list[bytes]:
        """Give what the API server trusts for each of our webhooks, but for those that are held back."""
        return [bundle_of(hook) for configuration in self._usable().values() for hook in self.ours(configuration)]

    def _usable(self) -> dict[Kind[WebhookConfiguration], WebhookConfiguration]:
        """Leave validation out until mutation is insisted upon.

        Else a pod whose mutation failed, and was ignored, just before a replica was there, would be judged a moment
        later by that replica, and refused for not being rewritten. Without a CA, validation is ignored as well.
        """
        found = self.read()
        mutating, validating = found.get(MUTATING_WEBHOOKS), found.get(VALIDATING_WEBHOOKS)
        if mutating is None or validating is None or mutating.metadata.annotations.get(ARM) != AUTO:
            return found
        is_new = not any(map(bundle_of, self.ours(validating)))
        if is_new and any(hook.failure_policy != ARMED for hook in self.ours(mutating)):
            del found[VALIDATING_WEBHOOKS]
        return found

    def publish(self, bundle: bytes) -> bool:
        """Let the API server trust these CAs for all of our webhooks; tells whether anything had to be changed."""
        encoded = base64.b64encode(bundle).decode()
        return self._apply(CERTIFIER, lambda *_: {"clientConfig": {"caBundle": encoded}})

    def arm(self, *, armed: bool | None) -> bool:
        """Let the API server insist on an answer, or not; None leaves that as it is, unless the emergency exit is open.

        Our namespace is made the owner as well: deleted with everything in it, it takes the configurations along.
        """
        return self._apply(
            ARMER,
            lambda configuration, hook: (
                {"failurePolicy": policy} if (policy := wanted_failure_policy(configuration, hook, armed)) else {}
            ),
            owned=True,
        )

    def _apply(
        self,
        manager: str,
        wanted: Callable[[WebhookConfiguration, RegisteredWebhook], dict[str, Any]],
        *,
        owned: bool = False,
    ) -> bool:
        """Make fields of each of our webhooks so, if they are not already; each manager always names all of its own."""
        changed = False
        for kind, configuration in self._usable().items():
            hooks = self.ours(configuration)
            fields = [{"name": hook.name, **wanted(configuration, hook)} for hook in hooks]
            is_so = all(is_already(hook, each) for hook, each in zip(hooks, fields, strict=True))
            if not hooks or (is_so and (is_owned(configuration) or not owned)):
                continue
            with suppress(Conflict):  # deleted, or another one: we shall hear of it
                whole = {"webhooks": fields, **(self._owned_by_namespace() if owned else {})}
                self._cluster.apply(kind, configuration, whole, manager=manager)
                changed = True
        return changed

    def is_taken_away(self, deployment: str = WEBHOOK) -> bool:
        """Tell whether a part of Quotient is being removed for good: its Deployment, or all of its namespace."""
        try:
            # In a namespace that is going, the right to look at Deployments may have gone already.
            if self._cluster.get(NAMESPACES, self._namespace).metadata.deletion_timestamp:
                return True
            return bool(self._cluster.get(DEPLOYMENTS, deployment, self._namespace).metadata.deletion_timestamp)
        except NotFound:
            return True

    def _owned_by_namespace(self) -> dict[str, object]:
        """Name our namespace as an owner."""
        try:
            namespace = self._cluster.get(NAMESPACES, self._namespace)
        except NotFound:
            return {}
        owner = {"apiVersion": "v1", "kind": "Namespace", "name": self._namespace, "uid": namespace.metadata.uid}
        return {"metadata": {"ownerReferences": [owner]}}


def wanted_failure_policy(configuration: WebhookConfiguration, hook: RegisteredWebhook, armed: bool | None) -> str:  # noqa: FBT001
    """Say what should happen when a webhook does not answer; nothing if that is not ours to say."""
    may = configuration.metadata.annotations.get(ARM)
    if may == NEVER:
        return DISARMED
    if may != AUTO:
        return ""
    if armed is None:
        return hook.failure_policy
    return ARMED if armed else DISARMED


def is_already(hook: RegisteredWebhook, fields: Mapping[str, Any]) -> bool:
    """Tell whether a webhook is what it should be."""
    now = {"clientConfig": {"caBundle": hook.client_config.ca_bundle}, "failurePolicy": hook.failure_policy}
    return all(now[key] == value for key, value in fields.items() if key in now)


def is_owned(configuration: WebhookConfiguration) -> bool:
    """Tell whether the namespace is the owner."""
    return any(owner.kind == "Namespace" for owner in configuration.metadata.owner_references)


def bundle_of(hook: RegisteredWebhook) -> bytes:
    """Give the CAs that are trusted for one webhook."""
    return decode_base64(hook.client_config.ca_bundle)
