"""The chart's registration template matches the code. This needs neither Helm nor Kubernetes."""

from deploy.render import REGISTRATION, render_registration_template


def test_the_registration_template_is_up_to_date() -> None:
    """Run `python -m deploy.render` if not."""
    assert REGISTRATION.read_text() == render_registration_template()
