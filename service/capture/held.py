"""A unit that a worker holds, from its lease to the end of the attempt."""

import asyncio
import contextlib
from dataclasses import dataclass, field

from service.capture.session import EngineSession
from service.store import UnitLease


@dataclass(slots=True)
class HeldUnit:
    """A leased unit, until its attempt has ended."""

    lease: UnitLease
    keeping: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    leased: bool = True
    """False once it is committed, failed or lost: the lease is then neither extended nor given back."""
    task: asyncio.Task[None] | None = None
    """None while its engine is being prepared."""
    commits: bool = False
    """True while its commit is under way, which says itself whether the lease was lost."""
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once another owner has the unit, or its job was stopped."""
    needs_engine: bool = True
    """False once the engine has answered every row."""
    alone: bool = False
    """No other unit is held beside it, so that an engine that dies says something of it."""
    on_trial: EngineSession | None = None
    """The engine that it is to run on, once the canary has run there."""
    session: EngineSession | None = None
    """The engine that it runs on."""
