"""Frozen plans and orders for tests that begin behind the planner."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from connector.wire import DrainConfig
from schemas.dataset.columns import PLAN_SCHEMA
from schemas.dataset.seal import sealing
from schemas.identity import EngineInfo, FinalNorm, Identity, Provenance, layer_info
from schemas.names import PLAN_FILE, attempt_dir, job_id_from_content
from schemas.receipts import AttemptId, OpenUnit
from service.plan.units import Tokenized, sample_digest

JOB = job_id_from_content("a test")


def identity(
    *,
    layer_ids: tuple[int, ...] = (2, 4, 8),
    hidden_size: int = 16,
    dtype: str = "bfloat16",
    num_layers: int = 8,
    **changes: object,
) -> Identity:
    """Return an identity that only its shape matters of."""
    values: dict[str, object] = {
        "model": "a/model",
        "revision": "0" * 40,
        "dtype": dtype,
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "layer_ids": layer_ids,
        "tokenizer_sha256": "1" * 64,
        "template_sha256": None,
        "source_fingerprint": "2" * 64,
        "loss": "all",
        "max_tokens": 4096,
        "on_too_long": "reject",
        "generate": None,
        "capture": None,
        "compression": "none",
    }
    return Identity.model_validate(values | changes)


def provenance(about: Identity, job_id: str = JOB, engine: tuple[str, str] = ("test", "1")) -> Provenance:
    """Return the provenance of a job's units by an engine of this name and version."""
    name, version = engine
    return Provenance(
        job_id=job_id,
        identity=about,
        layers=tuple(layer_info(layer_id, about.num_layers) for layer_id in about.layer_ids),
        final_norm=FinalNorm(kind="rmsnorm", eps=1e-6),
        engine=EngineInfo(name=name, version=version, device="cpu", options={}),
        service_version="0.1.0",
    )


def rank_config(work_root: Path, rank: int = 0, num_ranks: int = 1) -> DrainConfig:
    """Return the set-up of a rank with two writer threads."""
    return DrainConfig(work_root, work_root / "socket", 2**20, 2, rank, num_ranks, "0.32.0")


def random_ids(lengths: Sequence[int], *, vocab_size: int = 500, seed: int = 0) -> list[list[int]]:
    """Return token ids of the given lengths."""
    draw = np.random.default_rng(seed)
    return [draw.integers(0, vocab_size, length).tolist() for length in lengths]


def sample_id(source_id: str | None, ids: Sequence[int], mask: Sequence[int]) -> str:
    """Return a sample's id."""
    content = Tokenized(np.asarray(ids, np.int32), np.asarray(mask, np.uint8))
    return sample_digest(source_id or "", content).hex()


def write_plan(
    work_root: Path, token_ids: Sequence[Sequence[int]], *, unit: int = 0, epoch: int = 1, job_id: str = JOB
) -> Path:
    """Write the plan of an attempt where the connector reads it; every token is supervised."""
    path = work_root / attempt_dir(job_id, unit, epoch) / PLAN_FILE
    names = [sample_id(f"row {row}", ids, [1] * len(ids)) for row, ids in enumerate(token_ids)]
    table = pa.table(
        {
            "position": pa.array(range(len(token_ids)), pa.int64()),
            "sample_id": names,
            "source_id": [f"row {row}" for row in range(len(token_ids))],
            "prompt_tokens": pa.array([len(ids) for ids in token_ids], pa.int32()),
            "input_ids": pa.array([list(ids) for ids in token_ids], PLAN_SCHEMA.field("input_ids").type),
            "loss_mask": pa.array([[1] * len(ids) for ids in token_ids], PLAN_SCHEMA.field("loss_mask").type),
        },
        schema=PLAN_SCHEMA,
    )
    with sealing(path) as temp:
        pq.write_table(table, temp)
    return path


def order(about: Identity, num_rows: int, *, unit: int = 0, epoch: int = 1) -> OpenUnit:
    """Return the order that opens an attempt."""
    return OpenUnit(
        attempt_id=AttemptId(job_id=JOB, unit=unit, epoch=epoch),
        num_rows=num_rows,
        compression=about.compression,
        provenance=provenance(about),
    )
