"""The tree itself: every room is shipped, checked and documented."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from settings import configuration
from settings.configuration import Configuration
from settings.loading import value_paths, load, environment_variable
from tests.cluster.supervisor import ROOT
from vcuda.decision import Code
from vcuda.names import DEFAULT_DOMAIN

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# What stands beside the rooms, and is checked but not shipped.
YARD = ("bench", "deploy", "tests")
ROOMS = sorted(file.parent.name for file in ROOT.glob("*/__init__.py") if file.parent.name not in YARD)


def test_every_room_is_checked_by_every_tool() -> None:
    """A new room that is forgotten in one place would go unchecked or unshipped."""
    tools = PROJECT["tool"]
    assert sorted(tools["hatch"]["build"]["targets"]["wheel"]["packages"]) == ROOMS
    assert sorted(tools["importlinter"]["root_packages"]) == ROOMS
    assert sorted(tools["mypy"]["files"]) == sorted([*ROOMS, *YARD])


def test_the_wheel_holds_every_room_and_its_data(tmp_path: Path) -> None:
    """Nothing that the checkout has is missing where Quotient is installed."""
    command = [sys.executable, "-m", "hatchling", "build", "--target=wheel", f"--directory={tmp_path}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    files = [file for room in ROOMS for file in (ROOT / room).rglob("*") if file.is_file() and file.suffix != ".pyc"]
    assert {str(file.relative_to(ROOT)) for file in files} <= held
    assert not any(name.startswith("tests/") for name in held)


def test_the_documented_configuration_is_the_default_one(tmp_path: Path) -> None:
    """In docs/ and where it is defined, to the letter; and every value is in it."""
    text = (ROOT / "docs/configuration.md").read_text()
    block = re.search(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert block is not None
    assert block[1] in (configuration.__doc__ or "")
    file = tmp_path / "quotient.yaml"
    file.write_text(block[1])
    loaded = load(file, {})
    assert loaded.configuration == Configuration()
    assert set(value_paths(Configuration)) <= set(loaded.sources)
    assert environment_variable("vocabularies.vgpuPerGpu") in text


def test_every_code_of_a_pods_request_is_documented() -> None:
    """With what it means."""
    text = "".join((ROOT / "docs" / name).read_text() for name in ("requests.md", "admission.md"))
    assert [code for code in Code if f"`{code}`" not in text] == []


def test_both_readmes_name_the_two_commands_and_every_room() -> None:
    """A newcomer finds the way in either language."""
    for name in ("README.md", "README.zh.md"):
        text = (ROOT / name).read_text()
        for word in ("make run", "make test", "make cluster", *(f"{room}/" for room in ROOMS)):
            assert word in text, f"{name} does not name {word}"


@pytest.mark.parametrize("file", sorted(ROOT.glob("vcuda/*.py")), ids=lambda file: file.name)
def test_domain_names_stand_in_one_module_only(file: Path) -> None:
    """Another domain must be a matter of configuration."""
    if file.name != "names.py":
        assert DEFAULT_DOMAIN not in file.read_text()
