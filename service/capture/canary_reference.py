"""The reference of a job's canary: the same prompts through transformers, in a process of its own.

It is begun while the engine starts, since neither needs the other and both take a while.

Imports torch: import it lazily.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from schemas.request import Dtype
from service.capture.engine import EngineSpec
from service.errors import EngineRefused
from service.proof.canary import canary_prompts, states_key
from service.proof.head import Head
from service.proof.reference import Reference, available_bytes, reference_states
from service.settings import Settings
from service.store import Store, UnitLease

logger = logging.getLogger(__name__)

_EARLY_SHARE = 4
"""Beside an engine that has not taken its memory yet, the reference may use a quarter of what is free.

That is half of what it may use alone.
"""


async def run_reference(
    weights: Path,
    settings: Settings,
    prompts: Sequence[Sequence[int]],
    dtype: Dtype,
    max_bytes: int | None = None,
) -> Reference:
    """Run the reference within `max_bytes`, or else within the settings' bound. Raises EngineRefused."""
    return await reference_states(
        weights,
        prompts,
        dtype,
        max_bytes=settings.canary_max_bytes if max_bytes is None else max_bytes,
        timeout_s=settings.engine_start_timeout_s,
    )


class CanaryReference(AbstractAsyncContextManager["CanaryReference"]):
    """One job's reference, from the engine's start to the canary. Leaving the block ends what still runs."""

    def __init__(self, lease: UnitLease, store: Store, settings: Settings) -> None:
        """Begin nothing."""
        self._lease, self._store, self._settings = lease, store, settings
        self._early_prompts: Sequence[Sequence[int]] = ()
        self._early: asyncio.Task[Reference] | None = None
        self._reference: asyncio.Task[Reference] | None = None

    async def __aexit__(self, *_: object) -> None:
        """Leave no process behind."""
        tasks = [task for task in (self._reference, self._early) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def begin_early(self, spec: EngineSpec, head: Head) -> None:
        """Begin beside the start of an engine for `spec`, if its canary is likely to run.

        Where these states passed on an engine before, this one's canary most likely passed too, and reading
        the model would be in vain.
        """
        identity = self._lease.identity
        if self._lease.request.canary == "skip":
            return
        if await asyncio.to_thread(self._store.canary, states_key(identity)) is not None:
            return
        self._early_prompts = canary_prompts(head.vocab_size, spec.max_model_len - 1)
        max_bytes = available_bytes() // _EARLY_SHARE if self._settings.canary_max_bytes is None else None
        self._early = asyncio.create_task(
            run_reference(spec.weights, self._settings, self._early_prompts, identity.dtype, max_bytes)
        )

    def begin(self, weights: Path, prompts: Sequence[Sequence[int]]) -> None:
        """Begin for `prompts` on a running engine, unless `begin_early` has begun the same."""
        self._reference = asyncio.create_task(self._run(weights, prompts))

    async def result(self) -> Reference:
        """Wait for what `begin` began. Raises EngineRefused."""
        assert self._reference is not None, "begin() comes first"  # noqa: S101
        return await self._reference

    async def _run(self, weights: Path, prompts: Sequence[Sequence[int]]) -> Reference:
        if self._early is not None and self._early_prompts == prompts:
            try:
                return await self._early
            except EngineRefused as refused:
                if self._settings.canary_max_bytes is not None:
                    raise
                logger.info("the reference runs again beside the engine: %s", refused)
        return await run_reference(weights, self._settings, prompts, self._lease.identity.dtype)
