"""The configuration: one versioned YAML file that all components share.

```yaml
apiVersion: quotient.dev/v1
kind: Configuration
domain: inspur.com          # prefix of resources, labels and annotations
memoryUnitMiB: 256          # what 1 of vcuda-memory means
vocabularies:
  vgpuPerGpu: 10            # AWS: so many virtual GPUs make one
  nvidiaGpu: false          # read nvidia.com/gpu as whole cards
  hami: false               # read nvidia.com/gpu, gpumem and gpucores as HAMi does
cluster:
  kubeconfig: ""            # empty: the pod's own account, or the user's kubeconfig
  context: ""               # empty: the kubeconfig's current one
log:
  level: info               # debug | info | warning | error
  format: auto              # json | console | auto (console on a terminal)
```
Every value can be overridden: by an environment variable named after its path (`log.level` is
`QUOTIENT_LOG_LEVEL`), and over that by a flag (`--set log.level=debug`).
"""

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from vcuda.memory import DEFAULT_UNIT_MIB
from vcuda.names import DEFAULT_DOMAIN, names_for
from vcuda.vocabulary import Dialects

API_VERSION: Final = "quotient.dev/v1"
KIND: Final = "Configuration"
MAX_UNIT_MIB = 1024 * 1024


class Log(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """How a process tells what it does."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"


class Access(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Which cluster, and as whom."""

    kubeconfig: str = ""
    context: str = ""


class Configuration(Struct, frozen=True, rename="camel", forbid_unknown_fields=True, kw_only=True):
    """All settings; a field that is not here is an error."""

    api_version: Literal["quotient.dev/v1"] = API_VERSION
    kind: Literal["Configuration"] = KIND
    domain: str = DEFAULT_DOMAIN
    memory_unit_mib: Annotated[int, Meta(ge=1, le=MAX_UNIT_MIB)] = msgspec.field(
        name="memoryUnitMiB", default=DEFAULT_UNIT_MIB
    )
    vocabularies: Dialects = Dialects()
    cluster: Access = Access()
    log: Log = Log()

    def mistake(self) -> tuple[str, str] | None:
        """Find what types alone cannot exclude: the path and what is wrong there."""
        try:
            names_for(self.domain)
        except ValueError as wrong:
            return "domain", str(wrong)
        return None
