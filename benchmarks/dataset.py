"""Units and whole datasets of random states, sealed by our writer, without an engine.

Legend: L captured layers, T tokens, H hidden size.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from connector.repeats import RepeatCheck
from connector.shards import UnitWriter
from connector.sums import Sums
from connector.wire import DrainJob, RowRef, hash_ids
from schemas.dataset.entries import ShardEntry
from schemas.dataset.index import write_index
from schemas.dataset.manifest import UnitChecks
from schemas.dataset.norm import NormWeights, norm_bytes
from schemas.dataset.seal import sha256_of
from schemas.dataset.shard import open_shard
from schemas.dataset.tables import read_plan_table
from schemas.identity import Identity
from schemas.job import Progress
from schemas.names import attempt_dir, index_path, shard_path
from schemas.receipts import UnitSealed
from schemas.request import ExtractRequest
from service.publish.assemble import Account, assemble
from service.store import UnitCommit
from tests.support.plans import JOB, identity, order, provenance, random_ids, rank_config, write_plan
from tests.support.sums import token_sums

LAYER_IDS, HIDDEN_SIZE = (2, 16, 29, 32), 4096
"""Of an 8B model: 32 KiB of states a token in bfloat16."""


def model_identity(hidden_size: int = HIDDEN_SIZE) -> Identity:
    """Return the identity of a model whose layers `LAYER_IDS` are captured."""
    return identity(layer_ids=LAYER_IDS, hidden_size=hidden_size, num_layers=LAYER_IDS[-1])


def write_unit(
    folder: Path,
    model: Identity,
    ids: Sequence[Sequence[int] | np.ndarray],
    rows: Iterable[tuple[torch.Tensor, Sums]],
    *,
    unit: int = 0,
    cache_tokens: int,
) -> UnitSealed:
    """Write states [L, T, H] with their copy sums as an engine's writer does, and seal the unit's file.

    The unit's plan is in `folder` already; `cache_tokens` as with `RepeatCheck`.
    """
    unit_order = order(model, len(ids), unit=unit)
    writer = UnitWriter(unit_order, rank_config(folder), RepeatCheck(len(model.layer_ids), cache_tokens))
    for row, (row_ids, (states_LTH, sums)) in enumerate(zip(ids, rows, strict=True)):
        ref = RowRef(unit_order.attempt_id, row, len(row_ids))
        writer.write(DrainJob(str(row), ref, len(row_ids), (), hash_ids(row_ids), ()), states_LTH, sums)
    return writer.seal()


@dataclass(frozen=True, slots=True)
class Shape:
    """`num_rows` rows of `shortest` to `longest` tokens; H of an 8B model unless a test wants less."""

    num_rows: int
    shortest: int = 128
    longest: int = 896
    hidden_size: int = HIDDEN_SIZE

    @property
    def lengths(self) -> list[int]:
        """T of every row, the same in every run."""
        draw = np.random.default_rng(0)
        return [int(length) for length in draw.integers(self.shortest, self.longest + 1, self.num_rows)]

    @property
    def state_bytes(self) -> int:
        """Bytes of all states: bfloat16."""
        return 2 * sum(self.lengths) * self.hidden_size * len(LAYER_IDS)


def write_dataset(folder: Path, scratch: Path, shape: Shape) -> None:
    """Write a dataset of one job and one shard into `folder`; its attempt is below `scratch` meanwhile."""
    model, ids = model_identity(shape.hidden_size), random_ids(shape.lengths)
    plan = read_plan_table(write_plan(scratch, ids))
    sealed = write_unit(scratch, model, ids, _random_rows(shape), cache_tokens=sum(shape.lengths))
    shard = ShardEntry(
        path=shard_path(JOB, 0),
        sha256=sha256_of(scratch / attempt_dir(JOB, 0, 1) / str(sealed.file))[0],
        xxh3=sealed.xxh3,
        bytes=sealed.bytes,
        rows=len(ids),
        tokens=sum(shape.lengths),
        unit=0,
        epoch=1,
        layers=sealed.layers,
    )
    (folder / shard.path).parent.mkdir(parents=True)
    (scratch / attempt_dir(JOB, 0, 1) / str(sealed.file)).rename(folder / shard.path)
    with open_shard(folder / shard.path) as opened:
        rows = {shard.path: opened.light}
    index, counts = write_index(folder / index_path(JOB, 0), index_path(JOB, 0), rows, plan, {})
    commit = UnitCommit(
        attempt_id=sealed.attempt_id,
        provenance=provenance(model),
        shards=(shard,),
        index=index,
        rejects=(),
        num_tokens=shard.tokens,
        supervised_tokens=counts.total(),
        checks=UnitChecks(rows_checked=len(ids), logit_rows=0, logit_argmax_agree=0, logit_max_error=0.0),
    )
    request = {"model": model.model, "source": {"kind": "inline", "samples": [{"text": "a"}]}}
    job = ExtractRequest.model_validate(request)
    planned = Progress(samples_planned=shard.rows)
    account = Account(JOB, job, commit.provenance, planned, (commit,), (), counts, datetime.now(UTC), "1")
    norm = NormWeights(commit.provenance.final_norm, torch.ones(shape.hidden_size), None)
    assemble(folder, account, norm_bytes(norm), "skipped by request", None)


def _random_rows(shape: Shape) -> Iterable[tuple[torch.Tensor, Sums]]:
    draw = torch.Generator().manual_seed(0)
    for length in shape.lengths:
        size_LTH = (len(LAYER_IDS), length, shape.hidden_size)
        states_LTH = torch.randn(size_LTH, generator=draw).to(torch.bfloat16)
        yield states_LTH, token_sums(states_LTH)
