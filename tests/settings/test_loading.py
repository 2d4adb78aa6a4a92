"""The configuration: strict, and every mistake is named with its place, its value and a remedy."""

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from settings.configuration import Configuration
from settings.loading import ConfigurationError, leaves, load, variable_of
from vcuda.strict_yaml import DocumentError, parse_documents

HEAD = "apiVersion: quotient.dev/v1\nkind: Configuration\n"


def write(folder: Path, text: str) -> Path:
    file = folder / "quotient.yaml"
    file.write_text(text)
    return file


def test_without_anything_the_defaults_hold() -> None:
    """No file is needed to begin."""
    loaded = load(None, {})
    assert loaded.configuration == Configuration()
    assert loaded.sources == {}
    assert (loaded.configuration.domain, loaded.configuration.memory_unit_mib) == ("inspur.com", 256)


def test_flags_go_over_environment_and_environment_over_the_file(tmp_path: Path) -> None:
    """And each value knows where it came from."""
    file = write(tmp_path, HEAD + "domain: a.example.org\nmemoryUnitMiB: 1\nlog: {level: error, format: json}\n")
    environment = {"QUOTIENT_MEMORY_UNIT_MIB": "2", "QUOTIENT_LOG_LEVEL": "warning", "HOME": "/"}
    loaded = load(file, environment, ["log.level=debug", "vocabularies.hami=true"])
    configuration = loaded.configuration
    assert (configuration.domain, configuration.memory_unit_mib) == ("a.example.org", 2)
    assert (configuration.log.level, configuration.log.format) == ("debug", "json")
    assert configuration.vocabularies.hami is True
    assert loaded.sources == {
        "apiVersion": str(file),
        "kind": str(file),
        "domain": str(file),
        "memoryUnitMiB": "QUOTIENT_MEMORY_UNIT_MIB",
        "log.level": "--set log.level",
        "log.format": str(file),
        "vocabularies.hami": "--set vocabularies.hami",
    }


WRONG_FILES = {
    "somebody else's namespace": (HEAD + "systemNamespace: kube-system\n", "others work there"),
    "an unknown field": (HEAD + "domane: x.org\n", "domane: 'x.org': there is no such field; did you mean domain?"),
    "an unknown field deep down": (
        HEAD + "log: {levvel: info}\n",
        "log.levvel: 'info': there is no such field; did you mean log.level?",
    ),
    "a wrong type": (HEAD + "memoryUnitMiB: many\n", "memoryUnitMiB: 'many': Expected `int`, got `str`"),
    "a number that is not whole": (HEAD + "memoryUnitMiB: 1.5\n", "memoryUnitMiB: 1.5: Expected `int`, got `float`"),
    "a text where a section should be": (HEAD + "log: loud\n", "log: 'loud': Expected `object`, got `str`"),
    "a word that is not among the choices": (
        HEAD + "log: {level: loud}\n",
        "log.level: 'loud': write one of debug, error, info, warning",
    ),
    "a value out of bounds": (HEAD + "memoryUnitMiB: 0\n", "memoryUnitMiB: 0: Expected `int` >= 1"),
    "a value out of bounds deep down": (
        HEAD + "vocabularies: {vgpuPerGpu: 0}\n",
        "vocabularies.vgpuPerGpu: 0: Expected `int` >= 1",
    ),
    "a reserved domain": (
        HEAD + "domain: kubernetes.io\n",
        "domain: 'kubernetes.io': 'kubernetes.io' is reserved by Kubernetes",
    ),
    "another version": (
        "apiVersion: quotient.dev/v9\nkind: Configuration\n",
        "apiVersion: 'quotient.dev/v9' is not known here; write apiVersion: quotient.dev/v1",
    ),
    "no version": ("domain: inspur.com\n", "apiVersion: None is not known here; write apiVersion: quotient.dev/v1"),
    "a key twice": (HEAD + "domain: a.org\ndomain: b.org\n", "line 4: duplicate key 'domain'; remove one"),
    "a key that is not a string": (HEAD + "1: x\n", "line 3: the key 1 is not a string; write it in quotes"),
    "two documents": (HEAD + "---\n" + HEAD, "holds 2 documents"),
    "nothing": ("", "holds 0 documents"),
    "a list": ("- a\n", "holds 1 documents"),
    "broken YAML": (HEAD + "log: {level: info\n", "line 4, column 1: invalid YAML"),
    "a tag that would run code": (HEAD + "domain: !!python/object/apply:os.system [true]\n", "invalid YAML"),
}


