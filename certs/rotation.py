"""The order in which one CA replaces another, so that no caller ever meets a certificate that it does not trust.

1. PREPARE: create the next CA and publish it beside the current one in every webhook configuration.
2. PROMOTE: once all API servers trust both, the next CA becomes the current one. The former stays in the bundle.
3. ISSUE: issue a serving certificate with the new CA.
4. DROP: once every webhook replica serves it, remove the former CA from the bundle.

Which step comes next is derived from what is stored and observed, never from a recorded position. So every step can be
repeated, and a crash between any two of them loses nothing.
"""

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from msgspec import Struct
from msgspec.structs import replace

from certs.authority import issue, new_authority
from certs.key_pairs import CertificateError, KeyPair, certificates_in, parse_pair
from certs.renewal import authority_needs_renewal, authority_problem, is_signed_by, needs_renewal, pair_problem


class Leaf(Struct, frozen=True):
    """The serving certificate as it is stored; it may be missing, expired or damaged."""

    certificate: bytes = b""
    key: bytes = b""


class CertificateState(Struct, frozen=True):
    """What the secrets hold: the CA that signs, its successor during a rotation, former CAs, and the leaf."""

    current: KeyPair | None = None
    next: KeyPair | None = None
    # Certificates of CAs that signed something which may still be served. Their keys are not needed any more.
    former: bytes = b""
    leaf: Leaf = Leaf()

    @property
    def bundle(self) -> bytes:
        """The CAs that callers should trust, sorted: PROMOTE then does not change the bundle."""
        pairs = [pair for pair in (self.current, self.next) if pair is not None]
        return merge_bundles([*(pair.certificate for pair in pairs), self.former])


class ObservedTrust(Struct, frozen=True):
    """What webhook configurations and replicas show at the moment."""

    # The CAs in all webhook configurations together.
    trusted: bytes
    # Every configuration has had exactly the stored bundle for long enough that all API servers use it.
    published: bool
    # Every replica serves the stored leaf.
    served: bool
    # The certificates that replicas serve, whatever they are.
    serving: tuple[bytes, ...] = ()


class RotationRequest(Struct, frozen=True):
    """The names that the leaf has to cover, and what was requested to be replaced before it is due."""

    names: tuple[str, ...]
    new_authority: bool = False
    new_leaf: bool = False


class Step(StrEnum):
    """What to do next; the values are values of a metric label."""

    BEGIN = "begin"
    REMEMBER = "remember"
    PREPARE = "prepare"
    PROMOTE = "promote"
    ISSUE = "issue"
    DROP = "drop"
    WAIT = "wait"
    REST = "rest"


class NextStep(Struct, frozen=True):
    """The next step and its reason."""

    step: Step
    why: str


def usable_authority(certificate: bytes, key: bytes, now: datetime) -> KeyPair | None:
    """Parse a stored CA; None if it is missing, damaged, expired, or cannot sign."""
    if pair_problem(certificate, key, now=now):
        return None
    pair = parse_pair(certificate, key, "the CA")
    return None if authority_problem(pair) else pair


def next_step(state: CertificateState, request: RotationRequest, now: datetime, observed: ObservedTrust) -> NextStep:
    if state.current is None:
        return NextStep(Step.BEGIN, "there is no usable CA")
    # Before anything is published: a bundle without this CA would break replicas that still serve its certificates.
    if relied_on(state, observed, state.bundle):
        return NextStep(Step.REMEMBER, "callers rely on a CA that is not stored")
    leaf_step = next_leaf_step(state.current, state.leaf, request, now, observed)
    return leaf_step or next_authority_step(state.current, state, request, now, observed)


def next_leaf_step(
    current: KeyPair, leaf: Leaf, request: RotationRequest, now: datetime, observed: ObservedTrust
) -> NextStep | None:
    """Return the step if the leaf has to be replaced, now or later; None if it can stay."""
    stored = leaf.certificate, leaf.key
    renewing, why = needs_renewal(*stored, now=now, names=request.names, authority=current.certificate)
    if not renewing and not request.new_leaf:
        return None
    # If no good certificate is stored or served, calls fail already: issuing one at once can only help.
    is_broken = pair_problem(*stored, now=now, names=request.names) and not serves_trusted_leaf(observed, now)
    if observed.published or is_broken:
        return NextStep(Step.ISSUE, why if renewing else "requested")
    return NextStep(Step.WAIT, "not all callers trust the current CA yet")


