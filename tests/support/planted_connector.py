"""Our connector, with a failure planted between the engine's cache and the sealed file.

What to plant in which row stands in a JSON file that `ORDER` names and that is read for every row, so that
one engine serves many plants. Used by the tests' engine in this process, and loaded by vLLM by this module's
name.
"""

import json
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from connector import hidden_states
from connector.wire import DrainJob, StepWork, VoidRow
from connector.worker import WorkerHalf
from connector.writers import CapturedRow, Item
from schemas.names import MAX_UNITS
from schemas.receipts import AttemptId
from tests.support.plants import EXCHANGED, JOBS, SLABS, STATES, Scene

ORDER = "QUARRY_TEST_PLANT"
REMEMBERED_ROWS = 8


@dataclass(frozen=True, slots=True)
class Order:
    """`row` is the plan row to plant into, none for every row and the canary's too; `other` its partner.

    With `job` nothing is planted into other jobs; with `units_only`, nothing into what runs beside a unit's
    rows, which is the canary and the second runs.
    """

    plant: str
    weights: str
    row: int | None = None
    other: int | None = None
    job: str | None = None
    units_only: bool = False

    def save(self) -> None:
        values = {name: getattr(self, name) for name in self.__slots__}
        Path(os.environ[ORDER]).write_text(json.dumps(values))

    def hits(self, job: DrainJob) -> bool:
        if self.units_only and job.ref.attempt_id.unit >= MAX_UNITS:
            return False
        return self.row in (None, job.ref.row) and self.job in (None, job.ref.attempt_id.job_id)


def ordered() -> Order | None:
    path = Path(os.environ[ORDER])
    return Order(**json.loads(path.read_text())) if path.is_file() else None


class PlantedHalf(WorkerHalf):
    """Changes the cache under a finished request before it is drained, or its slab before it is written."""

    def __init__(self, config: Any, cache_BLSH: torch.Tensor, *rest: Any, **more: Any) -> None:
        super().__init__(config, cache_BLSH, *rest, **more)
        self._planted = cache_BLSH
        self._earlier: deque[torch.Tensor] = deque(maxlen=REMEMBERED_ROWS)
        self._held: DrainJob | None = None
        self._last_order = ordered()
        self._put = self._writers.put
        self._writers.put = self._put_planted  # type: ignore[method-assign]

    def step(self, work: StepWork) -> set[str]:
        work.items = [planted for item in work.items for planted in self._plant(item)]
        return super().step(work)

    def _plant(self, item: DrainJob | VoidRow) -> list[DrainJob | VoidRow]:
        order = self._order()
        if isinstance(item, VoidRow):
            return [item]
        states = self._read(item)
        told: list[DrainJob | VoidRow] = [item]
        if order is not None and order.plant == EXCHANGED:
            told = list(self._exchange(item, order))
        elif order is not None and order.hits(item):
            if order.plant in JOBS:
                told = list(JOBS[order.plant](item))
            elif order.plant in STATES:
                scene = Scene(states.clone(), self._planted.shape[2], self._earlier, Path(order.weights))
                STATES[order.plant](scene)
                self._write(item, scene.states_LTH)
        self._earlier.append(states)
        return told

    def _order(self) -> Order | None:
        """Return what to plant now; what was planted before is forgotten with it."""
        order = ordered()
        if order != self._last_order:
            self._last_order = order
            self._writers._repeats._tokens_LE.fill(-1)
            self._earlier.clear()
        return order

    def _exchange(self, item: DrainJob, order: Order) -> list[DrainJob]:
        """Hold the first of two rows until the second is there, too."""
        if item.ref.row not in (order.row, order.other) or order.job not in (
            None,
            item.ref.attempt_id.job_id,
        ):
            return [item]
        if self._held is None:
            self._held = item
            return []
        first, self._held = self._held, None
        states = self._read(first), self._read(item)
        self._write(first, states[1])
        self._write(item, states[0])
        return [first, item]

    def _put_planted(self, attempt_id: AttemptId, item: Item) -> None:
        order = ordered() if isinstance(item, CapturedRow) else None
        if order is not None and order.plant in SLABS and order.hits(item.job):
            SLABS[order.plant](item.states_LTH, self._earlier[0] if self._earlier else None)
        self._put(attempt_id, item)

    def _read(self, job: DrainJob) -> torch.Tensor:
        """Return a copy of a request's states [L, T, H]."""
        blocks = [self._planted[block] for block in job.block_ids]
        return torch.cat(blocks, dim=1)[:, : job.num_tokens].to("cpu", copy=True)

    def _write(self, job: DrainJob, states_LTH: torch.Tensor) -> None:
        slots = self._planted.shape[2]
        for number, block in enumerate(job.block_ids):
            part = states_LTH[:, number * slots : (number + 1) * slots]
            self._planted[block, :, : part.shape[1]] = part


class HiddenStatesConnector(hidden_states.HiddenStatesConnector):
    """What vLLM loads: the facade, with the planted worker half."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        healthy = hidden_states.WorkerHalf
        hidden_states.WorkerHalf = PlantedHalf  # type: ignore[misc]
        try:
            super().register_kv_caches(kv_caches)
        finally:
            hidden_states.WorkerHalf = healthy  # type: ignore[misc]
