"""Runs the canary before a job's first unit.

Its prompts take the very path that rows take, and are read from a sealed file.

Imports torch: import it lazily.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from connector.wire import RowRef
from schemas.dataset.errors import DatasetError
from schemas.dataset.manifest import CanaryReport
from schemas.dataset.shard import open_shard
from schemas.dataset.states import read_states
from schemas.names import attempt_dir, canary_unit, plan_path
from schemas.receipts import OpenUnit, UnitKey, UnitSealed
from schemas.request import Dtype
from service.capture.engine import Prompt
from service.capture.receipt_errors import in_time, raise_failure, silent
from service.capture.running import Running
from service.errors import EngineDied, EngineRefused, StatesWrong, WriteFailed
from service.plan.plan_file import write_plan
from service.plan.planner import PlannedSample
from service.proof.canary import canary_key, canary_prompts, judge, states_key
from service.proof.canary_noise import judge_by_noise
from service.proof.reference import Reference, reference_states
from service.settings import Settings
from service.store import Store, UnitLease

if TYPE_CHECKING:
    from service.capture.reference_ahead import ReferenceAhead


async def ensure_canary(
    running: Running,
    lease: UnitLease,
    store: Store,
    settings: Settings,
    ahead: "ReferenceAhead | None" = None,
) -> None:
    """Return at once if the canary is skipped or passed before; else run it and record that it passed.

    The reference is the one begun `ahead`, where there is one. Raises StatesWrong naming the layer,
    EngineRefused where there is no reference, EngineDied.
    """
    if lease.request.canary == "skip":
        return
    key = canary_key(running.provenance(lease.key.job_id, lease.identity))
    if await asyncio.to_thread(store.canary, key) is not None:
        return
    prompts = canary_prompts(running.head.vocab_size, running.spec.max_model_len - 1)
    # Beside the capture: loading transformers takes longer than the engine needs for these prompts.
    referring = asyncio.create_task(_reference(running, settings, prompts, lease.identity.dtype, ahead))
    try:
        captured = await _capture(running, lease, settings, prompts)
        reference = await referring
    finally:
        referring.cancel()
        await asyncio.gather(referring, return_exceptions=True)
    about = (lease.identity.layer_ids, lease.identity.num_layers, lease.identity.dtype)
    try:
        report = await asyncio.to_thread(judge, captured, reference.states, *about, reference.activation_bits)
    except StatesWrong as wrong:
        if lease.identity.dtype == "float32" or reference.activation_bits is not None:
            raise
        report = await _second_look(running, settings, prompts, captured, reference, about, wrong)
    told = report.model_copy(
        update={
            "job_id": lease.key.job_id,
            "reference": reference.library,
            "seconds": round(reference.seconds, 3),
            "peak_bytes": reference.peak_bytes,
        }
    )
    for name in (key, states_key(lease.identity)):
        await asyncio.to_thread(store.record_canary, name, told.model_dump_json())


async def refer(
    weights: Path,
    settings: Settings,
    prompts: Sequence[Sequence[int]],
    dtype: Dtype,
    max_bytes: int | None = None,
) -> Reference:
    """Run the reference within the settings' bounds, or in `max_bytes`. Raises EngineRefused."""
    return await reference_states(
        weights,
        prompts,
        dtype,
        max_bytes=settings.canary_max_bytes if max_bytes is None else max_bytes,
        timeout_s=settings.engine_start_timeout_s,
    )


async def _reference(
    running: Running,
    settings: Settings,
    prompts: Sequence[Sequence[int]],
    dtype: Dtype,
    ahead: "ReferenceAhead | None",
) -> Reference:
    begun = await ahead.reference(prompts) if ahead is not None else None
    return begun if begun is not None else await refer(running.spec.weights, settings, prompts, dtype)


async def _second_look(
    running: Running,
    settings: Settings,
    prompts: Sequence[Sequence[int]],
    captured: Sequence[Mapping[int, torch.Tensor]],
    rounded: Reference,
    about: tuple[Sequence[int], int, Dtype],
    wrong: StatesWrong,
) -> CanaryReport:
    """Return what the float32 reference says; raise what was `wrong` if that does not explain it."""
    try:
        exact = await refer(running.spec.weights, settings, prompts, "float32")
        return await asyncio.to_thread(judge_by_noise, captured, rounded.states, exact.states, *about)
    except (EngineRefused, StatesWrong) as error:
        raise wrong from error


async def _capture(
    running: Running, lease: UnitLease, settings: Settings, prompts: Sequence[Sequence[int]]
) -> list[dict[int, torch.Tensor]]:
    """Capture `prompts` as a unit of their own; return by prompt and layer id the states [T, H]."""
    key = UnitKey(job_id=lease.key.job_id, unit=canary_unit(lease.key.unit), epoch=lease.key.epoch)
    plan = settings.work_root / plan_path(key.job_id, key.unit)
    folder = settings.work_root / attempt_dir(key.job_id, key.unit, key.epoch)
    await asyncio.to_thread(write_plan, plan, [_sample(row, ids) for row, ids in enumerate(prompts)])
    # As the engine has them, whatever the job stores: the canary judges the capture.
    about = lease.identity.model_copy(update={"compression": "none"})
    order = OpenUnit(
        key=key,
        num_rows=len(prompts),
        compression=about.compression,
        provenance=running.provenance(key.job_id, about),
    )
    link = running.link
    try:
        await link.open(order)
        for row, ids in enumerate(prompts):
            # One after the other, so that the last prompt's prefix is in the cache when it comes.
            ref = RowRef(key, row, len(ids))
            prompt = Prompt(f"canary-{key.job_id}-{key.epoch}-{row}", tuple(ids), ref)
            try:
                await asyncio.wait_for(running.engine.run(prompt), settings.engine_silence_s)
            except TimeoutError as error:
                raise silent(settings.engine_silence_s) from error
        sealed = raise_failure(await in_time(link.receipts(key), settings.receipt_timeout_s))
        return await asyncio.to_thread(_read, folder, sealed, len(prompts))
    finally:
        await link.abandon(key)
        await asyncio.to_thread(_clear, plan, folder)


def _sample(row: int, ids: Sequence[int]) -> PlannedSample:
    return PlannedSample(
        position=row,
        sample_id=f"canary-{row}",
        source_id=f"canary-{row}",
        ids=np.asarray(ids, dtype=np.int32),
        mask=np.ones(len(ids), dtype=np.uint8),
    )


def _read(folder: Path, receipts: Sequence[UnitSealed], num_prompts: int) -> list[dict[int, torch.Tensor]]:
    states: list[dict[int, torch.Tensor]] = [{} for _ in range(num_prompts)]
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


def _clear(plan: Path, folder: Path) -> None:
    plan.unlink(missing_ok=True)
    if folder.is_dir():
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
