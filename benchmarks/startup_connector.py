"""Our connector, which notes when the first states of the job are captured. vLLM loads it by its name."""

import os
import time
from pathlib import Path
from typing import Any

from connector.hidden_states import HiddenStatesConnector as OurConnector
from connector.writers import CapturedRow, Item, WriterPool
from schemas.names import MAX_UNITS
from schemas.receipts import UnitKey

FILE = "QUARRY_STARTUP_FILE"
"""Names the file that the time goes to."""


class HiddenStatesConnector(OurConnector):
    """Ours; the canary's rows do not count."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Watch for rows from now on."""
        super().register_kv_caches(kv_caches)
        put, file = WriterPool.put, Path(os.environ[FILE])

        def noting(self: WriterPool, key: UnitKey, item: Item) -> None:
            if isinstance(item, CapturedRow) and key.unit < MAX_UNITS and not file.exists():
                file.write_text(str(time.time()))
            put(self, key, item)

        WriterPool.put = noting  # type: ignore[method-assign]
