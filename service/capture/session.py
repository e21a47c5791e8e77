"""An engine session: a started engine and everything with the same lifetime.

A worker has at most one session. It starts another when a job needs another engine.
"""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Literal

from schemas.dataset.manifest import CanaryReport
from schemas.identity import Identity, Provenance, layer_info
from schemas.names import is_local_model
from schemas.receipts import AttemptId, OpenUnit
from service.capture.budget import InFlight
from service.capture.engine import SHORT_TMPDIR, Engine, EngineSpec
from service.capture.link import EngineLink
from service.environment import PREFIX
from service.errors import EngineDied, EngineRefused, IdentityChanged, RequestError
from service.plan.target import fetch_weights, planned_target
from service.settings import Settings
from service.store import HOME, UnitLease
from service.work.meters import ENGINE, LOADS

if TYPE_CHECKING:
    from service.proof.head import Head

How = Literal["alone", "beside"]
"""How a row runs again: with the engine to itself, having shared it the first time, or beside others."""


def spec_for(lease: UnitLease, settings: Settings) -> EngineSpec:
    """Return the engine spec that a job needs, from the current model. Raises as `EngineSlot.inspect` does.

    The length is rounded up to a power of two, so that jobs can share an engine.
    """
    identity = lease.identity
    target = planned_target(identity, lease.model, settings)
    longest = min(identity.max_tokens + 1, target.max_model_len)
    return EngineSpec(
        weights=fetch_weights(target, settings),
        model_sha256=identity.model_sha256(),
        dtype=target.dtype,
        layer_ids=target.layer_ids,
        hidden_size=target.hidden_size,
        max_model_len=min(1 << (longest - 1).bit_length(), target.max_model_len),
        decode=identity.generate is not None,
        longest_model_len=target.max_model_len,
    )


@dataclass(slots=True)
class EngineSession:
    """A started engine, its connector's link, the weights of its head, and the bounds of what it holds."""

    spec: EngineSpec
    engine: Engine
    link: EngineLink
    head: "Head"
    settings: Settings
    """Those of the worker."""
    budget: InFlight
    """What is in the engine; the worker's next session goes on with it."""
    trusted: bool = True
    """False once the engine gave wrong states, which its prefix cache may hold and return again, or is
    stuck.

    From then on, nothing that it captured is committed.
    """
    canary: CanaryReport | None = None
    """The report of the canary that passed on this engine."""
    spent: bool = False
    """Set once it died or was given up: it serves no further units."""
    charged: bool = False
    """Set once a unit's failure counted against the worker, until all have ended that may fail with it."""
    has_captured: bool = False
    """Whether a unit that it captured was committed."""
    ran_again: set[tuple[str | None, How]] = field(default_factory=set)
    """The ways of capture in which a row had the same states a second time, and how it ran then."""
    before_second_run: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while that is found out; proven units wait for it."""

    @property
    def alive(self) -> bool:
        """Return whether engine and connector both still answer; either may die first."""
        return self.engine.alive and self.link.alive

    def serves(self, identity: Identity) -> bool:
        """Return whether states of `identity` can be captured on this engine as it is."""
        return self.trusted and not self.spent and self.spec.serves(identity) and self.alive

    def check_trusted(self) -> None:
        """Raise EngineDied if nothing that it captured is committed any more."""
        if not self.trusted:
            raise EngineDied("another unit of this engine got wrong states, or none: this one runs again")

    def provenance(self, job_id: str, identity: Identity) -> Provenance:
        """Return the provenance of states captured on this engine."""
        return Provenance(
            job_id=job_id,
            identity=identity,
            layers=tuple(layer_info(layer_id, identity.num_layers) for layer_id in identity.layer_ids),
            final_norm=self.head.final_norm,
            engine=self.engine.info,
            service_version=version("eagle-quarry"),
        )

    def opening(self, attempt_id: AttemptId, num_rows: int, identity: Identity) -> OpenUnit:
        """Return the message that opens an attempt in the connector.

        Raises IdentityChanged if the engine holds another model or captures other layers than `identity`
        names.
        """
        if not self.spec.serves(identity):
            job_id = attempt_id.job_id
            detail = f"the engine holds another model, or captures other layers, than job {job_id} asks for"
            raise IdentityChanged(detail, cure="resume the job")
        return OpenUnit(
            attempt_id=attempt_id,
            num_rows=num_rows,
            compression=identity.compression,
            provenance=self.provenance(attempt_id.job_id, identity),
        )


@contextmanager
def _making_socket() -> Iterator[None]:
    """Translate errors of making the link's folder and socket. Raises EngineDied."""
    try:
        yield
    except OSError as error:
        raise EngineDied(f"no socket for the engine can be made: {error}", cure=SHORT_TMPDIR) from error


