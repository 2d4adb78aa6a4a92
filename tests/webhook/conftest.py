"""Fixtures that run a test through both HTTP paths."""

from functools import partial

import pytest

from tests.webhook.reviews import Caller, MakeCaller, caller


@pytest.fixture(params=["flask", "short"])
def make_caller(request: pytest.FixtureRequest) -> MakeCaller:
    """Builds callers. Every test that uses it runs twice: through Flask and through the short path."""
    return partial(caller, request.param)


@pytest.fixture
def api(make_caller: MakeCaller) -> Caller:
    """A caller with the default configuration."""
    return make_caller()
