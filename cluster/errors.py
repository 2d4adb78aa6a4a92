"""Errors of the API, as types that callers can act on: retry, read again, list again, or give up."""

from vcuda.decision import Unavailable

REJECTED_CODES = (400, 401, 403, 405, 406, 413, 415, 422)


class ApiError(Exception):
    """The API server answered that it will not do this; the message is its own."""

    def __init__(self, message: str, *, code: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


class NotFound(ApiError):  # noqa: N818 - named as the API names them
    """The object, or its namespace, does not exist."""


class AlreadyExists(ApiError):  # noqa: N818
    """An object of this name exists already."""


class Conflict(ApiError):  # noqa: N818
    """The object changed since it was read: read it again and decide again."""


class Expired(ApiError):  # noqa: N818
    """The resource version is too old to list or watch from: list again."""


class Rejected(ApiError):  # noqa: N818
    """The request is invalid, or admission or the caller's permissions forbid it: repeating it does not help."""


def api_error(code: int, reason: str, message: str) -> ApiError | Unavailable:
    """Return the error for an HTTP status code and a Status object's reason; unknown codes count as retryable."""
    if code == 409:  # noqa: PLR2004 - HTTP's own numbers
        # One code for two errors; only the reason tells them apart.
        conflict: type[ApiError] = AlreadyExists if reason == "AlreadyExists" else Conflict
        return conflict(message, code=code, reason=reason)
    types: dict[int, type[ApiError]] = {404: NotFound, 410: Expired, **dict.fromkeys(REJECTED_CODES, Rejected)}
    if type_ := types.get(code):
        return type_(message, code=code, reason=reason)
    return Unavailable(f"the API server answered {code} {reason}: {message}")
