"""Where certificates are kept in a cluster: two secrets, written by compare-and-swap.

The CA's is for the controller alone. The serving certificate's is mounted by the webhook, which can read nothing else.
"""

import base64
import binascii
from datetime import datetime
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from certs.key_pairs import CERTIFICATE, KEY, KeyPair
from certs.rotation import CertificateState, Leaf, usable_authority
from cluster.errors import NotFound
from cluster.interface import Cluster
from cluster.objects import SECRETS, Metadata, Owners, Secret
from vcuda.names import API_GROUP

CA_SECRET, LEAF_SECRET = "quotient-ca", "quotient-webhook-tls"
TLS_TYPE = "kubernetes.io/tls"
CURRENT, FOLLOWING, FORMER = "ca", "next", "former.crt"
# Annotation of the CA's secret, by which somebody asks for a rotation that is not due.
ROTATE_ANNOTATION = f"{API_GROUP}/rotate"
LABELS = {"app.kubernetes.io/name": "quotient", "app.kubernetes.io/component": "certificates"}


class RotationTarget(StrEnum):
    """What may be asked for: another CA, which brings another serving certificate; or that alone."""

    AUTHORITY = "ca"
    LEAF = "leaf"


class StoredCertificates(Struct, frozen=True):
    """What was read: the certificates, and the secrets they stand in, if those are there."""

    kept: CertificateState
    authority: Secret | None
    leaf: Secret | None
    wish: str = ""


class CertificateSecrets:
    """Reads and writes the two secrets."""

    def __init__(self, cluster: Cluster, namespace: str, owners: Owners = list) -> None:
        self._cluster, self._namespace, self._owners = cluster, namespace, owners

    def read(self, now: datetime) -> StoredCertificates:
        """Read both; what cannot be read counts as missing."""
        authority, leaf = self._find(CA_SECRET), self._find(LEAF_SECRET)
        kept = CertificateState(
            current=pair_in(authority, CURRENT, now),
            following=pair_in(authority, FOLLOWING, now),
            former=value_in(authority, FORMER),
            leaf=Leaf(value_in(leaf, CERTIFICATE), value_in(leaf, KEY)),
        )
        wish = authority.metadata.annotations.get(ROTATE_ANNOTATION, "") if authority else ""
        return StoredCertificates(kept, authority, leaf, wish)

    def write(self, before: StoredCertificates, kept: CertificateState, *, granted: bool = False) -> None:
        """Write what changed, the CAs first; Conflict or AlreadyExists if somebody else wrote meanwhile.

        `granted` takes back the wish that is fulfilled by this.
        """
        before_cas = (before.kept.current, before.kept.following, before.kept.former)
        has_new_cas = (kept.current, kept.following, kept.former) != before_cas
        if has_new_cas:
            self._put_authorities(before, kept, granted=granted)
        if kept.leaf != before.kept.leaf:
            self._put(before.leaf, LEAF_SECRET, TLS_TYPE, {CERTIFICATE: kept.leaf.certificate, KEY: kept.leaf.key})
        if granted and not has_new_cas:
            self._put_authorities(before, kept, granted=True)

    def _put_authorities(self, before: StoredCertificates, kept: CertificateState, *, granted: bool) -> None:
        data = {FORMER: kept.former}
        for name, pair in ((CURRENT, kept.current), (FOLLOWING, kept.following)):
            if pair is not None:
                data |= {f"{name}.crt": pair.certificate, f"{name}.key": pair.key}
        self._put(before.authority, CA_SECRET, "Opaque", data, without=ROTATE_ANNOTATION if granted else "")

    def wish(self, wish: RotationTarget) -> None:
        """Ask for a rotation; NotFound if there is nothing yet that could be rotated."""
        self._cluster.patch(
            SECRETS, CA_SECRET, self._namespace, {"metadata": {"annotations": {ROTATE_ANNOTATION: wish.value}}}
        )

    def _find(self, name: str) -> Secret | None:
        try:
            return self._cluster.get(SECRETS, name, self._namespace)
        except NotFound:
            return None

    def _put(self, found: Secret | None, name: str, type_: str, data: dict[str, bytes], *, without: str = "") -> None:
        encoded = {key: base64.b64encode(value).decode() for key, value in data.items() if value}
        if found is None:
            metadata = Metadata(name=name, namespace=self._namespace, labels=LABELS, owner_references=self._owners())
            self._cluster.create(SECRETS, Secret(metadata=metadata, type=type_, data=encoded))
            return
        notes = {key: value for key, value in found.metadata.annotations.items() if key != without}
        owners = found.metadata.owner_references or self._owners()
        metadata = replace(found.metadata, annotations=notes, owner_references=owners)
        self._cluster.update(SECRETS, replace(found, metadata=metadata, data=encoded))


def value_in(secret: Secret | None, key: str) -> bytes:
    """Read a value; one that is no base64 counts as missing."""
    return decode_base64(secret.data.get(key, "")) if secret else b""


def decode_base64(text: str) -> bytes:
    """Read base64 as the API holds it; nothing if it is none."""
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        return b""


def pair_in(secret: Secret | None, name: str, now: datetime) -> KeyPair | None:
    """Read a CA; None if it is missing, or cannot sign."""
    return usable_authority(value_in(secret, f"{name}.crt"), value_in(secret, f"{name}.key"), now)
