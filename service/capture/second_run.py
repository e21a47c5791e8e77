"""Runs one row of a unit a second time, without the prefix cache, and compares its states.

Runs on the worker's event loop, between a unit's proof and its commit; files are read, and states compared,
in threads.

Imports torch: import it lazily.
"""

import asyncio
from collections.abc import Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from schemas.dataset.errors import DatasetError
from schemas.dataset.shard import open_shard
from schemas.dataset.states import read_states
from schemas.receipts import UnitSealed
from service.capture.attempt_files import attempt_folder
from service.capture.canary import capture_prompts
from service.capture.session import EngineSession, How
from service.errors import StatesWrong, WriteFailed
from service.proof.canary import MOST_PROMPTS, canary_prompts
from service.proof.second_run import LayerBound, compare, layer_bound
from service.store import UnitLease

SHARE = 0.005
"""Most of the engine's tokens that second runs take, beside the first one."""
TOKENS_MAX = 4096
BYTES_MAX = 2**28
"""Of a longer row, its beginning runs again: its states do not depend on what follows. All are in memory.

Of an answer behind more tokens, so much is compared that half of it may be the answer.
"""


@dataclass(frozen=True, slots=True)
class _Row:
    """A captured row: its number in the plan, its file, and its place in it.

    Its first `tokens` run again, of which the last `compared` are compared. `answer_begin` is the place of
    the first token of its answer, 0 if it has none. `is_shared`: it shared the engine with another request.
    """

    row: int
    file: str
    place: int
    num_tokens: int
    tokens: int
    compared: int
    answer_begin: int
    is_shared: bool


async def run_again(
    lease: UnitLease,
    session: EngineSession,
    sealed: Sequence[UnitSealed],
    answers: Mapping[int, int],
    shared: AbstractSet[int],
) -> float | None:
    """Run a row of a sealed unit again; return the least median cosine, or None if no row ran.

    `answers` has the place of the first token of each row's new answer, `shared` the rows that shared the
    engine with another request.

    First one row of an engine and a way of capture, while other units wait for the verdict: by itself, if it
    shared the engine the first time, and beside a canary's prompts. By itself is not enough: rows that are in
    the engine at once may each be computed in a step of its own, and are then right where a batch is wrong.
    Nor is beside others: two batches may be wrong alike. If the row had the engine to itself, the run by
    itself is owed of a later row that shares the engine. Later of as many rows as `SHARE` allows, in a batch
    with others, for which the engine need not run empty. None of a job that skips the canary, whose report
    has the bounds.

    Raises StatesWrong, EngineDied if the engine failed another unit, and what `capture_prompts` raises.
    """
    # Not the store's report: while the store is away, a unit that was captured would be captured again.
    report = None if lease.skips_canary else session.canary
    if report is None:
        return None
    bounds = tuple(layer_bound(lease.identity, layer) for layer in report.layers)
    rows = _rows(lease, sealed, answers, shared)
    answered = [row for row in rows if row.answer_begin]
    # Answers that are known are captured as any other row is.
    way = lease.identity.capture if answered else None
    first = answered or rows
    first = [row for row in first if row.is_shared] or first
    hows: list[How] = ["alone", "beside"] if any(row.is_shared for row in first) else ["beside"]
    async with session.before_second_run:
        if owed := [how for how in hows if (way, how) not in session.ran_again]:
            chosen = _choose(lease, first, is_first=True)
            cosines = []
            for how in owed:
                if (cosine := await _run(lease, session, bounds, chosen, how=how)) is not None:
                    session.ran_again.add((way, how))
                    cosines.append(cosine)
            return min(cosines, default=None)
    return await _run(lease, session, bounds, _choose(lease, rows, is_first=False))


