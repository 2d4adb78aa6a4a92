"""The order in which one CA follows another, so that at no moment a caller meets a certificate it does not trust.

Publish the old and the new CA together; see that in every webhook configuration; only then issue a certificate of the
new one; see that served by every replica; only then drop the old CA. What has been done is read from what there is, so
every step can be repeated, and a crash between any two of them loses nothing.
"""

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from msgspec import Struct
from msgspec.structs import replace

from certs.authority import issue, new_authority
from certs.key_pairs import CertificateError, KeyPair, certificates_in, pair_of
from certs.renewal import authority_needs_renewal, is_signed_by, needs_renewal, why_no_authority, why_unusable


class Leaf(Struct, frozen=True):
    """The serving certificate as it is stored, whatever is wrong with it."""

    certificate: bytes = b""
    key: bytes = b""


class CertificateState(Struct, frozen=True):
    """What is kept: the CA that signs, the one that will follow, those that some still rely on; and what is served."""

    current: KeyPair | None = None
    following: KeyPair | None = None
    former: bytes = b""
    leaf: Leaf = Leaf()

    @property
    def bundle(self) -> bytes:
        """What callers should trust; in an order that does not depend on which of them signs."""
        pairs = [pair for pair in (self.current, self.following) if pair is not None]
        return merge_bundles([*(pair.certificate for pair in pairs), self.former])


class ObservedTrust(Struct, frozen=True):
    """What is seen of callers and replicas.

    `trusted` is what callers trust now; `published` says that this is the whole bundle, for long enough to be known
    everywhere; `served` that all replicas serve the stored leaf; `serving` is what they serve, whatever that is.
    """

    trusted: bytes
    published: bool
    served: bool
    serving: tuple[bytes, ...] = ()


class RotationRequest(Struct, frozen=True):
    """What the certificate is for, and what of it somebody wants anew although it is not due."""

    names: tuple[str, ...]
    new_authority: bool = False
    new_leaf: bool = False


class Step(StrEnum):
    """What to do next."""

    BEGIN = "begin"
    REMEMBER = "remember"
    PREPARE = "prepare"
    PROMOTE = "promote"
    ISSUE = "issue"
    DROP = "drop"
    WAIT = "wait"
    REST = "rest"


class NextStep(Struct, frozen=True):
    """The next step, and why it is that."""

    step: Step
    why: str


def usable_authority(certificate: bytes, key: bytes, now: datetime) -> KeyPair | None:
    """Read a CA as it is stored; None if it cannot sign."""
    if why_unusable(certificate, key, now=now):
        return None
    pair = pair_of(certificate, key, "the CA")
    return None if why_no_authority(pair) else pair


def next_step(kept: CertificateState, wanted: RotationRequest, now: datetime, outside: ObservedTrust) -> NextStep:
    """Say what to do next."""
    if kept.current is None:
        return NextStep(Step.BEGIN, "there is no CA that can sign")
    if relied_on(kept, outside, kept.bundle):
        return NextStep(Step.REMEMBER, "callers rely on a CA that is not kept any more")
    of_leaf = next_of_leaf(kept.current, kept.leaf, wanted, now, outside)
    return of_leaf or next_of_authority(kept.current, kept, wanted, now, outside)


def next_of_leaf(
    current: KeyPair, leaf: Leaf, wanted: RotationRequest, now: datetime, outside: ObservedTrust
) -> NextStep | None:
    """Say whether the serving certificate has to be made anew, now or later."""
    stored = leaf.certificate, leaf.key
    renewing, why = needs_renewal(*stored, now=now, names=wanted.names, authority=current.certificate)
    if not renewing and not wanted.new_leaf:
        return None
    # Where nothing good is stored or served, nobody can be hurt.
    is_needed = why_unusable(*stored, now=now, names=wanted.names) and not is_served_well(outside, now)
    if outside.published or is_needed:
        return NextStep(Step.ISSUE, why if renewing else "it was asked for")
    return NextStep(Step.WAIT, "not all callers trust the present CA yet")


