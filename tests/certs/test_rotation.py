"""One CA replaces another without a moment in which a caller meets a certificate that it does not trust."""

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
REQUEST = RotationRequest(NAMES)
START = datetime(2026, 1, 1, tzinfo=UTC)
DAY = timedelta(days=1)


class Rotation(RuleBasedStateMachine):
    """A controller, two API servers that trust the bundle they last read, three replicas that serve the leaf likewise.

    Each of them reads whenever hypothesis chooses; secrets are deleted and replaced in between.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = START
        self.state = CertificateState()
        self.configured = b""
        self.trusting = [b"", b""]
        self.serving = [Leaf(), Leaf(), Leaf()]
        self.request = REQUEST
        self.days_without_controller = 0.0

    @initialize()
    def start(self) -> None:
        self.run_until_done()

    def observe(self) -> ObservedTrust:
        # The real controller waits `settleS` instead of asking API servers what they trust.
        published = self.configured == self.state.bundle and all(each == self.configured for each in self.trusting)
        served = all(each == self.state.leaf for each in self.serving)
        serving = tuple(each.certificate for each in self.serving)
        return ObservedTrust(self.configured, published, served, serving)

    def step(self) -> Step:
        """Do what the controller does in one pass; it may crash after any of them."""
        following = next_step(self.state, self.request, self.now, self.observe())
        self.state = apply_step(following.step, self.state, self.request, self.now, self.observe())
        if following.step is Step.PREPARE:
            self.request = RotationRequest(NAMES, new_leaf=self.request.new_leaf)
        if following.step is Step.ISSUE:
            self.request = RotationRequest(NAMES, new_authority=self.request.new_authority)
        if following.step not in (Step.BEGIN, Step.REMEMBER):
            # Published only when every CA is stored that a caller relies on.
            after = next_step(self.state, self.request, self.now, self.observe()).step
            if after not in (Step.BEGIN, Step.REMEMBER):
                self.configured = self.state.bundle
        return following.step

    @rule(steps=st.integers(1, 4))
    def controller_runs(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    @rule(index=st.integers(0, 1))
    def api_server_reads_configuration(self, index: int) -> None:
        self.trusting[index] = self.configured

    @rule(index=st.integers(0, 2))
    def replica_reads_secret(self, index: int) -> None:
        """A replica that finds no certificate continues to serve the one it has."""
        if self.state.leaf.certificate:
            self.serving[index] = self.state.leaf

    @rule(days=st.sampled_from([0.1, 1, 5, 9]))
    def time_passes(self, days: float) -> None:
        """At most ten days without a controller: after a third of a leaf's life nothing can be guaranteed."""
        if self.days_without_controller + days < 10:
            self.now += days * DAY
            self.days_without_controller += days

    @rule()
    def new_authority_is_requested(self) -> None:
        self.request = RotationRequest(NAMES, new_authority=True, new_leaf=self.request.new_leaf)

    @rule()
    def new_leaf_is_requested(self) -> None:
        self.request = RotationRequest(NAMES, new_authority=self.request.new_authority, new_leaf=True)

    @rule()
    @precondition(lambda self: self.observe().served)
    def ca_secret_is_deleted(self) -> None:
        self.state = CertificateState(leaf=self.state.leaf)

    @rule()
    def both_secrets_are_deleted(self) -> None:
        self.state = CertificateState()

    @rule()
    @precondition(lambda self: self.observe().served)
    def ca_secret_is_replaced(self) -> None:
        self.state = CertificateState(new_authority(self.now), leaf=self.state.leaf)

    @rule()
    def run_until_done(self) -> None:
        """All processes run and read until there is nothing left to do, as nearly always in a cluster."""
        for _ in range(20):
            step = self.step()
            self.trusting = [self.configured] * 2
            for index in range(3):
                self.replica_reads_secret(index)
            if step is Step.REST:
                break
        assert next_step(self.state, self.request, self.now, self.observe()).step is Step.REST
        assert self.state.next is None
        assert self.state.former == b""
        self.days_without_controller = 0.0

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


def all_in_sync(state: CertificateState) -> ObservedTrust:
    """Observe callers that trust the stored bundle and replicas that serve the stored leaf."""
    return ObservedTrust(state.bundle, published=True, served=True, serving=(state.leaf.certificate,))


