"""What the API answers when it does not do what was asked."""

from vcuda.decision import Unavailable


class ApiError(Exception):
    """The API understood and said no; the message is its own."""

    def __init__(self, message: str, *, code: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


class NotFound(ApiError):  # noqa: N818 - named as the API names them
    """No such object, or no such namespace."""


class AlreadyExists(ApiError):  # noqa: N818
    """An object of that name is there."""


class Conflict(ApiError):  # noqa: N818
    """Somebody else wrote since we read: read again and decide anew."""


class Expired(ApiError):  # noqa: N818
    """The version asked for is too old to watch from: list again."""


class Rejected(ApiError):  # noqa: N818
    """The object is invalid, or an admission check or the caller's rights forbid it."""


def api_error(code: int, reason: str, message: str) -> ApiError | Unavailable:
    """Sort an answer of the API into the family that callers can act on."""
    if code == 409:  # noqa: PLR2004 - HTTP's own numbers
        family: type[ApiError] = AlreadyExists if reason == "AlreadyExists" else Conflict
        return family(message, code=code, reason=reason)
    families = {404: NotFound, 410: Expired} | dict.fromkeys((400, 401, 403, 405, 406, 413, 415, 422), Rejected)
    if known := families.get(code):
        return known(message, code=code, reason=reason)
    return Unavailable(f"the API answered {code} {reason}: {message}")
