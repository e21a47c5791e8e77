"""Places of a fixed buffer, handed out in turn. Pure."""

from collections import deque
from typing import Generic, TypeVar

Holder = TypeVar("Holder")


class Ring(Generic[Holder]):
    """Hands out runs of `num_places` places; who held them before is named, never waited for.

    Holders must end in the order in which they took their pieces, as copies on one stream do.
    """

    def __init__(self, num_places: int) -> None:
        """Begin with every place free."""
        self._num_places = num_places
        self._begin = self._end = 0
        """Of the newest piece; counted on from turn to turn, never wrapped."""
        self._held: deque[tuple[int, Holder]] = deque()
        """(begin, holder) of the pieces of which no place was given again, oldest first."""
        self._newest_past: Holder | None = None
        """Of the others. It ends after them all, so whoever waits for it waits for enough."""

    def take(self, count: int) -> tuple[int, Holder | None]:
        """Return where the next `count` places begin, and the holder that must end before they are used.

        Raises ValueError for a piece that is larger than the ring.
        """
        if not 0 < count <= self._num_places:
            raise ValueError(f"{count} places do not fit a ring of {self._num_places}")
        self._begin = self._end
        if self._begin % self._num_places + count > self._num_places:
            self._begin += -self._begin % self._num_places
        self._end = self._begin + count
        while self._held and self._held[0][0] < self._end - self._num_places:
            self._newest_past = self._held.popleft()[1]
        return self._begin % self._num_places, self._newest_past

    def hold(self, holder: Holder) -> None:
        """Say who holds the piece that was taken last."""
        self._held.append((self._begin, holder))
