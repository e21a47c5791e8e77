"""Our connector, at default settings. Done when every unit could be committed.

Its shard is checked, sealed, durable, receipted, and the logits of its sample are proven.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from benchmarks.rows.contract import RowFailed, Site, Written, put_in_memory, removed, run_bounded
from connector.wire import RowRef
from schemas.dataset.index import Witness, write_index
from schemas.dataset.tables import read_plan_table
from schemas.names import PLAN_FILE, attempt_dir, index_path, job_id_from_content, shard_path
from schemas.receipts import AttemptId, OpenUnit, UnitSealed
from schemas.request import Compression
from service.capture.attempt_files import INDEX_FILE
from service.capture.budget import InFlight
from service.capture.engine import Prompt
from service.capture.link import EngineLink
from service.capture.vllm_engine import VllmEngine
from service.proof.checks import check_unit
from service.proof.head import Head
from tests.support.plans import identity, order, write_plan


class QuarryEngine:
    """vLLM with our connector; its rows differ in how the states are stored."""

    def __init__(self, site: Site) -> None:
        """Serve the states as they are and both compressions."""
        self.site, self.settings = site, site.settings()
        self.link = EngineLink()
        self.engine = VllmEngine()
        self.head = Head.load(site.weights, "bfloat16")
        self.rows: Mapping[str, QuarryRow] = {
            "quarry": QuarryRow("quarry", self),
            "quarry-planes": QuarryRow("quarry-planes", self, "planes"),
            "quarry-fp8": QuarryRow("quarry-fp8", self, "fp8"),
            "quarry-memory": MemoryRow("quarry-memory", self),
        }

    async def start(self) -> None:
        """Start vLLM with our connector."""
        await self.link.listen()
        await self.engine.start(self.site.spec(), self.settings, self.link)

    async def stop(self) -> None:
        """End the engine's processes."""
        await self.engine.stop()
        await self.link.close()


class SlowDisk(VllmEngine):
    """vLLM with the connector whose writers share a slow disk."""

    connector_module = "benchmarks.gpu.slow_connector"


class SlowDiskEngine(QuarryEngine):
    """Ours on a disk that is slower than the engine."""

    def __init__(self, site: Site) -> None:
        """Serve the states as they are."""
        super().__init__(site)
        self.engine = SlowDisk()
        self.rows = {"quarry-slow": QuarryRow("quarry-slow", self)}


class QuarryRow:
    """One job's units through the engine, as many at once as a worker of the service runs."""

    def __init__(self, name: str, host: QuarryEngine, compression: Compression = "none") -> None:
        """Run on `host`; the job is named for the row."""
        self._name, self._host = name, host
        self._job = job_id_from_content(f"bench {name}")
        target, generate = host.site.work.target, host.site.generate()
        self._identity = identity(
            layer_ids=target.layer_ids,
            hidden_size=target.hidden_size,
            num_layers=target.num_layers,
            compression=compression,
            generate=generate,
            capture=generate.capture if generate else None,
        )
        self._units: list[tuple[OpenUnit, list[tuple[int, ...]]]] = []

    @property
    def folder(self) -> Path:
        """Where the connector writes the job's attempts."""
        return self._host.settings.work_root / self._job

    async def prepare(self, turn: int) -> None:
        """Write the plans of the round's units, as the planner would have done long before."""
        units = self._host.site.work.units(self._name, turn)
        self._units = [
            (self._order(turn * len(units) + place, len(rows)), rows) for place, rows in enumerate(units)
        ]
        for unit_order, rows in self._units:
            write_plan(self._host.settings.work_root, rows, unit=unit_order.attempt_id.unit, job_id=self._job)

    async def measure(self) -> float:
        """Run every unit."""
        budget = self._host.site.budget()
        gate = asyncio.Semaphore(self._host.settings.units_in_flight)
        async with asyncio.TaskGroup() as group:
            units = [
                group.create_task(self._run_unit(unit_order, rows, budget, gate))
                for unit_order, rows in self._units
            ]
        return max(unit.result() for unit in units)

    async def clean(self) -> Written:
        """Delete the round's plans, shards and indexes; only shards count."""
        written = removed(self.folder, "attempts/*/train-*.parquet")
        if written.files != len(self._units):
            raise RowFailed(f"{written.files} shards were written for {len(self._units)} units")
        return written

    def _order(self, unit: int, num_rows: int) -> OpenUnit:
        unit_order = order(self._identity, num_rows, unit=unit)
        return unit_order.model_copy(
            update={
                "attempt_id": AttemptId(job_id=self._job, unit=unit, epoch=1),
                "provenance": unit_order.provenance.model_copy(update={"job_id": self._job}),
            }
        )

    async def _run_unit(
        self, unit_order: OpenUnit, rows: list[tuple[int, ...]], budget: InFlight, gate: asyncio.Semaphore
    ) -> float:
        attempt_id, host = unit_order.attempt_id, self._host
        prompts = [
            Prompt(
                f"{self._job}-{attempt_id.unit}-{row}",
                ids,
                RowRef(attempt_id, row, len(ids)),
                witness=True,
                generate=host.site.generate(),
            )
            for row, ids in enumerate(rows)
        ]
        witnesses: dict[int, Witness] = {}

        async def run(prompt: Prompt) -> None:
            answer = await host.engine.run(prompt)
            if prompt.ref is not None and answer.likely:
                witnesses[prompt.ref.row] = answer.likely

        async with gate:
            await host.link.open(unit_order)
            answered = await run_bounded(run, prompts, budget)
        (receipt,) = await host.link.receipts(attempt_id)
        if not isinstance(receipt, UnitSealed) or len(receipt.rows) != unit_order.num_rows:
            raise RowFailed(f"unit {attempt_id.unit} was not written whole: {receipt}")
        extra = max(host.site.work.kind.answer_tokens - 1, 0)
        if dict(zip(receipt.rows, receipt.num_tokens, strict=True)) != {
            row: len(ids) + extra for row, ids in enumerate(rows)
        }:
            raise RowFailed(f"unit {attempt_id.unit} holds other lengths than were asked for")
        await asyncio.to_thread(self._prove, receipt, witnesses)
        return answered

    def _prove(self, receipt: UnitSealed, witnesses: Mapping[int, Witness]) -> None:
        """Hold the sealed unit against its plan and the model, and index it, as the service does."""
        attempt_id, settings = receipt.attempt_id, self._host.settings
        attempt = settings.work_root / attempt_dir(attempt_id.job_id, attempt_id.unit, attempt_id.epoch)
        plan = read_plan_table(attempt / PLAN_FILE)
        proof = check_unit(
            attempt=attempt,
            plan=plan,
            receipts=[receipt],
            witnesses=witnesses,
            head=self._host.head,
            identity=self._identity,
        )
        shards = {shard_path(attempt_id.job_id, attempt_id.unit): proof.rows[receipt.rank]}
        write_index(
            attempt / INDEX_FILE, index_path(attempt_id.job_id, attempt_id.unit), shards, plan, witnesses
        )


class MemoryRow(QuarryRow):
    """The same into memory: what is left is what no disk delays."""

    async def prepare(self, turn: int) -> None:
        """Write the plans into memory."""
        put_in_memory(self.folder)
        await super().prepare(turn)
