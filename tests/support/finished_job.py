"""A job whose units are done and whose files have landed: shards of random states, indexes, its account."""

from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save

from schemas.dataset.entries import FileEntry, LayerStats, ShardEntry
from schemas.dataset.index import write_index
from schemas.dataset.manifest import CanaryReport, Manifest, UnitChecks
from schemas.dataset.token_counts import packed_counts, read_counts
from schemas.identity import DTYPE_BYTES, Identity, Provenance
from schemas.job import Progress, RejectView
from schemas.names import index_path, job_id_from_content, shard_path
from schemas.receipts import AttemptId
from schemas.request import ExtractRequest, HubTarget, Storage
from schemas.source import InlineSource, Sample
from service.publish.assemble import Account, assemble
from service.store import NewJob, PlannedUnit, Store, UnitCommit, canaries, commits, jobs, plans, units
from tests.support.parquet import xxh3_of
from tests.support.plans import identity, provenance
from tests.support.shards import ShardRow, entry_of, light_rows, passed_canary, plan_of, write_shard

JOB = job_id_from_content("first")
OTHER_JOB = job_id_from_content("second")
LAYERS = (2, 4)
HIDDEN = 8
NORM_TOLD = {"final_norm": '{"kind":"rmsnorm","eps":1e-6}'}
FINAL_NORM = save({"weight": np.ones(HIDDEN, np.float32)}, metadata=NORM_TOLD)
OTHER_NORM = save({"weight": np.zeros(HIDDEN, np.float32)}, metadata=NORM_TOLD)
OWNER = "test"
TTL_S = 600.0
CAPTURED_AT = datetime(2026, 11, 1, 3, 30, tzinfo=UTC)


def row_tokens(unit: int, row: int) -> list[int]:
    """Return the token ids of a row: as many as tell units and rows apart."""
    return [unit, row, 7, 7][: 2 + (unit + row) % 3]


def layer_bytes(unit: int, row: int, layer_id: int, dtype: str = "bfloat16") -> bytes:
    """Return the states of a layer; they end in zero bytes, which a careless reader strips."""
    draw = np.random.default_rng((unit, row, layer_id))
    num_bytes = len(row_tokens(unit, row)) * HIDDEN * DTYPE_BYTES[dtype]
    return draw.integers(0, 100, num_bytes - 4, dtype=np.uint8).tobytes() + bytes(4)


def an_identity(
    compression: str = "none", layer_ids: tuple[int, ...] = LAYERS, **changes: object
) -> Identity:
    """Return the identity of the job's dataset."""
    values: dict[str, object] = {
        "model": "org/model",
        "revision": "c0ffee",
        "template_sha256": "3" * 64,
        "loss": "assistant",
        "max_tokens": 64,
    }
    return identity(
        layer_ids=layer_ids, hidden_size=HIDDEN, num_layers=4, compression=compression, **values | changes
    )


def a_request(hub: HubTarget | None = None, compression: str = "none") -> ExtractRequest:
    """Return a request that the job may have come from."""
    source = InlineSource(kind="inline", samples=(Sample(text="hello"),))
    return ExtractRequest(
        model="org/model", layers=LAYERS, source=source, hub=hub, storage=Storage(compression=compression)
    )


def land_files(
    dataset: Path, job_id: str, about: Identity, unit: int, epoch: int, rows: int
) -> tuple[ShardEntry, FileEntry, Counter[int]]:
    """Write a unit's shard and index where landing puts them; return their entries, and its token counts."""
    tokens = [row_tokens(unit, row) for row in range(rows)]
    dtype = getattr(torch, about.dtype)
    shard_rows = [
        ShardRow(
            sample_id=f"{job_id}-{unit}-{row}",
            source_id=f"row {row}",
            prompt_tokens=len(ids),
            input_ids=ids,
            loss_mask=[0] + [1] * (len(ids) - 1),
            states={
                layer_id: torch.frombuffer(
                    bytearray(layer_bytes(unit, row, layer_id, about.dtype)), dtype=dtype
                ).view(-1, HIDDEN)
                for layer_id in about.layer_ids
            },
        )
        for row, ids in enumerate(tokens)
    ]
    shard, index = shard_path(job_id, unit), index_path(job_id, unit)
    write_shard(dataset / shard, shard_rows, a_provenance(job_id, about))
    index_entry, counts = write_index(
        dataset / index, index, {shard: light_rows(dataset / shard)}, plan_of(shard_rows), {}
    )
    entry = ShardEntry(
        **entry_of(dataset, shard).model_dump(),
        xxh3=xxh3_of(dataset / shard),
        rows=rows,
        tokens=sum(len(ids) for ids in tokens),
        unit=unit,
        epoch=epoch,
        layers=tuple(LayerStats(layer_id=k, mean_rms=1.0, max_abs=2.0) for k in about.layer_ids),
    )
    return entry, index_entry, counts


