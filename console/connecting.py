"""The connection to a cluster that commands share."""

from typing import Any

from console.errors import CommandError
from settings.configuration import Configuration
from vcuda.decision import Unavailable

# A person waits at the terminal: a call that takes longer is reported as failed.
CALL_TIMEOUT_S = 15


def connect_cluster(configuration: Configuration) -> Any:  # noqa: ANN401 - an ApiCluster, imported when it is needed
    """Return the configured cluster; exits with code 2 if no kubeconfig works."""
    from cluster.api import connect  # noqa: PLC0415 - other commands start without the API client

    try:
        return connect(configuration.cluster.kubeconfig, configuration.cluster.context).with_timeout(CALL_TIMEOUT_S)
    except Unavailable as error:
        raise CommandError(str(error)) from None
