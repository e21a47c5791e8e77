"""Our connector on a slow disk, whose rate all writers of a rank share; vLLM loads it by this name."""

import threading
import time
from collections.abc import Iterable
from typing import Any

from connector.hidden_states import HiddenStatesConnector as OurConnector
from schemas.dataset.framing import Page, ShardFile

BYTES_PER_S = 0.2e9


class HiddenStatesConnector(OurConnector):
    """Ours; the worker's process writes slowly."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Begin with the first row, which comes after this."""
        super().register_kv_caches(kv_caches)
        disk, write_row = threading.Lock(), ShardFile.write_row

        def slowly(file: ShardFile, row: Iterable[Page]) -> None:
            before = file._file.position
            write_row(file, row)
            with disk:
                time.sleep((file._file.position - before) / BYTES_PER_S)

        ShardFile.write_row = slowly  # type: ignore[method-assign]
