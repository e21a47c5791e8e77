"""The engine a worker has running, with all that belongs to its life: link, head, provenance.

Switched between jobs.
"""

import asyncio
import contextlib
import importlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

from schemas.identity import Identity, Provenance, layer_info
from schemas.request import ExtractRequest
from service.capture.engine import Engine, EngineSpec
from service.capture.link import EngineLink
from service.plan.target import Target, planned_target
from service.plan.weights import fetch_weights
from service.settings import Settings
from service.store import UnitLease

if TYPE_CHECKING:
    from service.proof.head import Head


def spec_for(request: ExtractRequest, target: Target, settings: Settings) -> EngineSpec:
    """Return what a job needs of an engine.

    The length is rounded up to a power of two, so that jobs can share one.
    """
    longest = min(request.max_tokens + 1, target.max_model_len)
    return EngineSpec(
        weights=fetch_weights(target, settings),
        revision=target.revision,
        dtype=target.dtype,
        layer_ids=target.layer_ids,
        hidden_size=target.hidden_size,
        max_model_len=min(1 << (longest - 1).bit_length(), target.max_model_len),
        decode=request.generate is not None,
    )


def warm_imports(settings: Settings) -> None:
    """Import what an engine and its first unit need; takes seconds once, so call it from a thread.

    What cannot be imported is left for `load_engine` to say, where a job hears it.
    """
    # One order for every caller: two threads then never wait for each other.
    with contextlib.suppress(ImportError, AttributeError, ValueError):
        importlib.import_module(settings.engine.partition(":")[0])
        importlib.import_module("service.capture.reference_ahead")
        importlib.import_module("service.capture.unit_run")


def load_engine(settings: Settings) -> Engine:
    """Make the engine class that the settings name; imports it only now."""
    module, name = settings.engine.split(":")
    engine: Engine = getattr(importlib.import_module(module), name)()
    return engine


@dataclass(frozen=True, slots=True)
class Running:
    """A started engine and the weights of its head."""

    spec: EngineSpec
    engine: Engine
    link: EngineLink
    head: "Head"

    @property
    def alive(self) -> bool:
        """Say whether engine and connector both still answer; either may die first."""
        return self.engine.alive and self.link.alive

    def serves(self, spec: EngineSpec) -> bool:
        """Say whether a job of `spec` can be run as it is."""
        return self.spec.covers(spec) and self.alive

    def provenance(self, job_id: str, identity: Identity) -> Provenance:
        """Say who makes the dataset, from what."""
        return Provenance(
            job_id=job_id,
            identity=identity,
            layers=tuple(layer_info(layer_id, identity.num_layers) for layer_id in identity.layer_ids),
            final_norm=self.head.final_norm,
            engine=self.engine.info,
            service_version=version("eagle-quarry"),
        )


async def _nothing_beside(spec: EngineSpec, head: "Head") -> None:
    """Begin nothing."""


class EngineHouse:
    """Holds at most one running engine."""

    def __init__(self, settings: Settings) -> None:
        """Begin without one."""
        self._settings = settings
        self.running: Running | None = None
        self._inspected: tuple[str, EngineSpec] | None = None

    async def inspect(self, lease: UnitLease) -> EngineSpec:
        """Return the spec of a unit's job; asks the Hub and downloads weights once a job.

        Raises IdentityChanged, UnknownModel, UnknownLayer.
        """
        job_id = lease.key.job_id
        if self._inspected is None or self._inspected[0] != job_id:
            spec = await asyncio.to_thread(self._spec_of, lease)
            self._inspected = (job_id, spec)
        return self._inspected[1]

    def _spec_of(self, lease: UnitLease) -> EngineSpec:
        target = planned_target(lease.request, lease.identity, self._settings)
        return spec_for(lease.request, target, self._settings)

    async def switch(
        self, spec: EngineSpec, beside: Callable[[EngineSpec, "Head"], Awaitable[None]] = _nothing_beside
    ) -> Running:
        """Stop what runs and start an engine for `spec`. Raises EngineRefused, EngineDied.

        `beside` is called first, to begin what can go on while the engine starts.
        """
        from service.proof.head import Head

        await self.stop()
        head = await asyncio.to_thread(Head.load, spec.weights, spec.dtype)
        await beside(spec, head)
        engine = load_engine(self._settings)
        link = EngineLink()
        try:
            await link.listen()
            await engine.start(spec, self._settings, link)
        except BaseException:
            try:
                await engine.stop()
            finally:
                await link.close()
            raise
        self.running = Running(spec, engine, link, head)
        return self.running

    async def stop(self) -> None:
        """Stop the running engine, if there is one."""
        if self.running is not None:
            running, self.running = self.running, None
            try:
                await running.engine.stop()
            finally:
                await running.link.close()
