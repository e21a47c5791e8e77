"""Rows that are not finite: the engine's fault, until another one finds the same rows so and is well itself.

A model may overflow on a sample, and then every engine says so. A device that fails may yield NaN for any
sample, also once it is started anew: so the second engine runs a control behind what it has found, a row that
it has just found finite, or else pieces of a canary's prompt, of which half must be finite: the prompts begin
alike, and a model may overflow on a token of that beginning. Once a job has such a reject, the control is
enough for its other units.

Where the target answers, the second engine gets other answers, and may overflow on those of other rows. Then
what it has found must be found again when the same tokens are captured once more.

Imports torch: import it lazily.
"""

import asyncio
import hashlib
import logging
from collections.abc import Mapping, Sequence

import pyarrow as pa

from schemas.receipts import NOT_FINITE, UnitSealed
from service.capture.canary import capture_prompts
from service.capture.session import EngineSession
from service.errors import StatesNotFinite
from service.proof.canary import canary_prompts
from service.proof.checks import Written
from service.store import Store, UnitLease, units

logger = logging.getLogger(__name__)

NAMED = 20
"""Rows that an error names, of more it has a digest; and rows that are captured once more."""
_PIECES, _PIECE_TOKENS = 8, 16
"""Of a canary's prompt; no two have a token in common but by chance."""


async def settle(
    lease: UnitLease,
    session: EngineSession,
    store: Store,
    plan: pa.Table,
    sealed: Sequence[UnitSealed],
    written: Mapping[int, Written],
) -> None:
    """Return if the rows of a unit that are not finite, if any, may be rejected.

    `written` has the rows with the target's answers.

    Raises StatesNotFinite where the engine may be at fault, and what `capture_prompts` raises.
    """
    rejected = [reject for receipt in sealed for reject in receipt.rejected if reject.reason == NOT_FINITE]
    if not rejected:
        return
    first = min(rejected, key=lambda reject: reject.row)
    logger.warning("unit %d, row %d: %s", lease.item, first.row, first.detail)
    found = _error(lease, sorted(reject.row for reject in rejected))
    if not await asyncio.to_thread(store.read, units.is_not_finite, lease, found.problem()):
        raise found
    finite = [(tokens, row) for one in sealed for row, tokens in zip(one.rows, one.num_tokens, strict=True)]
    ids = canary_prompts(session.head.vocab_size, session.spec.max_model_len - 1)[-1]
    prompts = [ids[at : at + _PIECE_TOKENS] for at in range(0, len(ids), _PIECE_TOKENS)][:_PIECES]
    if finite:
        prompts = [plan["input_ids"][min(finite)[1]].values.to_numpy().tolist()]
    control = await capture_prompts(lease, session, prompts)
    if sum(map(bool, control)) * 2 < len(control):
        logger.warning("unit %d: rows that were finite no longer are", lease.item)
        raise found  # as before, for the next engine to confirm
    for row in sorted(reject.row for reject in rejected)[:NAMED] if lease.answers_anew else ():
        ids = written[row].ids[: session.spec.max_model_len - 1].tolist()
        # By itself: of several, the last one may find its states in the prefix cache.
        (states,) = await capture_prompts(lease, session, [ids])
        if states:
            logger.warning("unit %d, row %d: it is finite the second time", lease.item, row)
            raise found


def _error(lease: UnitLease, rows: list[int]) -> StatesNotFinite:
    """Return the error, in the same words for the same rows, whatever engines differ in besides."""
    named = ", ".join(map(str, rows[:NAMED]))
    if len(rows) > NAMED:
        named += f" and others ({hashlib.sha256(repr(rows).encode()).hexdigest()[:12]})"
    detail = f"unit {lease.item}: {len(rows)} of {lease.num_samples} rows are not finite: {named}"
    return StatesNotFinite(detail)