@pytest.mark.parametrize(("text", "message"), WRONG_FILES.values(), ids=WRONG_FILES.keys())
def test_a_wrong_file_fails_the_start_and_says_why(tmp_path: Path, text: str, message: str) -> None:
    """The message names the file and the place in it."""
    file = write(tmp_path, text)
    with pytest.raises(ConfigurationError) as wrong:
        load(file, {})
    assert str(wrong.value).startswith(f"{file}: ")
    assert message in str(wrong.value)


def test_a_wrong_variable_or_flag_is_named_as_such(tmp_path: Path) -> None:
    """Not as a mistake in the file."""
    file = write(tmp_path, HEAD + "log: {level: info}\n")
    with pytest.raises(ConfigurationError, match=r"^QUOTIENT_LOG_LEVEL: log.level: 'loud'"):
        load(file, {"QUOTIENT_LOG_LEVEL": "loud"})
    with pytest.raises(ConfigurationError, match=r"^QUOTIENT_MEMORY_UNIT_MIB: memoryUnitMiB: 0: "):
        load(file, {"QUOTIENT_MEMORY_UNIT_MIB": "0"})
    with pytest.raises(ConfigurationError, match=r"^QUOTIENT_DOMAIN: domain: 'k8s.io': "):
        load(None, {"QUOTIENT_DOMAIN": "k8s.io"})
    with pytest.raises(ConfigurationError, match=r"^--set log.level: log.level: 'loud'"):
        load(file, {}, ["log.level=loud"])
    with pytest.raises(ConfigurationError, match=r"--set nonsense: write PATH=VALUE"):
        load(file, {}, ["nonsense"])
    with pytest.raises(ConfigurationError, match=r"--set no.such=1: write PATH=VALUE"):
        load(file, {}, ["no.such=1"])


def test_text_is_taken_as_it_is() -> None:
    """A context may be called 123, and a path may hold a number sign."""
    loaded = load(None, {"QUOTIENT_CLUSTER_KUBECONFIG": "/home/a #b/config"}, ["cluster.context=123"])
    assert (loaded.configuration.cluster.kubeconfig, loaded.configuration.cluster.context) == (
        "/home/a #b/config",
        "123",
    )


def test_merged_mappings_may_be_overridden() -> None:
    """A YAML merge key is no duplicate."""
    assert parse_documents("a: &a {x: 1, y: 1}\nb:\n  <<: *a\n  y: 2\n") == [
        {"a": {"x": 1, "y": 1}, "b": {"x": 1, "y": 2}}
    ]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A start without the file it was told to read is a mistake, not a default."""
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load(tmp_path / "none.yaml", {})


def test_variables_that_kubernetes_injects_are_none_of_ours() -> None:
    """A Service named quotient-webhook gives every pod such variables."""
    assert (
        load(None, {"QUOTIENT_WEBHOOK_SERVICE_HOST": "10.0.0.1", "QUOTIENT_CACHE": "/x"}).configuration
        == Configuration()
    )


def test_every_value_has_a_variable_of_its_own() -> None:
    """Named after its path."""
    variables = [variable_of(path) for path in leaves(Configuration)]
    assert len(set(variables)) == len(variables)
    assert variable_of("vocabularies.vgpuPerGpu") == "QUOTIENT_VOCABULARIES_VGPU_PER_GPU"
    assert variable_of("memoryUnitMiB") == "QUOTIENT_MEMORY_UNIT_MIB"


@given(st.text(max_size=200))
def test_any_text_is_read_as_documents_or_refused(text: str) -> None:
    """Nothing but a DocumentError comes out of a parser that reads what tenants write."""
    with suppress(DocumentError):
        parse_documents(text)
