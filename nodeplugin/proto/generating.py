"""Writes the Python code of the .proto files beside it: `python -m nodeplugin.proto.generating`."""

from pathlib import Path

HERE = Path(__file__).parent
NAMES = ("deviceplugin_v1beta1", "podresources_v1")


def generate(target: Path) -> None:
    """Write the code below a folder, as it lies below this checkout."""
    from grpc_tools import protoc  # noqa: PLC0415 - needed by those who change the files alone

    for name in NAMES:
        kinds = [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
        wrong = protoc.main(["protoc", f"-I{HERE.parents[1]}", *kinds, f"nodeplugin/proto/{name}.proto"])
        if wrong:
            raise SystemExit(f"protoc failed for {name}.proto")


if __name__ == "__main__":
    generate(HERE.parents[1])
