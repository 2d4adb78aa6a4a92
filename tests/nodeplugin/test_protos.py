"""The code of the .proto files is what the generator makes of them."""

from pathlib import Path

import pytest

from nodeplugin.proto import generating


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the code as it is generated now."""
    folder = tmp_path_factory.mktemp("generated")
    generating.generate(folder)
    return folder / "nodeplugin" / "proto"


@pytest.mark.parametrize("kind", ["_pb2.py", "_pb2.pyi", "_pb2_grpc.py"])
@pytest.mark.parametrize("name", generating.NAMES)
def test_generated_code_is_up_to_date(generated: Path, name: str, kind: str) -> None:
    """Whoever changes a .proto file generates its code anew."""
    assert (generating.HERE / f"{name}{kind}").read_text() == (generated / f"{name}{kind}").read_text()


def test_nothing_is_generated_that_is_not_kept(generated: Path) -> None:
    """Nor is a .proto file forgotten."""
    kept = {each.name for each in generating.HERE.glob("*_pb2*")}
    assert {each.name for each in generated.iterdir()} == kept
    assert {each.stem for each in generating.HERE.glob("*.proto")} == set(generating.NAMES)