def a_provenance(job_id: str, about: Identity) -> Provenance:
    """Return the provenance of the job's units."""
    return provenance(about, job_id, ("vllm", "0.32.0"))


def a_reject(position: int) -> RejectView:
    """Return the reject of a sample."""
    return RejectView(position=position, source_id=None, sample_id=None, reason="empty", detail="no tokens")


def a_commit(dataset: Path, attempt_id: AttemptId, about: Identity, rows: int) -> UnitCommit:
    """Write a unit's files and return its commit."""
    shard, index, counts = land_files(
        dataset, attempt_id.job_id, about, attempt_id.unit, attempt_id.epoch, rows
    )
    return UnitCommit(
        attempt_id=attempt_id,
        provenance=a_provenance(attempt_id.job_id, about),
        shards=(shard,),
        index=index,
        rejects=(),
        num_tokens=shard.tokens,
        supervised_tokens=counts.total(),
        checks=UnitChecks(
            rows_checked=rows, logit_rows=1, logit_argmax_agree=1, logit_max_error=0.25 + attempt_id.unit
        ),
        final_norm=FINAL_NORM,
        token_counts=packed_counts(counts),
    )


def an_account(
    dataset: Path,
    job_id: str = JOB,
    *,
    num_units: int = 2,
    rows: int = 3,
    rejects: int = 1,
    hub: HubTarget | None = None,
    about: Identity | None = None,
    captured_at: datetime = CAPTURED_AT,
) -> Account:
    """Write a job's files into `dataset` and return what the store would say of it."""
    about = about or an_identity()
    keys = [AttemptId(job_id=job_id, unit=unit, epoch=1) for unit in range(num_units)]
    commits = tuple(a_commit(dataset, key, about, rows) for key in keys)
    counts = Counter[int]()
    for made in commits:
        counts.update(read_counts(made.token_counts, "counts"))
    return Account(
        job_id=job_id,
        request=a_request(hub, about.compression),
        provenance=a_provenance(job_id, about),
        progress=Progress(samples_planned=num_units * rows + rejects),
        commits=commits,
        rejects=tuple(a_reject(num_units * rows + number) for number in range(rejects)),
        token_counts=counts,
        captured_at=captured_at,
        attempt="1",
    )


def a_canary(job_id: str = JOB) -> CanaryReport:
    """Return the numbers of a canary that passed for `job_id`."""
    return passed_canary(job_id, LAYERS)


def a_dataset(
    dataset: Path, job_id: str = JOB, *, final_norm: bytes = FINAL_NORM, **changes: object
) -> Manifest:
    """Make a complete dataset folder of one job; another job's stays in it."""
    account = an_account(dataset, job_id, **changes)
    canary = passed_canary(job_id, account.provenance.identity.layer_ids)
    return assemble(dataset, account, final_norm, "passed", canary)


def run_to_publishing(
    store: Store,
    dataset: Path,
    job_id: str,
    request: ExtractRequest,
    *,
    num_units: int = 2,
    rows: int = 3,
    canary: bool = True,
    captured: int | None = None,
) -> None:
    """Take a job through the store until only its publishing is left; its last sample is rejected.

    Of its units only the first few, if it says how many are `captured`.
    """
    if canary:
        key = canaries.canary_digest(a_provenance(job_id, an_identity()))
        store.write(canaries.record, key, a_canary(job_id))
    store.write(jobs.submit, NewJob.of(job_id, job_id, request))
    plan = plans.lease(store, OWNER, TTL_S)
    assert plan is not None
    store.write(plans.set_identity, plan, an_identity())
    tokens = [sum(len(row_tokens(unit, row)) for row in range(rows)) for unit in range(num_units)]
    for unit in range(num_units):
        store.write(plans.add_unit, plan, PlannedUnit(unit, rows, tokens[unit], b"a plan"), ())
    store.write(plans.finish, plan, [a_reject(num_units * rows)])
    for _ in range(num_units if captured is None else captured):
        capture_unit(store, dataset, rows)


def capture_unit(store: Store, dataset: Path, rows: int = 3) -> None:
    """Commit the lowest unit, with its files in place."""
    lease = units.lease(store, OWNER, TTL_S)
    assert lease is not None
    store.write(commits.commit, a_commit(dataset, lease.attempt_id, lease.identity, rows), lease)
