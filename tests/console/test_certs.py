"""`quotient certs`: what is in use, asking for others, and files for running without a cluster."""

import json
import ssl
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from certs.certificate_secrets import CertificateSecrets
from certs.key_pairs import read_pair
from console.main import main
from tests.controller.test_certificate_controller import SYSTEM, World


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """A cluster in memory, to which the command connects; at the present time, by which it judges."""
    made = World()
    made.now = made.present()
    monkeypatch.setattr("console.certs.connected", lambda _: made.cluster)
    monkeypatch.setattr("console.main.configure_logs", lambda *_: None)
    return made


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["certs", *arguments], env={"COLUMNS": "200"})


def test_what_is_in_use_is_shown(world: World) -> None:
    """With who trusts it, and what is wrong while something is."""
    done = run()
    assert done.exit_code == 1
    assert "has no CA that can sign" in done.output
    world.certificate_controller.look()
    world.replica(1)
    world.settle()
    done = run("-o", "json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert [row["certificate"] for row in found["certificates"]] == ["CA", "serving"]
    assert {row["trustedBy"] for row in found["certificates"]} == {"9 of 9 webhooks"}
    assert "quotient-webhook.quotient-system.svc" in run().output


def test_a_rotation_can_be_asked_for(world: World) -> None:
    """And is then done by the controller."""
    assert run("rotate").exit_code == 2
    world.certificate_controller.look()
    world.replica(1)
    world.settle()
    before = world.kept()
    assert run("rotate").exit_code == 0
    world.settle()
    assert world.kept().current != before.current
    between = world.kept()
    assert run("rotate", "--leaf").exit_code == 0
    world.settle()
    assert world.kept().current == between.current
    assert world.kept().leaf != between.leaf
    assert CertificateSecrets(world.cluster, SYSTEM).read(world.now).requested == ""


def test_files_can_be_made(tmp_path: Path) -> None:
    """For any names; what is there is not overwritten."""
    folder = tmp_path / "tls"
    done = run("make", str(folder), "--name", "webhook.example", "--name", "127.0.0.1")
    assert done.exit_code == 0, done.output
    assert read_pair(folder).names == ("webhook.example", "127.0.0.1")
    assert (folder / "tls.key").stat().st_mode & 0o077 == 0
    ssl.create_default_context(cafile=str(folder / "ca.crt"))
    again = run("make", str(folder), "--name", "x")
    assert again.exit_code == 2
    assert "exist already" in again.output
    assert run("make", str(folder), "--name", "x", "--force").exit_code == 0
    assert run("make", str(folder)).exit_code == 2
