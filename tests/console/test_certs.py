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
    monkeypatch.setattr("console.certs.connect_cluster", lambda _: made.cluster)
    monkeypatch.setattr("console.main.configure_logs", lambda *_: None)
    return made


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["certs", *arguments], env={"COLUMNS": "200"})


def test_certificates_in_use_are_shown(world: World) -> None:
    """With the webhooks that trust them, and problems until they are solved."""
    done = run()
    assert done.exit_code == 1
    assert "has no usable CA" in done.output
    world.certificate_controller.reconcile()
    world.replica(1)
    world.settle()
    done = run("-o", "json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert [row["certificate"] for row in found["certificates"]] == ["CA", "serving"]
    assert {row["trustedBy"] for row in found["certificates"]} == {"9 of 9 webhooks"}
    assert "quotient-webhook.quotient-system.svc" in run().output


def test_a_rotation_can_be_requested(world: World) -> None:
    assert run("rotate").exit_code == 2
    world.certificate_controller.reconcile()
    world.replica(1)
    world.settle()
    before = world.certificates()
    assert run("rotate").exit_code == 0
    world.settle()
    assert world.certificates().current != before.current
    between = world.certificates()
    assert run("rotate", "--leaf").exit_code == 0
    world.settle()
    assert world.certificates().current == between.current
    assert world.certificates().leaf != between.leaf
    assert CertificateSecrets(world.cluster, SYSTEM).read(world.now).requested == ""


def test_certificate_files_can_be_written(tmp_path: Path) -> None:
    """For any names; existing files are not overwritten."""
    folder = tmp_path / "tls"
    done = run("make", str(folder), "--name", "webhook.example", "--name", "127.0.0.1")
    assert done.exit_code == 0, done.output
    assert read_pair(folder).names == ("webhook.example", "127.0.0.1")
    assert (folder / "tls.key").stat().st_mode & 0o077 == 0
    ssl.create_default_context(cafile=str(folder / "ca.crt"))
    again = run("make", str(folder), "--name", "x")
    assert again.exit_code == 2
    assert "tls.key exist" in again.output
    assert run("make", str(folder), "--name", "x", "--force").exit_code == 0
    assert run("make", str(folder)).exit_code == 2
