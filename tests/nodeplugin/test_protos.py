"""The committed gRPC code matches its .proto files."""

from pathlib import Path

import pytest

from nodeplugin.proto import generating


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with freshly generated code."""
    folder = tmp_path_factory.mktemp("generated")
    generating.generate(folder)
    return folder / "nodeplugin" / "proto"


@pytest.mark.parametrize("kind", ["_pb2.py", "_pb2.pyi", "_pb2_grpc.py"])
@pytest.mark.parametrize("name", generating.NAMES)
def test_generated_code_is_up_to_date(generated: Path, name: str, kind: str) -> None:
    """If this fails, run `python -m nodeplugin.proto.generating`."""
    assert (generating.HERE / f"{name}{kind}").read_text() == (generated / f"{name}{kind}").read_text()


def test_every_proto_file_and_all_of_its_code_is_committed(generated: Path) -> None:
    committed = {each.name for each in generating.HERE.glob("*_pb2*")}
    assert {each.name for each in generated.iterdir()} == committed
    assert {each.stem for each in generating.HERE.glob("*.proto")} == set(generating.NAMES)
