"""Finds the containers for which users requested GPUs until now, and do so no more.

That does not show in an object that the webhook has rewritten: the amounts in it are the webhook's, and `kubectl apply`
removes only what its manifest had. But the stored manifest and the managed fields tell.
"""

from msgspec import Struct

from vcuda.request import resources_of
from webhook.admission_config import AdmissionConfig
from webhook.managed_fields import Manager, containers_by_manager
from webhook.mutating import containers_of
from webhook.objects import AdmittedMetadata, AdmittedSpec


class Declaration(Struct, frozen=True):
    """What users have declared of an object: the manifest that `kubectl apply` stored, if any, and managed fields.

    `manifest` is the spec of a pod, or of the pod template at the JSON pointer `root`.
    """

    manifest: AdmittedSpec | None
    metadata: AdmittedMetadata
    root: str = ""

    def without_gpus(self, config: AdmissionConfig) -> set[str]:
        """Return the containers of the manifest that request no GPU."""
        return {
            container.name
            for _, container in (containers_of(self.manifest) if self.manifest else ())
            if not any(key in config.scheme.by_key for part in resources_of(container) for key in part)
        }

    def by_manager(self, config: AdmissionConfig) -> dict[Manager, set[str]]:
        """Return the containers for which each field manager requests GPUs."""
        return containers_by_manager(self.metadata, self.root, config.scheme.by_key)


def withdrawn_requests(now: Declaration, before: Declaration | None, config: AdmissionConfig) -> set[str]:
    """Return the names of the containers."""
    if before is None:
        return now.without_gpus(config)
    # A manifest that had no GPU before does not withdraw the request of a user who does not apply that manifest.
    by_manifest = now.without_gpus(config) - before.without_gpus(config)
    managers, managers_before = now.by_manager(config), before.by_manager(config)
    # Only of managers that still exist: clearing the managed fields withdraws nothing.
    had = {name for manager, names in managers_before.items() if manager in managers for name in names}
    return by_manifest | had.difference(*managers.values())
