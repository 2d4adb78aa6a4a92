"""The repository: every package is shipped, checked and documented."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from settings import configuration
from settings.configuration import Configuration
from settings.loading import environment_variable, load, value_paths
from tests.cluster.supervisor import ROOT
from vcuda.decision import Code
from vcuda.names import DEFAULT_DOMAIN

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Checked like the packages, but not shipped.
NOT_SHIPPED = ("bench", "deploy", "tests")
PACKAGES = sorted(file.parent.name for file in ROOT.glob("*/__init__.py") if file.parent.name not in NOT_SHIPPED)


def test_every_package_is_configured_in_every_tool() -> None:
    """A new package that is missing in one place would not be checked, or not be shipped."""
    tools = PROJECT["tool"]
    assert sorted(tools["hatch"]["build"]["targets"]["wheel"]["packages"]) == PACKAGES
    assert sorted(tools["importlinter"]["root_packages"]) == PACKAGES
    assert sorted(tools["mypy"]["files"]) == sorted([*PACKAGES, *NOT_SHIPPED])


def test_the_wheel_contains_every_package_and_its_data(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target=wheel", f"--directory={tmp_path}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    contents = set(zipfile.ZipFile(wheel).namelist())
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*") if file.is_file()]
    assert {str(file.relative_to(ROOT)) for file in files if file.suffix != ".pyc"} <= contents
    assert not any(name.startswith("tests/") for name in contents)


def test_the_documented_configuration_is_the_default_one(tmp_path: Path) -> None:
    """In docs/ and in the docstring, with the same comments; and it names every value."""
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


def test_every_code_of_a_rejected_request_is_documented() -> None:
    text = "".join((ROOT / "docs" / name).read_text() for name in ("requests.md", "admission.md"))
    assert [code for code in Code if f"`{code}`" not in text] == []


def test_both_readmes_name_the_main_commands_and_every_package() -> None:
    for name in ("README.md", "README.zh.md"):
        text = (ROOT / name).read_text()
        for word in ("make run", "make test", "make cluster", *(f"{package}/" for package in PACKAGES)):
            assert word in text, f"{name} does not name {word}"


def test_the_modules_that_the_development_guide_names_exist() -> None:
    """Otherwise "where a change goes" leads nowhere."""
    named = set(re.findall(r"`((?:\w+/)+\w+\.\w+)`", (ROOT / "docs/development.md").read_text()))
    assert len(named) > len(PACKAGES)
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


# Names of resources, labels, annotations and objects: a domain with a name below it, or an object of Quotient's own.
NAME = re.compile(r"\b[a-z0-9.-]+\.(com|dev|io)/(?!v\d)\w|^nano-gpu/|^quotient-\w+$|" + re.escape(DEFAULT_DOMAIN))
# Not a name: the path of a mounted token. API versions such as `/v1` are excluded above.
NOT_NAMES = ("/var/run/secrets/kubernetes.io/serviceaccount",)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_is_written_in_one_module_only(package: str) -> None:
    """vcuda/names.py: a name that is written twice can be changed in one place and forgotten in the other."""
    found = [
        f"{file.relative_to(ROOT)}:{line}: {text}"
        for file in sorted((ROOT / package).rglob("*.py"))
        if file != ROOT / "vcuda/names.py" and not file.name.endswith(("_pb2.py", "_pb2_grpc.py"))
        for line, text in strings_in(ast.parse(file.read_text()))
        if NAME.search(text) and text not in NOT_NAMES
    ]
    assert found == []


def strings_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield all strings but docstrings and the texts of messages, which contain spaces."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            yield node.lineno, node.value
