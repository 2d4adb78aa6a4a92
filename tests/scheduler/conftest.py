"""The scheduler on an in-memory cluster."""

from collections.abc import Iterator

import pytest

from tests.scheduler.world import World


@pytest.fixture
def world() -> Iterator[World]:
    """A scheduler that is always active, in a cluster without nodes."""
    made = World().start()
    yield made
    made.stop()