def run_to_rest(
    state: CertificateState, now: datetime = START, *, trusted: bytes = b""
) -> tuple[CertificateState, list[Step]]:
    """Take steps until there is nothing to do, with callers and replicas that follow at once."""
    steps: list[Step] = []
    for _ in range(20):
        observed = ObservedTrust(trusted or state.bundle, published=True, served=True)
        following = next_step(state, REQUEST, now, observed)
        steps.append(following.step)
        if following.step in (Step.WAIT, Step.REST):
            return state, steps
        state = apply_step(following.step, state, REQUEST, now, observed)
        trusted = b""
    raise AssertionError(f"no end after {steps}")


def test_steps_come_in_the_safe_order() -> None:
    """From nothing, and when the CA is due for renewal."""
    state, steps = run_to_rest(CertificateState())
    assert steps == [Step.BEGIN, Step.ISSUE, Step.REST]
    later = START + 244 * DAY
    renewed, steps = run_to_rest(state, later)
    assert steps == [Step.ISSUE, Step.PREPARE, Step.PROMOTE, Step.ISSUE, Step.DROP, Step.REST]
    assert state.current is not None
    assert state.current.certificate not in renewed.bundle


def test_steps_are_values_of_a_metric_label() -> None:
    """Dashboards and alerts select by them."""
    assert [*Step] == ["begin", "remember", "prepare", "promote", "issue", "drop", "wait", "rest"]


def test_no_certificate_is_issued_before_callers_trust_its_ca() -> None:
    state, _ = run_to_rest(CertificateState())
    prepared = apply_step(Step.PREPARE, state, REQUEST, START, all_in_sync(state))
    following = next_step(prepared, REQUEST, START, ObservedTrust(state.bundle, published=False, served=True))
    assert (following.step, following.why) == (Step.WAIT, "not all callers trust the next CA yet")
    promoted = apply_step(Step.PROMOTE, prepared, REQUEST, START, all_in_sync(prepared))
    assert promoted.bundle == prepared.bundle, "which CA signs must not change what is published"
    issued = apply_step(Step.ISSUE, promoted, REQUEST, START, all_in_sync(prepared))
    following = next_step(issued, REQUEST, START, ObservedTrust(issued.bundle, published=True, served=False))
    assert (following.step, following.why) == (
        Step.WAIT,
        "not all replicas serve a certificate of the current CA yet",
    )


def test_a_missing_or_damaged_leaf_is_replaced_at_once() -> None:
    """Calls fail already, so there is nothing to wait for."""
    state, _ = run_to_rest(CertificateState())
    for leaf in (Leaf(), Leaf(state.leaf.certificate[:300], state.leaf.key), Leaf(state.leaf.certificate, b"x")):
        damaged = CertificateState(state.current, leaf=leaf)
        observed = ObservedTrust(b"", published=False, served=False)
        assert next_step(damaged, REQUEST, START, observed).step is Step.ISSUE


def test_only_a_ca_that_callers_trust_already_is_remembered() -> None:
    """Write access to the leaf's secret must not be enough to make callers trust another CA."""
    state, _ = run_to_rest(CertificateState())
    foreign, _ = run_to_rest(CertificateState())
    swapped = CertificateState(state.current, leaf=foreign.leaf)
    after, steps = run_to_rest(swapped, trusted=state.bundle)
    assert steps == [Step.ISSUE, Step.REST]
    assert after.bundle == state.bundle
    assert state.current is not None
    assert not needs_renewal(
        after.leaf.certificate, after.leaf.key, now=START, names=NAMES, authority=state.current.certificate
    )[0]


def test_a_replica_that_keeps_serving_an_old_leaf_does_not_block_renewal() -> None:
    """It may never change, and the current CA would expire."""
    state, _ = run_to_rest(CertificateState())
    prepared = apply_step(Step.PREPARE, state, REQUEST, START, all_in_sync(state))
    promoted = apply_step(Step.PROMOTE, prepared, REQUEST, START, all_in_sync(state))
    later = START + 250 * DAY
    observed = ObservedTrust(promoted.bundle, published=True, served=False, serving=(state.leaf.certificate,))
    issued = apply_step(Step.ISSUE, promoted, REQUEST, later, observed)
    assert next_step(issued, REQUEST, later, observed).step is Step.PREPARE


def test_an_expired_or_damaged_ca_is_not_usable() -> None:
    old = new_authority(START - 400 * DAY)
    assert usable_authority(old.certificate, old.key, START) is None
    assert usable_authority(b"half", b"", START) is None
