"""One way through a sealed shard, front to back: the bytes that prove its rows are read and hashed once."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from schemas.dataset.direct import DirectReader
from service.errors import DatasetBroken
from service.proof.shard_reader import LENGTH_BYTES, ShardReader


class Passage:
    """Reads layers in file order past the page cache; out of order, or packed, the shard's reader does it."""

    def __init__(self, file: DirectReader, reader: ShardReader) -> None:
        """Read `file`, whose footer `reader` has read."""
        self._file, self._reader = file, reader

    def layer_bytes(self, row: int, layer_id: int) -> NDArray[np.uint8]:
        """Return the raw bytes of one layer of one row, which hold until the next call.

        Raises DatasetBroken.
        """
        places = self._reader.layer_places(row, layer_id)
        start = self._file.position
        if places is None or not _in_order(places, start):
            return self._reader.layer_bytes(row, layer_id)
        (first, length), *others = places
        last, num_bytes = places[-1]
        try:
            found = self._file.upto(last + LENGTH_BYTES + num_bytes)[first - start :]
        except EOFError as error:
            raise DatasetBroken(f"row {row}, layer {layer_id}: {error}") from error
        for begin, num_bytes in places:
            told = int.from_bytes(found[begin - first : begin - first + LENGTH_BYTES].tobytes(), "little")
            if told != num_bytes:
                about = f"{told} bytes are stored, {num_bytes} are due"
                raise DatasetBroken(f"row {row}, layer {layer_id}: {about}")
        # What follows moves up to it, over a page's header: the file is hashed, and the buffer is ours.
        end = LENGTH_BYTES + length
        for begin, num_bytes in others:
            value = found[begin - first + LENGTH_BYTES :][:num_bytes]
            found[end : end + num_bytes] = value
            end += num_bytes
        return found[LENGTH_BYTES:end]


def _in_order(places: Sequence[tuple[int, int]], position: int) -> bool:
    """Say whether values lie one after the other from `position` on."""
    for begin, num_bytes in places:
        if begin < position:
            return False
        position = begin + LENGTH_BYTES + num_bytes
    return True
