"""Workers and their hosts: what a worker does, and what the HTTP routes say of them."""

from datetime import datetime

from pydantic import Field

from schemas.base import OpenEnum, Wire


class Role(OpenEnum):
    """A kind of work. PLAN and FINISH need the data folder; what CAPTURE made leaves a host by STORE."""

    PLAN = "plan"
    CAPTURE = "capture"
    STORE = "store"
    FINISH = "finish"


AT_HOME = frozenset({Role.PLAN, Role.FINISH})


class WorkerStatus(Wire):
    """What a worker says of itself."""

    version: str = Field(default="", description="of Quarry")
    roles: tuple[Role, ...] = ()
    engine: str | None = Field(default=None, description="name and version of the engine that it holds")
    model: str | None = Field(default=None, description="of the unit that it took last")
    job: str | None = Field(default=None, description="of that unit")
    devices: str | None = Field(default=None, description="the GPUs that it may use; null: all")
    units: int = Field(default=0, description="units that it captures, proves or commits now")
    scratch_bytes: int | None = Field(default=None, description="of shards that may wait to leave its host")


class WorkerView(WorkerStatus):
    """A worker that is there."""

    name: str
    pid: int
    alive_until: datetime = Field(description="it counts as gone from then on, unless it says otherwise")
    waits: str | None = Field(default=None, description="why it takes no unit now")


class HostView(Wire):
    """A data folder, or the scratch of workers without one, by the id that is kept in it."""

    id: str
    name: str = Field(description="of the machine that it was seen on last")
    is_home: bool = Field(description="whether it is the data folder, where jobs are planned and finished")
    is_lost: bool = Field(description="whether what it had captured and not stored was given up")
    seen_at: datetime
    units_to_store: int
    bytes_to_store: int
    to_store_since: datetime | None = Field(
        default=None, description="commit of the first of these units whose job goes on capturing"
    )
    scratch_used_bytes: int | None = Field(
        default=None, description="of shards that wait to leave; null where no worker has a limit"
    )
    scratch_limit_bytes: int | None = None
    workers: tuple[WorkerView, ...]


class Forgotten(Wire):
    """The answer of `DELETE /workers/{host_id}`: how many units are captured again."""

    units: int


class HostList(Wire):
    """The answer of `GET /workers`."""

    hosts: tuple[HostView, ...]
