"""The reader bench's dataset: one job of random states in one shard, sealed by our writer, without an engine.

Legend: L captured layers, T tokens, H hidden size.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save

from connector.repeats import RepeatCheck
from connector.shards import UnitWriter
from connector.wire import DrainJob, RowRef, hash_ids
from schemas.dataset.index import write_index
from schemas.dataset.manifest import SealedShard, UnitChecks
from schemas.names import attempt_dir, index_path, shard_path
from schemas.request import ExtractRequest
from service.publish.assemble import Account, assemble
from service.store import UnitCommit
from tests.support.plans import JOB, identity, order, provenance, random_ids, write_plan
from tests.support.sums import token_sums


@dataclass(frozen=True, slots=True)
class Shape:
    """`num_rows` rows of `shortest` to `longest` tokens; H of an 8B model unless a test wants less."""

    num_rows: int
    shortest: int = 128
    longest: int = 896
    hidden_size: int = 4096
    layer_ids: tuple[int, ...] = (2, 16, 29, 32)

    @property
    def lengths(self) -> list[int]:
        """T of every row, the same in every run."""
        draw = np.random.default_rng(0)
        return [int(length) for length in draw.integers(self.shortest, self.longest + 1, self.num_rows)]

    @property
    def state_bytes(self) -> int:
        """Bytes of all states: bfloat16."""
        return 2 * sum(self.lengths) * self.hidden_size * len(self.layer_ids)


def write_dataset(folder: Path, scratch: Path, shape: Shape) -> None:
    """Write a whole dataset into `folder`; its attempt lies below `scratch` meanwhile."""
    about = identity(layer_ids=shape.layer_ids, hidden_size=shape.hidden_size, num_layers=shape.layer_ids[-1])
    ids = random_ids(shape.lengths)
    plan = write_plan(scratch, ids)
    shard = _shard(folder, scratch, ids, shape)
    index, supervised = write_index(
        folder / index_path(JOB, 0), index_path(JOB, 0), [(folder / shard.path, shard.path)], plan, {}
    )
    checks = UnitChecks(rows_checked=shard.rows, logit_rows=0, logit_argmax_agree=0, logit_max_error=0.0)
    told = provenance(about)
    commit = UnitCommit(
        key=order(about, shard.rows).key,
        provenance=told,
        shards=(shard,),
        index=index,
        rejects=(),
        num_tokens=shard.tokens,
        supervised_tokens=supervised,
        checks=checks,
    )
    request = {"model": about.model, "source": {"kind": "inline", "samples": [{"text": "a"}]}}
    account = Account(JOB, ExtractRequest.model_validate(request), told, shard.rows, (commit,), ())
    assemble(folder, account, save({"weight": torch.ones(shape.hidden_size)}), "skipped by request", None)


def _shard(folder: Path, scratch: Path, ids: list[list[int]], shape: Shape) -> SealedShard:
    """Write the rows as the writer does, and move the sealed file to where landing puts it."""
    about = identity(layer_ids=shape.layer_ids, hidden_size=shape.hidden_size, num_layers=shape.layer_ids[-1])
    told = order(about, len(ids))
    unit = UnitWriter(told, scratch, 0, 1, RepeatCheck(len(shape.layer_ids), sum(map(len, ids))))
    draw = torch.Generator().manual_seed(0)
    for row, one in enumerate(ids):
        states_LTH = torch.randn((len(shape.layer_ids), len(one), shape.hidden_size), generator=draw)
        job = DrainJob(str(row), RowRef(told.key, row, len(one)), len(one), (), hash_ids(one), ())
        states_LTH = states_LTH.to(torch.bfloat16)
        unit.write(job, states_LTH, token_sums(states_LTH))
    sealed = unit.seal()
    path = shard_path(JOB, 0)
    (folder / path).parent.mkdir(parents=True)
    (scratch / attempt_dir(JOB, 0, 1) / str(sealed.file)).rename(folder / path)
    return SealedShard(
        path=path,
        xxh3=sealed.xxh3,
        bytes=sealed.bytes,
        rows=len(ids),
        tokens=sum(map(len, ids)),
        unit=0,
        epoch=1,
        layers=sealed.layers,
    )
