"""The configuration: decoded strictly, and every mistake is reported with its source, path, value and remedy."""

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from settings.configuration import Configuration
from settings.loading import ConfigurationError, environment_variable, load, value_paths
from vcuda.strict_yaml import DocumentError, parse_documents

HEAD = "apiVersion: quotient.dev/v1\nkind: Configuration\n"


def write(folder: Path, text: str) -> Path:
    file = folder / "quotient.yaml"
    file.write_text(text)
    return file


def test_without_file_variables_and_flags_the_defaults_apply() -> None:
    loaded = load(None, {})
    assert loaded.configuration == Configuration()
    assert loaded.sources == {}
    assert (loaded.configuration.domain, loaded.configuration.memory_unit_mib) == ("inspur.com", 256)


def test_flags_override_variables_and_variables_override_the_file(tmp_path: Path) -> None:
    """And the source of each value is recorded."""
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


INVALID_FILES = {
    "a namespace that others use": (
        HEAD + "systemNamespace: kube-system\n",
        "systemNamespace: 'kube-system': is shared with other workloads; use a namespace for Quotient alone",
    ),
    "a namespace that cannot exist": (
        HEAD + "systemNamespace: Quotient\n",
        "systemNamespace: 'Quotient': must be a namespace's name",
    ),
    "a relative path": (HEAD + "nodePlugin: {cdi: run/cdi}\n", "nodePlugin.cdi: 'run/cdi': must be an absolute path"),
    "an unknown field": (HEAD + "domane: x.org\n", "domane: 'x.org': is not a known field; did you mean domain?"),
    "an unknown field of a section": (
        HEAD + "log: {levvel: info}\n",
        "log.levvel: 'info': is not a known field; did you mean log.level?",
    ),
    "a field unlike all others": (HEAD + "zzz: 1\n", "zzz: 1: is not a known field; see quotient config"),
    "text for a number": (HEAD + "memoryUnitMiB: many\n", "memoryUnitMiB: 'many': must be a whole number, not text"),
    "a fraction for a whole number": (
        HEAD + "memoryUnitMiB: 1.5\n",
        "memoryUnitMiB: 1.5: must be a whole number, not a fraction",
    ),
    "nothing for a number": (HEAD + "memoryUnitMiB:\n", "memoryUnitMiB: null: must be a whole number, not null"),
    "a number for a switch": (
        HEAD + "vocabularies: {hami: 1}\n",
        "vocabularies.hami: 1: must be true or false, not a number",
    ),
    "text for a section": (HEAD + "log: loud\n", "log: 'loud': must be an object, not text"),
    "a section for a number": (
        HEAD + "memoryUnitMiB: {a: b}\n",
        "memoryUnitMiB: must be a whole number, not an object",
    ),
    "text for a list": (HEAD + "webhook: {binders: me}\n", "webhook.binders: 'me': must be a list, not text"),
    "an unknown word": (
        HEAD + "log: {level: loud}\n",
        "log.level: 'loud': must be one of debug, error, info, warning",
    ),
    "an unknown mode": (HEAD + "mode: off-ish\n", "mode: 'off-ish': must be one of audit, enforce"),
    "an unknown field of a list's entry": (
        HEAD + "webhook: {tolerations: [{key: a}, {kee: b}]}\n",
        "webhook.tolerations[1].kee: is not a known field",
    ),
    "a value below its minimum": (HEAD + "memoryUnitMiB: 0\n", "memoryUnitMiB: 0: must be at least 1"),
    "a value below its minimum in a section": (
        HEAD + "vocabularies: {vgpuPerGpu: 0}\n",
        "vocabularies.vgpuPerGpu: 0: must be at least 1",
    ),
    "a value that has to be positive": (
        HEAD + "webhook: {keepAliveS: 0}\n",
        "webhook.keepAliveS: 0: must be greater than 0",
    ),
    "a number of thousands of digits": (
        HEAD + f"memoryUnitMiB: {'9' * 5000}\n",
        "line 3: the number has 5000 characters; the maximum is 1000",
    ),
    "a hexadecimal number of thousands of digits": (
        HEAD + f"memoryUnitMiB: 0x{'f' * 5000}\n",
        "line 3: the number has 5002 characters; the maximum is 1000",
    ),
    "a reserved domain": (
        HEAD + "domain: kubernetes.io\n",
        "domain: 'kubernetes.io': is reserved by Kubernetes",
    ),
    "client names without a CA": (
        HEAD + "webhook: {clientNames: [kube-apiserver]}\n",
        "quotient.yaml: webhook.clientNames: needs webhook.clientCa",
    ),
    "addresses that are no network": (
        HEAD + "webhook: {apiServerCidrs: [10.0.0.0/28, 10.0.0.0/33]}\n",
        "webhook.apiServerCidrs[1]: must be addresses in CIDR notation, such as 10.0.0.0/28",
    ),
    "a maximum below the initial value": (
        HEAD + "scheduler: {initialBackoffS: 5, maxBackoffS: 2}\n",
        "scheduler.maxBackoffS: 2: must be at least initialBackoffS, 5",
    ),
    "an invalid default quota": (
        HEAD + "defaultQuota: 'types: {A100: {core: 1}}'\n",
        "defaultQuota: 'types: {A100: {core: 1}}': types.A100.core: unknown field",
    ),
    "another version": (
        "apiVersion: quotient.dev/v9\nkind: Configuration\n",
        "apiVersion: 'quotient.dev/v9': is not supported; write apiVersion: quotient.dev/v1",
    ),
    "no version": (
        "domain: inspur.com\n",
        "apiVersion: is required, but missing; write apiVersion: quotient.dev/v1",
    ),
    "a key twice": (HEAD + "domain: a.org\ndomain: b.org\n", "line 4: duplicate key 'domain'"),
    "a key that is a number": (HEAD + "1: x\n", "line 3: the key 1 is not a string"),
    "two documents": (HEAD + "---\n" + HEAD, "has 2 YAML documents; write one"),
    "an empty file": ("", "has 0 YAML documents; write one"),
    "a list": ("- a\n", "must be a mapping with apiVersion: quotient.dev/v1 and kind: Configuration"),
    "invalid YAML": (HEAD + "log: {level: info\n", "line 4, column 1: invalid YAML"),
    "a tag that would run code": (
        HEAD + "domain: !!python/object/apply:os.system [true]\n",
        "the tag '!!python/object/apply:os.system' is not supported; remove it",
    ),
}


