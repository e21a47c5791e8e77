"""A started engine, driven row by row: attempts are opened and run, and what was sealed is held to the truth.

For tests that begin behind the planner and end before the commit.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow.parquet as pq
import torch

from connector.wire import RowRef
from schemas.generate import Generate
from schemas.names import attempt_dir
from schemas.receipts import AttemptId, UnitFailed, UnitSealed
from service.capture.engine import Answer, Engine, EngineSpec, Prompt
from service.capture.link import EngineLink
from service.settings import Settings
from tests.support.loop_thread import LoopThread
from tests.support.plans import identity, order, write_plan

Truth = Callable[[Sequence[list[int]]], list[dict[int, torch.Tensor]]]
"""Returns for each sequence the states [T, H] of every captured layer."""


@dataclass
class Attempt:
    """An open attempt at a unit. Used on the bench's loop.

    `name` begins the names of its requests, which the engine is free to change.
    """

    engine: Engine
    link: EngineLink
    attempt_id: AttemptId
    prompts: Sequence[Sequence[int]]
    name: str

    async def run(self, row: int, generate: Generate | None = None) -> Answer:
        """Run one row to its end."""
        ids = tuple(self.prompts[row])
        ref = RowRef(self.attempt_id, row, len(ids))
        return await self.engine.run(Prompt(f"{self.name}-{row}", ids, ref, witness=True, generate=generate))

    def start(self, row: int, generate: Generate | None = None) -> "asyncio.Task[Answer]":
        """Begin to run one row."""
        return asyncio.create_task(self.run(row, generate))

    async def receipt(self) -> UnitSealed | UnitFailed:
        """Wait for the one rank's receipt."""
        (receipt,) = await self.link.receipts(self.attempt_id)
        return receipt


@dataclass
class Bench:
    """A started engine and what is known of it."""

    engine: Engine
    link: EngineLink
    settings: Settings
    spec: EngineSpec
    loop: LoopThread
    truth: Truth
    tolerance: float
    vocab_size: int
    worst: float = field(default=0.0, init=False)
    """The largest relative error of a token's state seen so far."""
    _units: int = field(default=0, init=False)

    async def open(
        self, prompts: Sequence[Sequence[int]], *, unit: int | None = None, epoch: int = 1
    ) -> Attempt:
        """Open an attempt at a new unit, or at one that was opened before."""
        if unit is None:
            unit = self._units = self._units + 1
        plan = write_plan(self.settings.work_root, prompts, unit=unit, epoch=epoch)
        about = identity(
            layer_ids=self.spec.layer_ids, hidden_size=self.spec.hidden_size, dtype=self.spec.dtype
        )
        told = order(about, len(prompts), unit=unit, epoch=epoch)
        await self.link.open(told)
        plan.unlink()
        return Attempt(self.engine, self.link, told.attempt_id, prompts, f"{unit}-{epoch}")

    def capture(
        self, prompts: Sequence[Sequence[int]], *, generate: Generate | None = None
    ) -> tuple[UnitSealed, dict[int, dict[str, Any]], list[Answer]]:
        """Run one unit; return its receipt, its stored rows by plan row, and the answers."""

        async def unit_run() -> tuple[UnitSealed | UnitFailed, list[Answer]]:
            attempt = await self.open(prompts)
            answers = await asyncio.gather(*(attempt.run(row, generate) for row in range(len(prompts))))
            return await attempt.receipt(), answers

        receipt, answers = self.loop.call(unit_run())
        assert isinstance(receipt, UnitSealed), receipt
        return receipt, self.rows(receipt), answers

    def rows(self, receipt: UnitSealed) -> dict[int, dict[str, Any]]:
        """Return the stored rows of a sealed attempt by plan row."""
        if receipt.file is None:
            return {}
        folder = attempt_dir(receipt.attempt_id.job_id, receipt.attempt_id.unit, receipt.attempt_id.epoch)
        table = pq.read_table(self.settings.work_root / folder / receipt.file)
        return dict(zip(receipt.rows, table.to_pylist(), strict=True))

    def states(self, stored: Mapping[str, Any], layer_id: int) -> torch.Tensor:
        """Return one layer of a stored row: [T, H] of float32."""
        dtype = getattr(torch, self.spec.dtype)
        states = torch.frombuffer(bytearray(stored[f"layer_{layer_id}"]), dtype=dtype)
        return states.view(stored["num_tokens"], self.spec.hidden_size).float()

    def errors(self, rows: Mapping[int, Mapping[str, Any]]) -> dict[int, float]:
        """Return for each row the largest relative error of a token's state, over all layers."""
        truth = self.truth([rows[row]["input_ids"] for row in rows])
        worst: dict[int, float] = {}
        for (row, stored), layers in zip(rows.items(), truth, strict=True):
            off = [relative_T(self.states(stored, k), layers[k].float()) for k in self.spec.layer_ids]
            worst[row] = float(torch.stack(off).max())
        return worst

    def assert_right(self, rows: Mapping[int, Mapping[str, Any]], ids: Mapping[int, Sequence[int]]) -> None:
        """Every row that is due is there, with its token ids, and every layer of it is the model's."""
        assert rows.keys() == ids.keys()
        assert {row: stored["input_ids"] for row, stored in rows.items()} == {row: [*ids[row]] for row in ids}
        errors = self.errors(rows)
        self.worst = max(self.worst, *errors.values())
        off = {row: error for row, error in errors.items() if error > self.tolerance}
        assert not off, f"of rows {sorted(rows)}, off by: {off}; by layer and token: {self._where(rows, off)}"

    def _where(self, rows: Mapping[int, Mapping[str, Any]], off: Mapping[int, float]) -> list[str]:
        """Say for each row that is off which tokens of which layers are."""
        said = []
        for row in off:
            (layers,) = self.truth([rows[row]["input_ids"]])
            for k in self.spec.layer_ids:
                error_T = relative_T(self.states(rows[row], k), layers[k].float())
                wrong = (error_T > self.tolerance).nonzero().flatten().tolist()
                said.append(f"row {row} layer {k}: {len(wrong)} of {len(error_T)}, {wrong[:3]}..{wrong[-3:]}")
        return said


