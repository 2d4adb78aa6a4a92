"""The two webhook configurations as the controller maintains them: caBundle, failurePolicy and path.

The chart registers the webhooks with failurePolicy Ignore, so that GPU pods are not refused before a replica can
answer. Once one can, the controller sets Fail, and pods fail closed. Before the webhook is removed it sets Ignore
again, so that no configuration with Fail is left without a server. A webhook that is only down keeps Fail.

All are applied server-side, by webhook name, each with its own field manager; the controller restores them when another
client overwrites them. Annotation `quotient.dev/arm` decides about the failurePolicy: `auto` leaves it to
the controller, `never` keeps Ignore.
"""

import base64
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import StrEnum
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
from vcuda.names import (
    ARM_ANNOTATION,
    ARM_AUTO,
    ARM_NEVER,
    CERTIFICATES_MANAGER,
    FAILURE_POLICY_MANAGER,
    PATHS_ANNOTATION,
    PATHS_MANAGER,
    WEBHOOK,
    WEBHOOK_CONFIGURATION,
)
from vcuda.webhook_paths import MUTATE, VALIDATE, PathRecord, decode_record, encode_record, path_for, secret_in

WEBHOOK_KINDS: tuple[Kind[WebhookConfiguration], ...] = (MUTATING_WEBHOOKS, VALIDATING_WEBHOOKS)


class FailurePolicy(StrEnum):
    """What the API server does with a pod when the webhook does not answer: FAIL refuses it, IGNORE lets it through."""

    FAIL = "Fail"
    IGNORE = "Ignore"


