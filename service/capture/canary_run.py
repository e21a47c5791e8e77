"""Runs the canary before a job's first unit.

Its prompts go through the engine and the connector as rows do, and are read from a sealed file.

Imports torch: import it lazily.
"""

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from connector.wire import RowRef
from schemas.dataset.errors import DatasetError
from schemas.dataset.manifest import CanaryReport
from schemas.dataset.shard import open_shard
from schemas.dataset.states import read_states
from schemas.names import attempt_dir, canary_unit, plan_path
from schemas.receipts import UnitKey, UnitSealed
from service.capture.canary_reference import CanaryReference, run_reference
from service.capture.engine import Prompt
from service.capture.receipt_errors import in_time, raise_failure, silent
from service.capture.session import EngineSession
from service.errors import EngineDied, EngineRefused, StatesWrong, WriteFailed
from service.plan.unit_file import write_plan
from service.plan.units import PlannedSample
from service.proof.canary import canary_key, canary_prompts, judge, states_key
from service.proof.canary_noise import judge_by_noise
from service.proof.reference import Reference
from service.settings import Settings
from service.store import Store, UnitLease

States = list[dict[int, torch.Tensor]]
"""By prompt and layer id, [T, H]."""


async def ensure_canary(
    session: EngineSession, lease: UnitLease, store: Store, settings: Settings, reference: CanaryReference
) -> None:
    """Return at once if the canary is skipped or passed before; else run it and record that it passed.

    Raises StatesWrong naming the layer, EngineRefused where there is no reference, EngineDied, WriteFailed.
    """
    if lease.request.canary == "skip":
        return
    identity = lease.identity
    key = canary_key(session.provenance(lease.key.job_id, identity))
    if await asyncio.to_thread(store.canary, key) is not None:
        return
    prompts = canary_prompts(session.head.vocab_size, session.spec.max_model_len - 1)
    # Beside the capture: loading transformers takes longer than the engine needs for these prompts.
    reference.begin(session.spec.weights, prompts)
    captured = await _capture(session, lease, settings, prompts)
    expected = await reference.result()
    try:
        report = await asyncio.to_thread(
            judge,
            captured,
            expected.states,
            identity.layer_ids,
            identity.num_layers,
            identity.dtype,
            expected.activation_bits,
        )
    except StatesWrong as wrong:
        if identity.dtype == "float32" or expected.activation_bits is not None:
            raise
        report = await _judge_by_float32(session, lease, settings, prompts, captured, expected, wrong)
    passed = report.model_copy(
        update={
            "job_id": lease.key.job_id,
            "reference": expected.library,
            "seconds": round(expected.seconds, 3),
            "peak_bytes": expected.peak_bytes,
        }
    )
    for name in (key, states_key(identity)):
        await asyncio.to_thread(store.record_canary, name, passed.model_dump_json())


async def _judge_by_float32(
    session: EngineSession,
    lease: UnitLease,
    settings: Settings,
    prompts: Sequence[Sequence[int]],
    captured: Sequence[Mapping[int, torch.Tensor]],
    rounded: Reference,
    wrong: StatesWrong,
) -> CanaryReport:
    """Judge again, by the noise that rounding makes in the reference.

    Raises `wrong` if that does not explain the distance.
    """
    identity = lease.identity
    try:
        exact = await run_reference(session.spec.weights, settings, prompts, "float32")
        return await asyncio.to_thread(
            judge_by_noise,
            captured,
            rounded.states,
            exact.states,
            identity.layer_ids,
            identity.num_layers,
            identity.dtype,
        )
    except (EngineRefused, StatesWrong) as error:
        raise wrong from error


async def _capture(
    session: EngineSession, lease: UnitLease, settings: Settings, prompts: Sequence[Sequence[int]]
) -> States:
    """Capture `prompts` as a unit of their own and return their states."""
    key = UnitKey(job_id=lease.key.job_id, unit=canary_unit(lease.key.unit), epoch=lease.key.epoch)
    plan = settings.work_root / plan_path(key.job_id, key.unit)
    folder = settings.work_root / attempt_dir(key.job_id, key.unit, key.epoch)
    await asyncio.to_thread(write_plan, plan, [_sample(row, ids) for row, ids in enumerate(prompts)])
    # Uncompressed, whatever the job stores: the canary judges the capture.
    identity = lease.identity.model_copy(update={"compression": "none"})
    link = session.link
    try:
        await link.open(session.opening(key, len(prompts), identity))
        for row, ids in enumerate(prompts):
            # One after the other, so that the last prompt's prefix is in the cache when it comes.
            ref = RowRef(key, row, len(ids))
            prompt = Prompt(f"canary-{key.job_id}-{key.epoch}-{row}", tuple(ids), ref)
            try:
                await asyncio.wait_for(session.engine.run(prompt), settings.engine_silence_s)
            except TimeoutError as error:
                raise silent(settings.engine_silence_s) from error
        sealed = raise_failure(await in_time(link.receipts(key), settings.receipt_timeout_s))
        return await asyncio.to_thread(_read, folder, sealed, len(prompts))
    finally:
        await link.abandon(key)
        await asyncio.to_thread(_remove, plan, folder)


def _sample(row: int, ids: Sequence[int]) -> PlannedSample:
    return PlannedSample(
        position=row,
        sample_id=f"canary-{row}",
        source_id=f"canary-{row}",
        ids=np.asarray(ids, dtype=np.int32),
        mask=np.ones(len(ids), dtype=np.uint8),
    )


def _read(folder: Path, receipts: Sequence[UnitSealed], num_prompts: int) -> States:
    """Raise WriteFailed if a sealed file cannot be read back, EngineDied if a prompt has no states."""
    states: States = [{} for _ in range(num_prompts)]
    for receipt in receipts:
        if receipt.file is None:
            continue
        try:
            with open_shard(folder / receipt.file) as shard:
                for place, row in enumerate(receipt.rows):
                    layer_ids = shard.provenance.identity.layer_ids
                    states[row] = {layer_id: read_states(shard, place, layer_id) for layer_id in layer_ids}
        except (DatasetError, OSError) as error:
            raise WriteFailed(f"the canary's file cannot be read back: {error}") from error
    if not all(states):
        missing = [row for row, layers in enumerate(states) if not layers]
        raise EngineDied(f"the canary's prompts {missing} came back without states")
    return states


def _remove(plan: Path, folder: Path) -> None:
    """Remove the canary's files. What cannot be removed now is left to the sweeper."""
    with suppress(OSError):
        plan.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
