"""What tests of commands share."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from console.main import main


@pytest.fixture
def ask(tmp_path: Path) -> Any:
    """Asks about a manifest on a cluster of these objects."""

    def run(asked: Any, *objects: dict[str, Any], options: tuple[str, ...] = (), config: Path | None = None) -> Result:
        dump, file = tmp_path / "dump.yaml", tmp_path / "asked.yaml"
        dump.write_text(yaml.safe_dump({"kind": "List", "items": list(objects)}))
        file.write_text(yaml.safe_dump_all(asked if isinstance(asked, list) else [asked]))
        command = ["what-if", str(file), "--cluster", str(dump), *options]
        return CliRunner().invoke(main, [*(["--config", str(config)] if config else []), *command])

    return run


@pytest.fixture
def configured(tmp_path: Path) -> Any:
    """Writes a configuration file with these lines."""

    def write(text: str) -> Path:
        file = tmp_path / "quotient.yaml"
        file.write_text(f"apiVersion: quotient.dev/v1\nkind: Configuration\n{text}\n")
        return file

    return write