class WebhookConfigurations:
    """Changes only webhooks behind Quotient's Service; those at a URL have certificates of their own."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster, self._namespace = cluster, namespace

    def read(self) -> dict[Kind[WebhookConfiguration], WebhookConfiguration]:
        """Return the configurations that exist."""
        configurations: dict[Kind[WebhookConfiguration], WebhookConfiguration] = {}
        for kind in WEBHOOK_KINDS:
            try:
                configurations[kind] = self._cluster.get(kind, WEBHOOK_CONFIGURATION)
            except NotFound:
                continue
        return configurations

    def own_webhooks(self, configuration: WebhookConfiguration) -> list[RegisteredWebhook]:
        """Return the webhooks behind Quotient's Service."""
        service = WEBHOOK, self._namespace
        return [
            hook
            for hook in configuration.webhooks
            if (hook.client_config.service.name, hook.client_config.service.namespace) == service
        ]

    def bundles(self) -> list[bytes]:
        """Return the caBundle of each active webhook; empty where none is set."""
        return [
            bundle_of(hook) for configuration in self._active().values() for hook in self.own_webhooks(configuration)
        ]

    def _active(self) -> dict[Kind[WebhookConfiguration], WebhookConfiguration]:
        """Return the configurations, without a new validating one until the mutating one fails closed.

        Otherwise a pod whose mutating call failed and was ignored, just before the first replica was ready, would be
        refused by that replica's validating call because it was not rewritten. Without a caBundle the validating call
        fails too, and is ignored.
        """
        configurations = self.read()
        mutating, validating = configurations.get(MUTATING_WEBHOOKS), configurations.get(VALIDATING_WEBHOOKS)
        if mutating is None or validating is None or mutating.metadata.annotations.get(ARM_ANNOTATION) != ARM_AUTO:
            return configurations
        is_new = not any(map(bundle_of, self.own_webhooks(validating)))
        if is_new and any(hook.failure_policy != FailurePolicy.FAIL for hook in self.own_webhooks(mutating)):
            del configurations[VALIDATING_WEBHOOKS]
        return configurations

    def set_ca_bundle(self, bundle: bytes) -> bool:
        """Make the API server trust these CAs for all webhooks; returns whether anything was changed."""
        encoded = base64.b64encode(bundle).decode()
        return self._apply(CERTIFICATES_MANAGER, lambda *_: {"clientConfig": {"caBundle": encoded}})

    def set_failure_policy(self, policy: FailurePolicy | None) -> bool:
        """Set the failurePolicy where the annotation allows it; returns whether anything was changed.

        None leaves it as it is, but for configurations with annotation `never`, which get Ignore. Quotient's namespace
        becomes the owner of the configurations, so that deleting the namespace deletes them.
        """
        return self._apply(
            FAILURE_POLICY_MANAGER,
            lambda configuration, hook: (
                {"failurePolicy": desired} if (desired := desired_failure_policy(configuration, hook, policy)) else {}
            ),
            owned=True,
        )

    def paths(self) -> tuple[list[str | None], list[PathRecord]]:
        """Return the secret in each webhook's path, None for another path, and the record of each configuration."""
        configurations = [each for each in self.read().values() if self.own_webhooks(each)]
        hooks = [hook for each in configurations for hook in self.own_webhooks(each)]
        records = [decode_record(each.metadata.annotations.get(PATHS_ANNOTATION, "")) for each in configurations]
        return [secret_of(hook) for hook in hooks], records

    def set_paths(self, secret: str, record: PathRecord) -> None:
        """Write the paths with a secret, and the record, in one write for each configuration."""
        for kind, configuration in self.read().items():
            path = path_for(MUTATE if kind is MUTATING_WEBHOOKS else VALIDATE, secret)
            hooks = [
                {"name": hook.name, "clientConfig": {"service": {"path": path}}}
                for hook in self.own_webhooks(configuration)
            ]
            fields = {"metadata": {"annotations": {PATHS_ANNOTATION: encode_record(record)}}, "webhooks": hooks}
            with suppress(Conflict):  # deleted or created again since it was read: its informer reports that
                if hooks:
                    self._cluster.apply(kind, configuration, fields, manager=PATHS_MANAGER)

    def _apply(
        self,
        manager: str,
        desired: Callable[[WebhookConfiguration, RegisteredWebhook], dict[str, Any]],
        *,
        owned: bool = False,
    ) -> bool:
        """Apply fields to each own webhook, unless they are right; returns whether anything was changed."""
        changed = False
        for kind, configuration in self._active().items():
            hooks = self.own_webhooks(configuration)
            # Server-side apply removes the manager's fields from webhooks that are not named: so all are.
            fields = [{"name": hook.name, **desired(configuration, hook)} for hook in hooks]
            is_applied = all(has_fields(hook, each) for hook, each in zip(hooks, fields, strict=True))
            if not hooks or (is_applied and (namespace_uid(configuration) or not owned)):
                continue
            with suppress(Conflict):  # deleted or created again since it was read: its informer reports that
                whole = {"webhooks": fields, **(self._owner_fields(configuration) if owned else {})}
                self._cluster.apply(kind, configuration, whole, manager=manager)
                changed = True
        return changed

    def is_being_removed(self, deployment: str = WEBHOOK) -> bool:
        """Whether a Deployment, or Quotient's whole namespace, is deleted or being deleted."""
        try:
            # First: in a terminating namespace the Role that allows reading Deployments may be deleted already.
            if self._cluster.get(NAMESPACES, self._namespace).metadata.deletion_timestamp:
                return True
            return bool(self._cluster.get(DEPLOYMENTS, deployment, self._namespace).metadata.deletion_timestamp)
        except NotFound:
            return True

    def _owner_fields(self, configuration: WebhookConfiguration) -> dict[str, object]:
        # No read if it is known: when the webhook is being removed, its endpoints are removed at the same time.
        uid = namespace_uid(configuration)
        try:
            uid = uid or self._cluster.get(NAMESPACES, self._namespace).metadata.uid
        except NotFound:
            return {}
        owner = {"apiVersion": "v1", "kind": "Namespace", "name": self._namespace, "uid": uid}
        return {"metadata": {"ownerReferences": [owner]}}


def desired_failure_policy(
    configuration: WebhookConfiguration, hook: RegisteredWebhook, policy: FailurePolicy | None
) -> str:
    """Return a webhook's failurePolicy; empty if the annotation leaves it to others."""
    arm = configuration.metadata.annotations.get(ARM_ANNOTATION)
    if arm == ARM_NEVER:
        return FailurePolicy.IGNORE.value
    if arm != ARM_AUTO:
        return ""
    return hook.failure_policy if policy is None else policy.value


def has_fields(hook: RegisteredWebhook, fields: Mapping[str, Any]) -> bool:
    """Whether a webhook has these values of caBundle and failurePolicy."""
    current = {"clientConfig": {"caBundle": hook.client_config.ca_bundle}, "failurePolicy": hook.failure_policy}
    return all(current[key] == value for key, value in fields.items() if key in current)


def namespace_uid(configuration: WebhookConfiguration) -> str:
    """Return the uid of the namespace that owns a configuration; empty if none does."""
    return next((owner.uid for owner in configuration.metadata.owner_references if owner.kind == "Namespace"), "")


def secret_of(hook: RegisteredWebhook) -> str | None:
    """Return the secret in a webhook's path, empty for a plain path; None for another path."""
    return secret_in(hook.client_config.service.path)


def bundle_of(hook: RegisteredWebhook) -> bytes:
    return decode_base64(hook.client_config.ca_bundle)
