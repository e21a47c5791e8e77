"""A job's canary: runs prompts through the engine and connector, as rows are, and through transformers.

The reference, transformers in its own process, may run while the engine starts, because neither needs the
other and both take a while.

Imports torch: import it lazily.
"""

import asyncio
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch

from connector.wire import RowRef
from schemas.dataset.errors import DatasetError
from schemas.dataset.manifest import CanaryReport, LayerAgreement
from schemas.dataset.shard import open_shard
from schemas.dataset.states import read_states
from schemas.names import canary_unit
from schemas.receipts import UnitSealed
from schemas.request import Dtype
from service.capture.answering import row_name
from service.capture.attempt_files import attempt_folder, open_attempt
from service.capture.engine import EngineSpec, Prompt
from service.capture.interruption import together, unless
from service.capture.receipt_errors import in_time, raise_failure, silent
from service.capture.session import EngineSession
from service.errors import EngineDied, EngineRefused, StatesWrong, WriteFailed
from service.memory import available_bytes
from service.plan.unit_plan import packed
from service.plan.units import PlannedSample
from service.proof.canary import JUDGED_TOKENS, States, canary_prompts, judge, judge_by_noise
from service.proof.head import Head
from service.proof.reference import Reference, reference_states
from service.settings import Settings
from service.store import Store, UnitLease, canaries

logger = logging.getLogger(__name__)

_EARLY_SHARE = 4
"""While the engine has not allocated its memory yet, the reference may use a quarter of the free memory.

That is half of what it may use otherwise.
"""


class Canary:
    """One job's canary, from the engine's start to the verdict. Leaving the context ends what still runs."""

    def __init__(self, lease: UnitLease, store: Store, settings: Settings) -> None:
        self._lease, self._store, self._settings = lease, store, settings
        self._reference: asyncio.Task[Reference] | None = None
        self._is_early = False

    async def __aenter__(self) -> Self:
        """Do nothing before `begin_early`, or else `run`."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the reference process, if it is running."""
        if self._reference is not None:
            self._reference.cancel()
            await asyncio.gather(self._reference, return_exceptions=True)

    async def begin_early(self, spec: EngineSpec, head: Head) -> None:
        """Start the reference while an engine for `spec` starts, if the canary is likely to run.

        If a canary of these states has passed before, this engine's has most likely passed, too, and the
        reference would be wasted.
        """
        prompts = _prompts(spec, head)
        states = canaries.states_digest(self._lease.identity)
        if self._lease.skips_canary or await self._passed(states, prompts) is not None:
            return
        max_bytes = self._settings.canary_max_bytes
        self._is_early = max_bytes is None
        if max_bytes is None:
            max_bytes = available_bytes() // _EARLY_SHARE
        self._begin(spec, prompts, max_bytes)

    async def has_passed(self, session: EngineSession) -> bool:
        """Say whether the canary is skipped, or passed before on such an engine, with prompts as long.

        Then the session has its report.
        """
        if self._lease.skips_canary:
            return True
        session.canary = await self._passed(self._digest(session), _prompts(session.spec, session.head))
        return session.canary is not None

    async def run(self, session: EngineSession, spec: EngineSpec) -> None:
        """Run it and record that it passed, in the store and in the session.

        `spec` is of the job's own model, read now: the engine may have been started from another folder with
        the same weights, which has changed since.

        Raises StatesWrong naming the layer, EngineRefused if there is no reference, EngineDied, WriteFailed.
        """
        identity, job_id = self._lease.identity, self._lease.attempt_id.job_id
        prompts = _prompts(session.spec, session.head)
        reference = self._reference or self._begin(spec, prompts, self._settings.canary_max_bytes)
        captured = await capture_prompts(self._lease, session, prompts)
        if not all(captured):
            missing = [row for row, layers in enumerate(captured) if not layers]
            raise EngineDied(f"the canary's prompts {missing} came back without states")
        try:
            expected = await reference
        except (EngineRefused, EngineDied) as error:
            if not self._is_early:
                raise
            logger.info("the reference runs again beside the engine: %s", error)
            expected = await self._begin(spec, prompts, None)
        passed = CanaryReport(
            job_id=job_id,
            prompts=len(prompts),
            tokens=sum(map(len, prompts)),
            layers=await self._judge(spec, prompts, captured, expected),
            reference=expected.library,
            seconds=round(expected.seconds, 3),
            peak_bytes=expected.peak_bytes,
        )
        for name in (self._digest(session), canaries.states_digest(identity)):
            await asyncio.to_thread(self._store.write, canaries.record, name, passed)
        session.canary = passed

    def _digest(self, session: EngineSession) -> str:
        return canaries.canary_digest(session.provenance(self._lease.attempt_id.job_id, self._lease.identity))

    async def _passed(self, digest: str, prompts: Sequence[Sequence[int]]) -> CanaryReport | None:
        passed = await asyncio.to_thread(self._store.read, canaries.report, digest)
        return passed if passed is not None and passed.tokens >= sum(map(len, prompts)) else None

    def _begin(
        self,
        spec: EngineSpec,
        prompts: Sequence[Sequence[int]],
        max_bytes: int | None,
        dtype: Dtype | None = None,
    ) -> asyncio.Task[Reference]:
        """Start the reference, in the job's dtype if none is given."""
        run = reference_states(
            spec.weights,
            prompts,
            dtype or self._lease.identity.dtype,
            max_bytes=max_bytes,
            timeout_s=self._settings.engine_start_timeout_s,
            last_tokens=JUDGED_TOKENS,
        )
        self._reference = asyncio.create_task(run)
        return self._reference

    async def _judge(
        self, spec: EngineSpec, prompts: Sequence[Sequence[int]], captured: States, expected: Reference
    ) -> tuple[LayerAgreement, ...]:
        """Judge by the reference in the job's dtype; if that fails, judge by its rounding noise."""
        identity = self._lease.identity
        layers = (identity.layer_ids, identity.num_layers, identity.dtype)
        bits = expected.activation_bits
        try:
            return await asyncio.to_thread(judge, captured, expected.states, *layers, bits)
        except StatesWrong as wrong:
            if identity.dtype == "float32" or bits is not None:
                raise
            try:
                exact = await self._begin(spec, prompts, self._settings.canary_max_bytes, "float32")
                return await asyncio.to_thread(
                    judge_by_noise, captured, expected.states, exact.states, *layers
                )
            except (EngineRefused, StatesWrong) as error:
                raise wrong from error