def relative_T(got_TH: torch.Tensor, truth_TH: torch.Tensor) -> torch.Tensor:
    """Return for each token the length of the difference in units of the truth's length: [T]."""
    return (got_TH - truth_TH).norm(dim=1) / truth_TH.norm(dim=1)


def sealed(receipt: UnitSealed | UnitFailed) -> UnitSealed:
    """Return the receipt of an attempt that must have been sealed."""
    assert isinstance(receipt, UnitSealed), receipt
    return receipt


def by_row(prompts: Sequence[Sequence[int]], answers: Sequence[Answer] | None = None) -> dict[int, list[int]]:
    """Return the token ids that are due in each row: prompt, and answer but for its last token."""
    tails = [list(answer.token_ids[:-1]) for answer in answers] if answers else [[]] * len(prompts)
    return {row: [*ids, *tail] for row, (ids, tail) in enumerate(zip(prompts, tails, strict=True))}


@contextmanager
def started(
    engine: Engine, spec: EngineSpec, settings: Settings, truth: Truth, *, tolerance: float, vocab_size: int
) -> Iterator[Bench]:
    """Start an engine for the length of a block."""
    loop = LoopThread()
    life = _life(engine, spec, settings)
    try:
        link = loop.call(life.__aenter__())
        try:
            yield Bench(engine, link, settings, spec, loop, truth, tolerance, vocab_size)
        finally:
            loop.call(life.__aexit__(None, None, None))
    finally:
        loop.close()


@asynccontextmanager
async def _life(engine: Engine, spec: EngineSpec, settings: Settings) -> AsyncIterator[EngineLink]:
    link = EngineLink()
    try:
        await link.listen()
        await engine.start(spec, settings, link)
        yield link
    finally:
        await engine.stop()
        await link.close()