def _company(session: EngineSession, num_tokens: int) -> list[list[int]]:
    """Return prompts for which there is room beside `num_tokens`: if one had to wait, so would the row.

    The longest comes first: the others come while it is computed.
    """
    budget = session.budget
    most = max(1, (budget.max_tokens - num_tokens) // MOST_PROMPTS)
    prompts = canary_prompts(session.head.vocab_size, min(session.spec.max_model_len - 1, most))
    return prompts[::-1][: budget.max_requests - 1]


async def _run(
    lease: UnitLease,
    session: EngineSession,
    bounds: Sequence[LayerBound],
    chosen: _Row | None,
    *,
    how: How | None = None,
) -> float | None:
    """Run the chosen row, if one is; return the least median cosine of its layers."""
    if chosen is None:
        return None
    # Otherwise each unit that waited for the verdict would seek its own: on a stuck engine, for an hour each.
    session.check_trusted()
    path = attempt_folder(session.settings, lease.attempt_id) / chosen.file
    ids = await asyncio.to_thread(_token_ids, path, chosen)
    (second,) = await capture_prompts(
        lease,
        session,
        [ids],
        last_tokens=chosen.compared,
        alone=how == "alone",
        company=_company(session, chosen.tokens) if how == "beside" else (),
    )
    where = f"unit {lease.item}, row {chosen.row}"
    if not second:
        raise StatesWrong(f"{where}: computed a second time, its states are not finite", field="layers")
    return await asyncio.to_thread(_compare, where, path, chosen, second, bounds)


def _rows(
    lease: UnitLease, sealed: Sequence[UnitSealed], answers: Mapping[int, int], shared: AbstractSet[int]
) -> list[_Row]:
    """Return the unit's rows. An answer of which no state is stored is none."""
    most = max(1, min(TOKENS_MAX, BYTES_MAX // lease.identity.state_bytes_per_token))
    rows = []
    for receipt in sealed:
        for place, (row, num_tokens) in enumerate(zip(receipt.rows, receipt.num_tokens, strict=True)):
            begin = answers.get(row, 0)
            begin = begin if begin < num_tokens else 0
            tokens = min(num_tokens, max(most, begin + most // 2) if begin else most)
            of_run = tokens, min(tokens, most), begin, row in shared
            rows.append(_Row(row, str(receipt.file), place, num_tokens, *of_run))
    return rows


def _choose(lease: UnitLease, rows: Sequence[_Row], *, is_first: bool) -> _Row | None:
    """Draw one of the rows that are not shorter than the mean; another one if the unit is captured again."""
    if not rows:
        return None
    all_tokens = sum(row.num_tokens for row in rows)
    # Also of the job: those of a schedule may all have one unit, whose draw would be the same every night.
    job = int(lease.attempt_id.job_id.removeprefix("j-"), 16)
    draw = np.random.default_rng((job, lease.attempt_id.unit, lease.attempt_id.epoch))
    long = [row for row in rows if row.num_tokens * len(rows) >= all_tokens]
    chosen = long[draw.integers(len(long))]
    return chosen if is_first or draw.random() < SHARE * all_tokens / chosen.tokens else None


def _token_ids(path: Path, chosen: _Row) -> list[int]:
    """Return the tokens to run again. Raises WriteFailed."""
    try:
        with open_shard(path) as shard:
            ids: list[int] = shard.light[chosen.place].input_ids[: chosen.tokens].tolist()
            return ids
    except (DatasetError, OSError) as error:
        raise WriteFailed(f"a sealed file cannot be read back: {error}") from error


def _compare(
    where: str, path: Path, chosen: _Row, second: Mapping[int, torch.Tensor], bounds: Sequence[LayerBound]
) -> float:
    """Compare layer by layer. Raises StatesWrong, WriteFailed."""
    cosines = []
    begin = chosen.tokens - chosen.compared
    try:
        with open_shard(path) as shard:
            for bound in bounds:
                first_TH = read_states(shard, chosen.place, bound.layer_id)[begin : chosen.tokens]
                second_TH = second[bound.layer_id]
                cosine = compare(
                    where, bound, first_TH, second_TH, begin=begin, answer_begin=chosen.answer_begin
                )
                cosines.append(cosine)
    except (DatasetError, OSError) as error:
        raise WriteFailed(f"{where}: a sealed file cannot be read back: {error}") from error
    return min(cosines)