def _prompts(spec: EngineSpec, head: Head) -> list[list[int]]:
    """Return an engine's prompts: as long as a row of any job that it serves may be, which has no answer."""
    return canary_prompts(head.vocab_size, spec.max_model_len - 1)


async def capture_prompts(
    lease: UnitLease,
    session: EngineSession,
    prompts: Sequence[Sequence[int]],
    *,
    last_tokens: int = JUDGED_TOKENS,
    alone: bool = False,
    company: Sequence[Sequence[int]] = (),
) -> States:
    """Capture `prompts` beside a unit, as one of their own; return their states, none where not finite.

    The last of several may take its beginning from the prefix cache; every token of the others is computed.
    Of a longer prompt, those of its `last_tokens`. With `alone`, nothing else is in the engine meanwhile.
    With `company`, those prompts share it; all begin at once, and none reads the cache.

    Raises EngineDied, StatesWrong, DiskFull, WriteFailed.
    """
    link, settings, budget = session.link, session.settings, session.budget
    attempt_id = lease.attempt_id.model_copy(update={"unit": canary_unit(lease.item)})
    folder = attempt_folder(settings, attempt_id)
    beside = [*company, *prompts]
    plan = packed([_sample(row, ids) for row, ids in enumerate(beside)])
    # Uncompressed, whatever the job stores: the canary judges the capture.
    identity = lease.identity.model_copy(update={"compression": "none"})
    try:
        await open_attempt(link, settings, session.opening(attempt_id, len(beside), identity), plan)

        async def run(row: int, ids: Sequence[int], *, reads_cache: bool) -> None:
            name, ref = f"canary-{row_name(attempt_id, row)}", RowRef(attempt_id, row, len(ids))
            prompt = Prompt(name, tuple(ids), ref, reads_cache=reads_cache)
            # It may queue behind a unit's rows.
            if await unless(session.engine.run(prompt), budget.silence(settings.engine_silence_s)) is None:
                raise silent(settings.engine_silence_s)
            budget.heard()

        # Captured units wait for the answers: behind the rows of all that follow, a stop would lose them.
        if company:
            # For all at once: if they came one by one, as others leave, each might have a step to itself.
            async with budget.hold(sum(map(len, beside)), num_requests=len(beside), ahead=True):
                await together(run(row, ids, reads_cache=False) for row, ids in enumerate(beside))
        else:
            for row, ids in enumerate(prompts):
                async with budget.hold(len(ids), ahead=True, alone=alone):
                    # One after the other, so that the last prompt's prefix is in the cache when it comes.
                    await run(row, ids, reads_cache=0 < row == len(prompts) - 1)
        sealed = raise_failure(await in_time(link.receipts(attempt_id), settings.receipt_timeout_s))
        if dropped := sorted(row for receipt in sealed for row in receipt.void):
            raise EngineDied(f"the engine dropped prompts {dropped}, which ran beside unit {lease.item}")
        rows = range(len(company), len(beside))
        return await asyncio.to_thread(_read, folder, sealed, rows, last_tokens)
    finally:
        await link.abandon(attempt_id)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)  # or the sweeper


def _sample(row: int, ids: Sequence[int]) -> PlannedSample:
    return PlannedSample(
        position=row,
        sample_id=f"canary-{row}",
        source_id=f"canary-{row}",
        ids=np.asarray(ids, dtype=np.int32),
        mask=np.ones(len(ids), dtype=np.uint8),
    )


def _read(folder: Path, receipts: Sequence[UnitSealed], rows: range, last_tokens: int) -> States:
    """Return the states of `rows`, in order. Raises WriteFailed if a sealed file cannot be read back."""
    states: dict[int, dict[int, torch.Tensor]] = {row: {} for row in rows}
    for receipt in receipts:
        if receipt.file is None:
            continue
        try:
            with open_shard(folder / receipt.file) as shard:
                for place, row in enumerate(receipt.rows):
                    if row not in rows:
                        continue
                    layer_ids = shard.provenance.identity.layer_ids
                    states[row] = {
                        layer_id: read_states(shard, place, layer_id)[-last_tokens:].clone()
                        for layer_id in layer_ids
                    }
        except (DatasetError, OSError) as error:
            raise WriteFailed(f"the canary's file cannot be read back: {error}") from error
    return list(states.values())
