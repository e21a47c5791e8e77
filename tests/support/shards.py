"""Small sealed attempts and datasets of given states, written by pyarrow alone.

Not the connector's writer.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import xxhash

from schemas.dataset.columns import METADATA_KEY, PLAN_SCHEMA, shard_schema
from schemas.dataset.entries import FileEntry, LayerStats, ShardEntry
from schemas.dataset.index import Witness, write_index
from schemas.dataset.manifest import CanaryReport, CheckReport, LayerAgreement, Manifest, Totals
from schemas.dataset.seal import sha256_of
from schemas.dataset.shard import LightRow, open_shard
from schemas.dataset.token_counts import packed_counts, vocabulary_stats
from schemas.identity import DTYPE_BYTES, Identity, Provenance
from schemas.names import (
    FINAL_NORM_PATH,
    index_path,
    manifest_path,
    shard_file,
    shard_path,
    token_freq_path,
)
from schemas.receipts import AttemptId, UnitSealed
from schemas.request import ExtractRequest
from service.proof.head import Head
from tests.support.parquet import footer_xxh3, writer_options, xxh3_of
from tests.support.plans import JOB, identity, provenance, sample_id
from tests.support.reference_models import HIDDEN_SIZE, NUM_LAYERS, VOCAB_SIZE, TinyModel

LAYER_IDS = (1, 2, NUM_LAYERS)
LENGTHS = (1, 7, 16, 17, 33)


@dataclass(frozen=True, slots=True)
class ShardRow:
    """One row to write. `states` are [T, H] by layer id; `checksums` overrides the true ones."""

    sample_id: str
    source_id: str | None
    prompt_tokens: int
    input_ids: list[int]
    loss_mask: list[int]
    states: dict[int, torch.Tensor]
    checksums: list[int] | None = None


def raw_bytes(states_TH: torch.Tensor) -> bytes:
    """Return a tensor's own bytes."""
    return states_TH.contiguous().view(torch.uint8).numpy().tobytes()


def stored_bytes(states_TH: torch.Tensor, about: Identity) -> bytes:
    """Return the bytes that a layer's checksum is over: its own, or its codes and then its scales."""
    if about.compression != "fp8":
        return raw_bytes(states_TH)
    wide_TH = states_TH.float()
    bits_T = (wide_TH.abs().amax(dim=1) / 448).view(torch.int32)
    scales_T = ((bits_T >> 4) << 4).view(torch.float32).clamp(min=2.0**-126)
    codes_TH = (wide_TH / scales_T[:, None]).to(torch.float8_e4m3fn)
    return raw_bytes(codes_TH) + raw_bytes(scales_T)


def write_shard(path: Path, rows: Sequence[ShardRow], told: Provenance) -> None:
    """Write `rows` as a shard, one row group each."""
    about = told.identity
    schema = shard_schema(about.layer_ids, about.hidden_size, about.dtype, about.compression)
    schema = schema.with_metadata({METADATA_KEY: told.model_dump_json().encode()})
    path.parent.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(path, schema, **writer_options(schema)) as file:
        for row in rows:
            raw = {layer_id: stored_bytes(states, about) for layer_id, states in row.states.items()}
            values = {
                "sample_id": row.sample_id,
                "source_id": row.source_id,
                "num_tokens": len(row.input_ids),
                "prompt_tokens": row.prompt_tokens,
                "hidden_size": about.hidden_size,
                "input_ids": row.input_ids,
                "loss_mask": row.loss_mask,
                "checksums": row.checksums or [xxhash.xxh3_64_intdigest(raw[k]) for k in about.layer_ids],
            }
            width = DTYPE_BYTES[about.dtype]
            for layer_id in about.layer_ids:
                if about.compression == "none":
                    values[f"layer_{layer_id}"] = raw[layer_id]
                elif about.compression == "fp8":
                    num_codes = row.states[layer_id].numel()
                    values[f"layer_{layer_id}"] = raw[layer_id][:num_codes]
                    values[f"layer_{layer_id}_scale"] = raw[layer_id][num_codes:]
                else:
                    data = bytearray(raw[layer_id])
                    values[f"layer_{layer_id}_hi"] = bytes(data[width - 1 :: width])
                    del data[width - 1 :: width]
                    values[f"layer_{layer_id}_lo"] = bytes(data)
            file.write_table(pa.Table.from_pylist([values], schema=schema), row_group_size=1)


