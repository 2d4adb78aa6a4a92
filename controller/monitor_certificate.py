"""Keeps the certificate that all node plugins serve on port 5678, in a Secret of its own beside the CAs to trust.

The node plugins mount it; their service account can read no Secret, and so neither the CA's key. They share it: it
tells a client that it reached a node plugin, not which one. With it a compromised node could pose as another one
towards a client, but nothing towards API servers.
"""

from datetime import datetime

from certs.authority import issue
from certs.certificate_secrets import CertificateSecrets, value_in
from certs.renewal import needs_renewal
from certs.rotation import CertificateState
from vcuda.names import MONITOR_SECRET, TLS_CERTIFICATE, TLS_KEY, TLS_SECRET_TYPE, TRUSTED_CAS


def reconcile_monitor_certificate(
    secrets: CertificateSecrets, authorities: CertificateState, names: tuple[str, ...], now: datetime
) -> str:
    """Issue the certificate if it is due, and publish the CAs; returns why something was written, empty if nothing was.

    Conflict or AlreadyExists if another process wrote the Secret in between.
    """
    if authorities.current is None:
        return ""
    stored = secrets.find(MONITOR_SECRET)
    pair = value_in(stored, TLS_CERTIFICATE), value_in(stored, TLS_KEY)
    # A new CA has been in the bundle for a while when it becomes the current one, so clients trust it by then.
    renewing, why = needs_renewal(*pair, now=now, names=names, authority=authorities.current.certificate)
    if renewing:
        issued = issue(authorities.current, names, now)
        pair = issued.certificate, issued.key
    elif value_in(stored, TRUSTED_CAS) != authorities.bundle:
        why = "the CAs have changed"
    else:
        return ""
    data = {TLS_CERTIFICATE: pair[0], TLS_KEY: pair[1], TRUSTED_CAS: authorities.bundle}
    secrets.put(stored, MONITOR_SECRET, TLS_SECRET_TYPE, data)
    return why
