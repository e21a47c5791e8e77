"""How requests share the pieces that are gathered at once. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """Some `rows` of the request with number `request`; `last` if it ends with them."""

    request: int
    rows: slice
    last: bool


def pieces(num_rows: Sequence[int], piece_rows: int) -> list[list[Part]]:
    """Cut requests of `num_rows` each into pieces of `piece_rows`, in order; the last may be smaller.

    A request is cut only where a piece is full, so that there are as few copies as there can be.
    """
    cut: list[list[Part]] = []
    room = 0
    for request, rows in enumerate(num_rows):
        begin = 0
        while begin < rows:
            if room == 0:
                cut.append([])
                room = piece_rows
            end = min(rows, begin + room)
            cut[-1].append(Part(request, slice(begin, end), last=end == rows))
            room -= end - begin
            begin = end
    return cut