@pytest.mark.parametrize(("text", "message"), INVALID_FILES.values(), ids=INVALID_FILES.keys())
def test_an_invalid_file_is_rejected_with_the_place_and_the_reason(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigurationError) as rejected:
        load(file, {})
    assert str(rejected.value).startswith(f"{file}: ")
    assert message in str(rejected.value)
    for foreign in ("Expected", "`", "sys."):
        assert foreign not in str(rejected.value)


INVALID_VARIABLES = {
    "QUOTIENT_LOG_LEVEL": ("loud", "QUOTIENT_LOG_LEVEL: log.level: 'loud': must be one of "),
    "QUOTIENT_MEMORY_UNIT_MIB": ("0", "QUOTIENT_MEMORY_UNIT_MIB: memoryUnitMiB: 0: must be at least 1"),
    "QUOTIENT_DOMAIN": ("k8s.io", "QUOTIENT_DOMAIN: domain: 'k8s.io': "),
    "QUOTIENT_WEBHOOK_PORT": ("9" * 5000, "QUOTIENT_WEBHOOK_PORT: webhook.port: '999"),
    "QUOTIENT_WEBHOOK_BINDERS": ("[a, 5]", "QUOTIENT_WEBHOOK_BINDERS: webhook.binders[1]: must be text, not a number"),
}


@pytest.mark.parametrize(("variable", "value", "message"), [(name, *case) for name, case in INVALID_VARIABLES.items()])
def test_an_invalid_variable_is_named_instead_of_the_file(
    tmp_path: Path, variable: str, value: str, message: str
) -> None:
    file = write(tmp_path, HEAD + "log: {level: info}\n")
    with pytest.raises(ConfigurationError) as rejected:
        load(file, {variable: value})
    assert str(rejected.value).startswith(message)
    assert len(str(rejected.value)) < 300


INVALID_FLAGS = {
    "log.level=loud": "--set log.level: 'loud': must be one of ",
    "nonsense": "--set nonsense: write PATH=VALUE, such as --set log.level=debug",
    "log.levels=debug": "--set log.levels=debug: log.levels is not a known field; did you mean log.level?",
    "no.such=1": "--set no.such=1: no.such is not a known field; see quotient config",
    "log=debug": "--set log=debug: log is a section with level, format",
    "webhook.binders=[a, 5]": "--set webhook.binders[1]: must be text, not a number",
}


@pytest.mark.parametrize(("flag", "message"), INVALID_FLAGS.items())
def test_an_invalid_flag_is_named_instead_of_the_file(tmp_path: Path, flag: str, message: str) -> None:
    file = write(tmp_path, HEAD + "log: {level: info}\n")
    with pytest.raises(ConfigurationError) as rejected:
        load(file, {}, [flag])
    assert str(rejected.value).startswith(message)


def test_text_is_not_parsed_as_yaml() -> None:
    """A context may be called 123, and a path may contain a number sign."""
    loaded = load(None, {"QUOTIENT_CLUSTER_KUBECONFIG": "/home/a #b/config"}, ["cluster.context=123"])
    assert (loaded.configuration.cluster.kubeconfig, loaded.configuration.cluster.context) == (
        "/home/a #b/config",
        "123",
    )


def test_keys_of_a_merged_mapping_may_be_overridden() -> None:
    """A YAML merge key is not a duplicate."""
    assert parse_documents("a: &a {p: 1, q: 1}\nb:\n  <<: *a\n  q: 2\n") == [
        {"a": {"p": 1, "q": 1}, "b": {"p": 1, "q": 2}}
    ]


def test_a_missing_file_is_an_error() -> None:
    """The defaults apply only if no file was named."""
    with pytest.raises(ConfigurationError, match=r"^/no/such.yaml: no such file$"):
        load(Path("/no/such.yaml"), {})


def test_a_binary_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "quotient.yaml").write_bytes(b"\x80\xff")
    with pytest.raises(ConfigurationError, match=r"quotient.yaml: not UTF-8 text$"):
        load(tmp_path / "quotient.yaml", {})


def test_variables_that_kubernetes_injects_are_ignored() -> None:
    """A Service named quotient-webhook gives every pod such variables."""
    assert (
        load(None, {"QUOTIENT_WEBHOOK_SERVICE_HOST": "10.0.0.1", "QUOTIENT_CACHE": "/x"}).configuration
        == Configuration()
    )


def test_every_value_has_its_own_variable_named_after_its_path() -> None:
    variables = [environment_variable(path) for path in value_paths(Configuration)]
    assert len(set(variables)) == len(variables)
    assert environment_variable("vocabularies.vgpuPerGpu") == "QUOTIENT_VOCABULARIES_VGPU_PER_GPU"
    assert environment_variable("memoryUnitMiB") == "QUOTIENT_MEMORY_UNIT_MIB"


@given(st.text(max_size=200))
def test_any_text_is_parsed_or_rejected_with_a_document_error(text: str) -> None:
    """Users write what this parser reads: no other exception may come out of it."""
    with suppress(DocumentError):
        parse_documents(text)