def plan_of(rows: Sequence[ShardRow]) -> pa.Table:
    """Return the frozen samples that `rows` were captured from."""
    columns = [
        {
            "position": position,
            "sample_id": row.sample_id,
            "source_id": row.source_id,
            "prompt_tokens": row.prompt_tokens,
            "input_ids": row.input_ids,
            "loss_mask": row.loss_mask,
        }
        for position, row in enumerate(rows)
    ]
    return pa.Table.from_pylist(columns, schema=PLAN_SCHEMA)


@dataclass(frozen=True, slots=True)
class Capture:
    """What a right engine would give for one unit.

    Rows of all `LENGTHS`, and its word on each last token.
    """

    model: TinyModel
    about: Identity
    rows: list[ShardRow]
    witnesses: dict[int, Witness]

    @property
    def provenance(self) -> Provenance:
        told = provenance(self.about, engine=("transformers", "1"))
        return told.model_copy(update={"final_norm": self.model.final_norm})


def capture(
    model: TinyModel, *, dtype: str, unit: int = 0, lengths: Sequence[int] = LENGTHS, **changes: object
) -> Capture:
    """Run `model` over one unit's samples."""
    layer_ids = changes.pop("layer_ids", LAYER_IDS)
    about = identity(
        layer_ids=layer_ids, hidden_size=HIDDEN_SIZE, num_layers=NUM_LAYERS, dtype=dtype, **changes
    )
    draw = torch.Generator().manual_seed(100 + unit)
    rows, witnesses = [], {}
    for row, length in enumerate(lengths):
        ids = torch.randint(0, VOCAB_SIZE, (length,), generator=draw).tolist()
        says = model.run(ids)
        source = f"row {row}" if row % 2 else None
        mask = [int(place >= length // 2) for place in range(length)]
        states = {layer_id: says.layers[layer_id] for layer_id in layer_ids}
        rows.append(ShardRow(sample_id(source, ids, mask), source, length, ids, mask, states))
        witnesses[row] = says.witness
    return Capture(model, about, rows, witnesses)


def seal_attempt(
    folder: Path,
    told: Provenance,
    rows: Mapping[int, ShardRow],
    *,
    rank: int = 0,
    num_ranks: int = 1,
) -> UnitSealed:
    """Write one rank's rows, by plan row in file order, and return the receipt of the file."""
    path = folder / shard_file(0, rank, num_ranks)
    write_shard(path, list(rows.values()), told)
    return UnitSealed(
        attempt_id=AttemptId(job_id=told.job_id, unit=0, epoch=1),
        rank=rank,
        file=path.name,
        xxh3=xxh3_of(path),
        footer_xxh3=footer_xxh3(path.read_bytes()),
        bytes=path.stat().st_size,
        rows=tuple(rows),
        num_tokens=tuple(len(row.input_ids) for row in rows.values()),
        layers=tuple(LayerStats(layer_id=k, mean_rms=1.0, max_abs=1.0) for k in told.identity.layer_ids),
    )


def with_states(row: ShardRow, layer_id: int, states_TH: torch.Tensor) -> ShardRow:
    """Return `row` with other states in one layer, checksummed like any others."""
    return replace(row, states=row.states | {layer_id: states_TH})


def entry_of(folder: Path, path: str) -> FileEntry:
    """Return the manifest's entry of a file as it is now."""
    digest, num_bytes = sha256_of(folder / path)
    return FileEntry(path=path, sha256=digest, bytes=num_bytes)


def supervised_ids(row: ShardRow) -> list[int]:
    """Return the supervised token ids of a row."""
    return [token for token, flag in zip(row.input_ids, row.loss_mask, strict=True) if flag]


def passed_canary(job_id: str, layer_ids: Sequence[int]) -> CanaryReport:
    """Return the numbers of a canary that passed for a job."""
    layers = tuple(
        LayerAgreement(layer_id=k, cosine=0.9999, max_rel_error=0.00123, best_match_layer=k)
        for k in layer_ids
    )
    cost = {"reference": "transformers 5.19.0", "seconds": 4.5, "peak_bytes": 500_000_000}
    return CanaryReport(job_id=job_id, prompts=4, tokens=276, layers=layers, **cost)


def write_manifest(folder: Path, told: Provenance, units: Mapping[int, Sequence[ShardRow]]) -> Manifest:
    """Write the manifest of what stands in `folder` now, one shard a unit."""
    shards = tuple(
        ShardEntry(
            **entry_of(folder, shard_path(told.job_id, unit)).model_dump(),
            xxh3=xxh3_of(folder / shard_path(told.job_id, unit)),
            rows=len(rows),
            tokens=sum(len(row.input_ids) for row in rows),
            unit=unit,
            epoch=1,
            layers=tuple(LayerStats(layer_id=k, mean_rms=1.0, max_abs=1.0) for k in told.identity.layer_ids),
        )
        for unit, rows in units.items()
    )
    counts = Counter([token for rows in units.values() for row in rows for token in supervised_ids(row)])
    freq = token_freq_path(told.job_id)
    (folder / freq).parent.mkdir(exist_ok=True)
    (folder / freq).write_bytes(packed_counts(counts))
    num_rows = sum(len(rows) for rows in units.values())
    request = {"model": told.identity.model, "source": {"kind": "inline", "samples": [{"text": "a"}]}}
    manifest = Manifest(
        provenance=told,
        identity_sha256=told.identity.sha256(),
        request=ExtractRequest.model_validate(request).published(),
        request_sha256=ExtractRequest.model_validate(request).sha256(),
        shards=shards,
        indexes=tuple(entry_of(folder, index_path(told.job_id, unit)) for unit in units),
        extras=(entry_of(folder, FINAL_NORM_PATH), entry_of(folder, freq)),
        rejects=(),
        totals=Totals(
            samples_planned=num_rows,
            samples_written=num_rows,
            samples_rejected=0,
            tokens=sum(entry.tokens for entry in shards),
            supervised_tokens=sum(sum(row.loss_mask) for rows in units.values() for row in rows),
            bytes=sum(entry.bytes for entry in shards),
        ),
        checks=CheckReport(
            rows_checked=num_rows,
            logit_rows=0,
            logit_argmax_agree=0,
            logit_max_error=0.0,
            canary="passed",
            canary_report=passed_canary(told.job_id, told.identity.layer_ids),
        ),
        vocabulary=vocabulary_stats(counts),
        captured_at=datetime(2026, 11, 1, 3, 30, tzinfo=UTC),
    )
    path = folder / manifest_path(told.job_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(manifest.model_dump_json(indent=1))
    return manifest


def light_rows(file: Path) -> tuple[LightRow, ...]:
    """Return a shard's rows without their states."""
    with open_shard(file) as shard:
        return shard.light


def write_unit(folder: Path, captured: Capture, rows: Sequence[ShardRow], unit: int) -> None:
    """Write one unit's shard of `rows` with its index, whose witnesses are the captured ones."""
    told = captured.provenance
    file, path = folder / shard_path(JOB, unit), shard_path(JOB, unit)
    write_shard(file, rows, told)
    plan, index = plan_of(captured.rows), index_path(JOB, unit)
    write_index(folder / index, index, {path: light_rows(file)}, plan, captured.witnesses)


def write_dataset(folder: Path, units: Mapping[int, Capture]) -> Manifest:
    """Write a whole finished dataset of one job."""
    for unit, captured in units.items():
        write_unit(folder, captured, captured.rows, unit)
    first = next(iter(units.values()))
    norm = Head.load(first.model.folder, first.about.dtype).final_norm_file
    (folder / FINAL_NORM_PATH).write_bytes(norm)
    (folder / "README.md").write_text("a card\n")
    return write_manifest(folder, first.provenance, {unit: one.rows for unit, one in units.items()})
