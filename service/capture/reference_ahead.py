"""The canary's reference, begun while the engine starts: neither needs the other, and both take a while.

Imports torch: import it lazily.
"""

import asyncio
import logging
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from service.capture.canary_run import refer
from service.capture.engine import EngineSpec
from service.errors import EngineRefused
from service.proof.canary import canary_prompts, states_key
from service.proof.head import Head
from service.proof.reference import Reference, available_bytes
from service.settings import Settings
from service.store import Store, UnitLease

logger = logging.getLogger(__name__)

_SHARE = 4
"""Beside an engine that is yet to take its memory, the reference may have this part of what is free: half of
what it may have alone."""


class ReferenceAhead:
    """One job's reference, from the engine's start to the canary. Leaving the block ends what nobody took."""

    def __init__(self, lease: UnitLease, store: Store, settings: Settings) -> None:
        """Begin nothing."""
        self._lease, self._store, self._settings = lease, store, settings
        self._prompts: Sequence[Sequence[int]] = ()
        self._task: asyncio.Task[Reference] | None = None

    async def __aenter__(self) -> Self:
        """Do nothing."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave no process behind."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def begin(self, spec: EngineSpec, head: Head) -> None:
        """Begin the reference of an engine for `spec`, if its canary is likely to be run.

        Where these states passed on an engine before, this one's canary most likely passed too, and the model
        would be read in vain.
        """
        identity = self._lease.identity
        if self._lease.request.canary == "skip":
            return
        if await asyncio.to_thread(self._store.canary, states_key(identity)) is not None:
            return
        self._prompts = canary_prompts(head.vocab_size, spec.max_model_len - 1)
        self._task = asyncio.create_task(
            refer(
                spec.weights,
                self._settings,
                self._prompts,
                identity.dtype,
                available_bytes() // _SHARE if self._settings.canary_max_bytes is None else None,
            )
        )

    async def reference(self, prompts: Sequence[Sequence[int]]) -> Reference | None:
        """Return what was begun for these prompts; none if nothing was, or too little memory was free for it.

        Raises EngineRefused.
        """
        if self._task is None or self._prompts != prompts:
            return None
        try:
            return await self._task
        except EngineRefused as refused:
            if self._settings.canary_max_bytes is not None:
                raise
            logger.info("the reference is run again beside the engine: %s", refused)
            return None
