"""Both ways of answering, for every test that asks for a caller."""

from functools import partial

import pytest

from tests.webhook.reviews import Caller, MakeCaller, caller


@pytest.fixture(params=["flask", "short"])
def make_caller(request: pytest.FixtureRequest) -> MakeCaller:
    """Builds callers; every test runs through the Flask application and the short path."""
    return partial(caller, request.param)


@pytest.fixture
def api(make_caller: MakeCaller) -> Caller:
    """A caller with the rules as they are by default."""
    return make_caller()