def is_served_well(outside: ObservedTrust, now: datetime) -> bool:
    """Tell whether some replica serves what callers trust."""
    leaves = [each for each in map(first_in, outside.serving) if each is not None]
    return any(
        leaf.not_valid_before_utc <= now < leaf.not_valid_after_utc and is_signed_by(leaf, authority)
        for leaf in leaves
        for authority in split_bundle(outside.trusted)
    )


def next_of_authority(
    current: KeyPair, kept: CertificateState, wanted: RotationRequest, now: datetime, outside: ObservedTrust
) -> NextStep:
    """Say how far one CA has followed another."""
    if kept.following is not None:
        if outside.published:
            return NextStep(Step.PROMOTE, "all callers trust the CA that follows")
        return NextStep(Step.WAIT, "not all callers trust the CA that follows yet")
    if kept.former and outside.published and outside.served:
        return NextStep(Step.DROP, "all replicas serve a certificate of the present CA")
    # Even while a replica hangs on to a former CA: it may do so for ever, and the present one must not end meanwhile.
    renewing, why = authority_needs_renewal(current.certificate, current.key, now=now)
    if renewing or wanted.new_authority:
        return NextStep(Step.PREPARE, why if renewing else "it was asked for")
    if kept.former:
        return NextStep(Step.WAIT, "not all replicas serve a certificate of the present CA yet")
    return NextStep(Step.REST, "everything is as it should be")


def apply_step(
    step: Step, kept: CertificateState, wanted: RotationRequest, now: datetime, outside: ObservedTrust
) -> CertificateState:
    """Take a step; gives what is to be kept."""
    match step, kept.current:
        case Step.BEGIN, _:
            current = kept.following or new_authority(now)
            relied = relied_on(kept, outside, current.certificate)
            kept = replace(kept, current=current, following=None, former=merge_bundles([kept.former, relied]))
        case Step.REMEMBER, _:
            kept = replace(kept, former=merge_bundles([kept.former, relied_on(kept, outside, kept.bundle)]))
        case Step.PREPARE, _:
            kept = replace(kept, following=new_authority(now))
        case Step.PROMOTE, KeyPair() as current:
            former = merge_bundles([kept.former, current.certificate])
            kept = replace(kept, current=kept.following, following=None, former=former)
        case Step.ISSUE, KeyPair() as current:
            made = issue(current, wanted.names, now)
            kept = replace(kept, leaf=Leaf(made.certificate, made.key))
        case Step.DROP, _:
            kept = replace(kept, former=b"")
    return kept


def relied_on(kept: CertificateState, outside: ObservedTrust, bundle: bytes) -> bytes:
    """Give the CAs that callers trust, that signed what is stored or served, and that are not in a bundle.

    Only what callers trust already is ever taken over: what lies beside a certificate proves nothing.
    """
    leaves = [each for each in map(first_in, (kept.leaf.certificate, *outside.serving)) if each is not None]
    return merge_bundles(
        [
            each
            for each in split_bundle(outside.trusted)
            if each not in bundle and any(is_signed_by(leaf, each) for leaf in leaves)
        ]
    )


def first_in(pem: bytes) -> x509.Certificate | None:
    """Read a certificate; None if it is none."""
    try:
        return certificates_in(pem, "")[0]
    except CertificateError:
        return None


def merge_bundles(bundles: Sequence[bytes]) -> bytes:
    """Put bundles together, each certificate once, in one order."""
    return b"".join(sorted({each for bundle in bundles for each in split_bundle(bundle)}))


def split_bundle(bundle: bytes) -> list[bytes]:
    """Part a bundle into its certificates; what is none is left out."""
    if not bundle:
        return []
    try:
        return [each.public_bytes(Encoding.PEM) for each in certificates_in(bundle, "the bundle")]
    except CertificateError:
        return []
