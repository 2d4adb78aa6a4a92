"""How many bytes of request bodies are in memory at the same time, over all connections."""

# Nearly every review is smaller. These are always read, so that large ones never hold them up.
SMALL_BYTES = 32 * 1024
# Together, large bodies may take as much as this many of the largest.
LARGEST_BODIES = 4


class BodyBudget:
    """Counts large bodies from their heads on until they are answered. Not thread-safe: used on the event loop."""

    def __init__(self, max_body: int) -> None:
        self._left = LARGEST_BODIES * max_body

    def reserve(self, length: int) -> bool:
        """Reserve memory for a body of this length; False if there is none left."""
        if length <= SMALL_BYTES:
            return True
        if length > self._left:
            return False
        self._left -= length
        return True

    def release(self, length: int) -> None:
        if length > SMALL_BYTES:
            self._left += length
