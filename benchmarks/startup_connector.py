"""Our connector with marks at the first rows whose states have been copied; vLLM loads it by its name."""

from typing import Any

from benchmarks.startup_marks import mark
from connector.hidden_states import HiddenStatesConnector as OurConnector
from connector.wire import DrainJob
from connector.writers import WriterPool
from schemas.names import MAX_UNITS

CANARY_STATES, STATES = "the canary's first states are captured", "the first states are captured"


class HiddenStatesConnector(OurConnector):
    """Ours; marks in the worker's process."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Watch for rows from now on."""
        super().register_kv_caches(kv_caches)
        put_row = WriterPool.put_row
        seen: set[str] = set()

        def told(self: WriterPool, job: DrainJob, *given: Any) -> None:  # noqa: ANN401 - as it takes them
            stage = CANARY_STATES if job.ref.key.unit >= MAX_UNITS else STATES
            if stage not in seen:
                seen.add(stage)
                mark(stage)
            put_row(self, job, *given)

        WriterPool.put_row = told  # type: ignore[method-assign]