class EngineSlot:
    """Holds the worker's one session, or none."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._budget = InFlight(settings.in_flight_tokens, settings.in_flight_requests)
        self.session: EngineSession | None = None
        self._running = AsyncExitStack()
        """Stops the engine, then closes its link."""
        self._stopping: asyncio.Task[None] | None = None

    async def inspect(self, lease: UnitLease) -> EngineSpec:
        """Return the spec of the engine that a unit needs, from the current model.

        Reads all of a local model, or downloads the weights of a remote one.

        Raises IdentityChanged, UnknownModel, HubUnavailable; EngineDied if this host is not the planner's and
        does not have the model, which is not the job's fault.
        """
        try:
            return await asyncio.to_thread(spec_for, lease, self._settings)
        except (IdentityChanged, RequestError) as error:
            if lease.host == HOME:
                raise
            detail = f"the model is not here as it was planned: {error.detail}"
            cure = f"copy {lease.model} to this machine, and name its folder in QUARRY_MODEL_ROOTS"
            raise EngineDied(detail, cure=cure) from error

    async def check_unchanged(self, lease: UnitLease) -> None:
        """Inspect a local model again; a commit on the Hub does not change. Raises as `inspect` does."""
        if is_local_model(lease.model):
            await self.inspect(lease)

    async def prepare(self, spec: EngineSpec) -> "Head":
        """Stop the old engine and load the head of the next one. Raises EngineRefused."""
        from service.proof.head import Head

        await self.stop()
        return await asyncio.to_thread(Head.load, spec.weights, spec.dtype)

    async def start(self, lease: UnitLease, spec: EngineSpec, head: "Head") -> EngineSession:
        """Start a prepared engine.

        Raises EngineRefused, EngineDied (also if a setting of this worker is refused), and IdentityChanged if
        the model was changed meanwhile.
        """
        engine: Engine = resolve_name(self._settings.engine)()
        async with AsyncExitStack() as starting:
            starting.callback(ENGINE.enter, "none")
            ENGINE.enter("starting")
            starting.callback(LOADS.clear)
            with _making_socket():
                link = EngineLink()
            starting.callback(asyncio.create_task(link.ask_loads()).cancel)
            starting.push_async_callback(link.close)
            starting.push_async_callback(engine.stop)
            with _making_socket():
                await link.listen()
            try:
                await engine.start(spec, self._settings, link)
            except EngineRefused as refused:
                if (refused.field or "").startswith((PREFIX, "VLLM_")):  # of a setting: no job's fault
                    raise EngineDied(refused.detail, cure=refused.cure) from refused
                raise
            await self.check_unchanged(lease)
            self._running = starting.pop_all()
        ENGINE.enter("idle")
        self.session = EngineSession(spec, engine, link, head, self._settings, self._budget)
        return self.session

    async def stop(self) -> None:
        """Stop the engine, if there is one. If that is cancelled, it goes on, and the next call awaits it.

        Otherwise the next engine would start beside the old one, on the same GPUs.
        """
        self.session = None
        if self._stopping is None or self._stopping.done():
            self._stopping = asyncio.create_task(self._running.aclose())
        await asyncio.shield(self._stopping)