def serves_trusted_leaf(observed: ObservedTrust, now: datetime) -> bool:
    """Return whether at least one replica serves a valid certificate that callers trust."""
    leaves = [leaf for leaf in map(first_certificate, observed.serving) if leaf is not None]
    return any(
        leaf.not_valid_before_utc <= now < leaf.not_valid_after_utc and is_signed_by(leaf, authority)
        for leaf in leaves
        for authority in split_bundle(observed.trusted)
    )


def next_authority_step(
    current: KeyPair, state: CertificateState, request: RotationRequest, now: datetime, observed: ObservedTrust
) -> NextStep:
    """Return the step of a CA rotation, or whether one has to begin, for a leaf that can stay."""
    if state.next is not None:
        if observed.published:
            return NextStep(Step.PROMOTE, "all callers trust the next CA")
        return NextStep(Step.WAIT, "not all callers trust the next CA yet")
    if state.former and observed.published and observed.served:
        return NextStep(Step.DROP, "all replicas serve a certificate of the current CA")
    # Checked before waiting for replicas: one that never takes the new leaf would block renewal until the CA expires.
    renewing, why = authority_needs_renewal(current.certificate, current.key, now=now)
    if renewing or request.new_authority:
        return NextStep(Step.PREPARE, why if renewing else "requested")
    if state.former:
        return NextStep(Step.WAIT, "not all replicas serve a certificate of the current CA yet")
    return NextStep(Step.REST, "all certificates are valid")


def apply_step(
    step: Step, state: CertificateState, request: RotationRequest, now: datetime, observed: ObservedTrust
) -> CertificateState:
    """Return the state to be stored; WAIT and REST change nothing."""
    match step, state.current:
        case Step.BEGIN, _:
            # A next CA that survived the loss of the current one may be trusted already.
            current = state.next or new_authority(now)
            relied = relied_on(state, observed, current.certificate)
            state = replace(state, current=current, next=None, former=merge_bundles([state.former, relied]))
        case Step.REMEMBER, _:
            state = replace(state, former=merge_bundles([state.former, relied_on(state, observed, state.bundle)]))
        case Step.PREPARE, _:
            state = replace(state, next=new_authority(now))
        case Step.PROMOTE, KeyPair() as current:
            former = merge_bundles([state.former, current.certificate])
            state = replace(state, current=state.next, next=None, former=former)
        case Step.ISSUE, KeyPair() as current:
            issued = issue(current, request.names, now)
            state = replace(state, leaf=Leaf(issued.certificate, issued.key))
        case Step.DROP, _:
            state = replace(state, former=b"")
    return state


def relied_on(state: CertificateState, observed: ObservedTrust, bundle: bytes) -> bytes:
    """Return the trusted CAs that signed the stored leaf or a served one and are missing from `bundle`.

    Only CAs that callers trust already are considered. Otherwise anyone who can write the leaf's secret could make all
    API servers trust a CA of their own.
    """
    stored_and_served = (state.leaf.certificate, *observed.serving)
    leaves = [leaf for leaf in map(first_certificate, stored_and_served) if leaf is not None]
    return merge_bundles(
        [
            authority
            for authority in split_bundle(observed.trusted)
            if authority not in bundle and any(is_signed_by(leaf, authority) for leaf in leaves)
        ]
    )


def first_certificate(pem: bytes) -> x509.Certificate | None:
    """Parse the leaf of a chain; None if it is not a certificate."""
    try:
        return certificates_in(pem, "")[0]
    except CertificateError:
        return None


def merge_bundles(bundles: Sequence[bytes]) -> bytes:
    """Return every certificate once, sorted, so that equal sets are equal bytes."""
    return b"".join(sorted({certificate for bundle in bundles for certificate in split_bundle(bundle)}))


def split_bundle(bundle: bytes) -> list[bytes]:
    """Return the certificates of a bundle; none if it cannot be parsed."""
    if not bundle:
        return []
    try:
        return [certificate.public_bytes(Encoding.PEM) for certificate in certificates_in(bundle, "the bundle")]
    except CertificateError:
        return []
