"""One CA follows another without a moment in which a caller meets what it does not trust, whatever happens."""

from datetime import UTC, datetime, timedelta

from cryptography import x509
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from certs.authority import new_authority
from certs.renewal import is_signed_by, needs_renewal
from certs.rotation import (
    CertificateState,
    Leaf,
    ObservedTrust,
    RotationRequest,
    Step,
    apply_step,
    next_step,
    usable_authority,
)

NAMES = ("webhook.example",)
START = datetime(2026, 1, 1, tzinfo=UTC)
DAY = timedelta(days=1)
RESTING = (Step.WAIT, Step.REST)


class Rotation(RuleBasedStateMachine):
    """Two API servers that trust what they last heard, three replicas that serve what they last read, a keeper."""

    def __init__(self) -> None:
        super().__init__()
        self.now = START
        self.kept = CertificateState()
        self.configured = b""
        self.trusting = [b"", b""]
        self.serving = [Leaf(), Leaf(), Leaf()]
        self.wanted = RotationRequest(NAMES)
        self.away = 0.0

    @initialize()
    def begin(self) -> None:
        self.calm_down()

    def outside(self) -> ObservedTrust:
        # An API server may be behind; that is what the time between seeing and believing is for.
        published = self.configured == self.kept.bundle and all(each == self.configured for each in self.trusting)
        served = all(each == self.kept.leaf for each in self.serving)
        serving = tuple(each.certificate for each in self.serving)
        return ObservedTrust(self.configured, published, served, serving)

    def step(self) -> Step:
        """Do what the keeper does in one go: it may crash after any."""
        found = next_step(self.kept, self.wanted, self.now, self.outside())
        self.kept = apply_step(found.step, self.kept, self.wanted, self.now, self.outside())
        if found.step is Step.PREPARE:
            self.wanted = RotationRequest(NAMES, new_leaf=self.wanted.new_leaf)
        if found.step is Step.ISSUE:
            self.wanted = RotationRequest(NAMES, new_authority=self.wanted.new_authority)
        if found.step not in (Step.BEGIN, Step.REMEMBER):
            # Published only when everything is remembered that somebody relies on.
            remembers = next_step(self.kept, self.wanted, self.now, self.outside()).step
            if remembers not in (Step.BEGIN, Step.REMEMBER):
                self.configured = self.kept.bundle
        return found.step

    @rule(steps=st.integers(1, 4))
    def keeper_works(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    @rule(index=st.integers(0, 1))
    def api_server_hears(self, index: int) -> None:
        self.trusting[index] = self.configured

    @rule(index=st.integers(0, 2))
    def replica_reads(self, index: int) -> None:
        """One that finds nothing serves on what it has."""
        if self.kept.leaf.certificate:
            self.serving[index] = self.kept.leaf

    @rule(days=st.sampled_from([0.1, 1, 5, 9]))
    def time_passes(self, days: float) -> None:
        """Somewhat at a time: a keeper that is away for longer than a third of a life cannot keep anything."""
        if self.away + days < 10:
            self.now += days * DAY
            self.away += days

    @rule()
    def somebody_wants_a_new_authority(self) -> None:
        self.wanted = RotationRequest(NAMES, new_authority=True, new_leaf=self.wanted.new_leaf)

    @rule()
    def somebody_wants_a_new_leaf(self) -> None:
        self.wanted = RotationRequest(NAMES, new_authority=self.wanted.new_authority, new_leaf=True)

    @rule()
    @precondition(lambda self: self.outside().served)
    def the_authority_is_lost(self) -> None:
        """Somebody deletes the secret."""
        self.kept = CertificateState(leaf=self.kept.leaf)

    @rule()
    def everything_is_lost(self) -> None:
        """Somebody deletes both secrets, while replicas serve what they have."""
        self.kept = CertificateState()

    @rule()
    @precondition(lambda self: self.outside().served)
    def the_authority_is_swapped(self) -> None:
        """Somebody writes another one."""
        self.kept = CertificateState(new_authority(self.now), leaf=self.kept.leaf)

    @rule()
    def calm_down(self) -> None:
        """Everybody goes on until there is nothing left to do, as it is nearly always."""
        for _ in range(20):
            step = self.step()
            self.trusting = [self.configured] * 2
            for index in range(3):
                self.replica_reads(index)
            if step is Step.REST:
                break
        assert next_step(self.kept, self.wanted, self.now, self.outside()).step is Step.REST
        assert self.kept.following is None
        assert self.kept.former == b""
        self.away = 0.0

    @invariant()
    def every_caller_trusts_every_replica(self) -> None:
        for leaf in self.serving:
            if not leaf.certificate:
                continue
            certificate = x509.load_pem_x509_certificate(leaf.certificate)
            assert certificate.not_valid_before_utc <= self.now < certificate.not_valid_after_utc
            for trusted in self.trusting:
                assert is_signed_by(certificate, trusted)


Rotation.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRotation = Rotation.TestCase


def seen(kept: CertificateState) -> ObservedTrust:
    """See everything as it should be."""
    return ObservedTrust(kept.bundle, published=True, served=True, serving=(kept.leaf.certificate,))


def settled(
    kept: CertificateState, now: datetime = START, *, trusted: bytes = b""
) -> tuple[CertificateState, list[Step]]:
    """Let a keeper go on, with callers and replicas that follow at once."""
    steps: list[Step] = []
    for _ in range(20):
        outside = ObservedTrust(trusted or kept.bundle, published=True, served=True)
        found = next_step(kept, RotationRequest(NAMES), now, outside)
        steps.append(found.step)
        if found.step in RESTING:
            return kept, steps
        kept = apply_step(found.step, kept, RotationRequest(NAMES), now, outside)
        trusted = b""
    raise AssertionError(f"it never rests: {steps}")


def test_the_order() -> None:
    """From nothing, and when the CA's time has come."""
    kept, steps = settled(CertificateState())
    assert steps == [Step.BEGIN, Step.ISSUE, Step.REST]
    later = START + 244 * DAY
    renewed, steps = settled(kept, later)
    assert steps == [Step.ISSUE, Step.PREPARE, Step.PROMOTE, Step.ISSUE, Step.DROP, Step.REST]
    assert kept.current is not None
    assert kept.current.certificate not in renewed.bundle


def test_nothing_new_is_issued_before_callers_trust_it() -> None:
    """It waits, and says for what."""
    kept, _ = settled(CertificateState())
    prepared = apply_step(Step.PREPARE, kept, RotationRequest(NAMES), START, seen(kept))
    found = next_step(prepared, RotationRequest(NAMES), START, ObservedTrust(kept.bundle, published=False, served=True))
    assert (found.step, found.why) == (Step.WAIT, "not all callers trust the CA that follows yet")
    promoted = apply_step(Step.PROMOTE, prepared, RotationRequest(NAMES), START, seen(prepared))
    assert promoted.bundle == prepared.bundle, "who signs must not change what is published"
    issued = apply_step(Step.ISSUE, promoted, RotationRequest(NAMES), START, seen(prepared))
    found = next_step(issued, RotationRequest(NAMES), START, ObservedTrust(issued.bundle, published=True, served=False))
    assert (found.step, found.why) == (Step.WAIT, "not all replicas serve a certificate of the present CA yet")


def test_what_is_broken_is_replaced_at_once() -> None:
    """Nobody could rely on it anyway, so nothing is waited for."""
    kept, _ = settled(CertificateState())
    for leaf in (Leaf(), Leaf(kept.leaf.certificate[:300], kept.leaf.key), Leaf(kept.leaf.certificate, b"x")):
        broken = CertificateState(kept.current, leaf=leaf)
        assert (
            next_step(broken, RotationRequest(NAMES), START, ObservedTrust(b"", published=False, served=False)).step
            is Step.ISSUE
        )


def test_only_what_callers_trust_is_remembered() -> None:
    """Who can write the serving secret must not be able to make callers trust a CA of his."""
    kept, _ = settled(CertificateState())
    foreign, _ = settled(CertificateState())
    swapped = CertificateState(kept.current, leaf=foreign.leaf)
    after, steps = settled(swapped, trusted=kept.bundle)
    assert steps == [Step.ISSUE, Step.REST]
    assert after.bundle == kept.bundle
    assert kept.current is not None
    assert not needs_renewal(
        after.leaf.certificate, after.leaf.key, now=START, names=NAMES, authority=kept.current.certificate
    )[0]


def test_a_replica_that_hangs_on_to_the_past_does_not_stop_renewal() -> None:
    """It may do so for ever; the CA must not end meanwhile."""
    kept, _ = settled(CertificateState())
    stuck = apply_step(
        Step.PROMOTE,
        apply_step(Step.PREPARE, kept, RotationRequest(NAMES), START, seen(kept)),
        RotationRequest(NAMES),
        START,
        seen(kept),
    )
    later = START + 250 * DAY
    outside = ObservedTrust(stuck.bundle, published=True, served=False, serving=(kept.leaf.certificate,))
    issued = apply_step(Step.ISSUE, stuck, RotationRequest(NAMES), later, outside)
    assert next_step(issued, RotationRequest(NAMES), later, outside).step is Step.PREPARE


def test_an_expired_authority_signs_nothing() -> None:
    """It counts as none."""
    old = new_authority(START - 400 * DAY)
    assert usable_authority(old.certificate, old.key, START) is None
    assert usable_authority(b"half", b"", START) is None
