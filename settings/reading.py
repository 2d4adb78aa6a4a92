"""Why a file cannot be read, in words for users."""


def describe_read_error(error: OSError | UnicodeDecodeError) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file"
    return "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else f"cannot be read: {error.strerror}"
