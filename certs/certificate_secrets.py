"""The two secrets that hold the certificates, written by compare-and-swap.

The CA's secret is for the controller alone. The leaf's secret is mounted by the webhook, which can read no other.
"""

import base64
import binascii
from datetime import datetime
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from certs.key_pairs import KeyPair
from certs.rotation import CertificateState, Leaf, usable_authority
from cluster.errors import NotFound
from cluster.interface import Cluster
from cluster.objects import SECRETS, Metadata, Owners, Secret
from vcuda.names import (
    CA_SECRET,
    CERTIFICATE_LABELS,
    CURRENT_CA,
    FORMER_CAS,
    LEAF_SECRET,
    NEXT_CA,
    ROTATE_ANNOTATION,
    TLS_CERTIFICATE,
    TLS_KEY,
    TLS_SECRET_TYPE,
)


class RotationTarget(StrEnum):
    """Values of the rotate annotation: a new CA (which brings a new leaf), or a new leaf of the same CA."""

    AUTHORITY = "ca"
    LEAF = "leaf"


class StoredCertificates(Struct, frozen=True):
    """The state of the certificates, and the secrets it was read from; None for a secret that does not exist."""

    state: CertificateState
    authority: Secret | None
    leaf: Secret | None
    # The value of the rotate annotation as it was written, which may be no RotationTarget; empty: no request.
    requested: str = ""


class CertificateSecrets:
    """Reads and writes the two secrets."""

    def __init__(self, cluster: Cluster, namespace: str, owners: Owners = list) -> None:
        self._cluster, self._namespace, self._owners = cluster, namespace, owners

    def read(self, now: datetime) -> StoredCertificates:
        """Read both secrets; a CA that is damaged or expired counts as missing."""
        authority, leaf = self.find(CA_SECRET), self.find(LEAF_SECRET)
        state = CertificateState(
            current=authority_in(authority, CURRENT_CA, now),
            next=authority_in(authority, NEXT_CA, now),
            former=value_in(authority, FORMER_CAS),
            leaf=Leaf(value_in(leaf, TLS_CERTIFICATE), value_in(leaf, TLS_KEY)),
        )
        requested = authority.metadata.annotations.get(ROTATE_ANNOTATION, "") if authority else ""
        return StoredCertificates(state, authority, leaf, requested)

    def write(self, before: StoredCertificates, state: CertificateState, *, clear_request: bool = False) -> None:
        """Write what changed; Conflict or AlreadyExists if another writer changed a secret since it was read.

        `clear_request` removes the rotate annotation, which this write fulfills.
        """
        old_cas = (before.state.current, before.state.next, before.state.former)
        has_new_cas = (state.current, state.next, state.former) != old_cas
        # CAs first: after a crash in between, a leaf whose CA is not stored would be useless.
        if has_new_cas:
            self._put_authorities(before, state, clear_request=clear_request)
        if state.leaf != before.state.leaf:
            data = {TLS_CERTIFICATE: state.leaf.certificate, TLS_KEY: state.leaf.key}
            self.put(before.leaf, LEAF_SECRET, TLS_SECRET_TYPE, data)
        if clear_request and not has_new_cas:
            self._put_authorities(before, state, clear_request=True)

    def _put_authorities(self, before: StoredCertificates, state: CertificateState, *, clear_request: bool) -> None:
        data = {FORMER_CAS: state.former}
        for prefix, pair in ((CURRENT_CA, state.current), (NEXT_CA, state.next)):
            if pair is not None:
                data |= {f"{prefix}.crt": pair.certificate, f"{prefix}.key": pair.key}
        drop = ROTATE_ANNOTATION if clear_request else ""
        self.put(before.authority, CA_SECRET, "Opaque", data, drop_annotation=drop)

    def request_rotation(self, target: RotationTarget) -> None:
        """Annotate the CA's secret; NotFound if the controller has not created it yet."""
        self._cluster.patch(
            SECRETS, CA_SECRET, self._namespace, {"metadata": {"annotations": {ROTATE_ANNOTATION: target.value}}}
        )

    def find(self, name: str) -> Secret | None:
        try:
            return self._cluster.get(SECRETS, name, self._namespace)
        except NotFound:
            return None

    def put(
        self, old: Secret | None, name: str, type_: str, data: dict[str, bytes], *, drop_annotation: str = ""
    ) -> None:
        encoded = {key: base64.b64encode(value).decode() for key, value in data.items() if value}
        if old is None:
            metadata = Metadata(
                name=name, namespace=self._namespace, labels=CERTIFICATE_LABELS, owner_references=self._owners()
            )
            self._cluster.create(SECRETS, Secret(metadata=metadata, type=type_, data=encoded))
            return
        annotations = {key: value for key, value in old.metadata.annotations.items() if key != drop_annotation}
        # A secret that was restored from a backup may have lost its owner.
        owners = old.metadata.owner_references or self._owners()
        metadata = replace(old.metadata, annotations=annotations, owner_references=owners)
        self._cluster.update(SECRETS, replace(old, metadata=metadata, data=encoded))


def value_in(secret: Secret | None, key: str) -> bytes:
    """Return a secret's value; empty if the secret or the key is missing, or the value is not base64."""
    return decode_base64(secret.data.get(key, "")) if secret else b""


def decode_base64(text: str) -> bytes:
    """Decode base64 as the API writes it; empty if it is not base64."""
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        return b""


def authority_in(secret: Secret | None, prefix: str, now: datetime) -> KeyPair | None:
    """Parse the CA stored as `<prefix>.crt` and `<prefix>.key`; None if it is missing or cannot be used."""
    return usable_authority(value_in(secret, f"{prefix}.crt"), value_in(secret, f"{prefix}.key"), now)
