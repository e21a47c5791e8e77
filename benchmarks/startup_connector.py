"""Our connector with marks at the first rows whose states have been copied; vLLM loads it by its name."""

from typing import Any

from benchmarks.startup_marks import mark
from connector.hidden_states import HiddenStatesConnector as OurConnector
from connector.writers import CapturedRow, Item, WriterPool
from schemas.names import MAX_UNITS
from schemas.receipts import UnitKey

CANARY_STATES, STATES = "the canary's first states are captured", "the first states are captured"


class HiddenStatesConnector(OurConnector):
    """Ours; marks in the worker's process."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Watch for rows from now on."""
        super().register_kv_caches(kv_caches)
        put = WriterPool.put
        seen: set[str] = set()

        def marking(self: WriterPool, key: UnitKey, item: Item) -> None:
            stage = CANARY_STATES if key.unit >= MAX_UNITS else STATES
            if isinstance(item, CapturedRow) and stage not in seen:
                seen.add(stage)
                mark(stage)
            put(self, key, item)

        WriterPool.put = marking  # type: ignore[method-assign]
