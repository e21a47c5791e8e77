"""Workers and their hosts: what a worker does, and how the HTTP routes show them."""

from datetime import datetime

from pydantic import Field

from schemas.base import OpenEnum, Wire


class Role(OpenEnum):
    """A kind of work. PLAN and FINISH need the data folder; STORE uploads what CAPTURE wrote on its host."""

    PLAN = "plan"
    CAPTURE = "capture"
    STORE = "store"
    FINISH = "finish"


AT_HOME = frozenset({Role.PLAN, Role.FINISH})


class WorkerStatus(Wire):
    """What a worker reports about itself."""

    version: str = Field(default="", description="version of Quarry")
    roles: tuple[Role, ...] = ()
    engine: str | None = Field(default=None, description="name and version of its engine")
    model: str | None = Field(default=None, description="model of the unit that it took last")
    job: str | None = Field(default=None, description="job of that unit")
    devices: str | None = Field(default=None, description="the GPUs that it may use; null: all")
    units: int = Field(default=0, description="units that it is capturing, proving or committing")
    scratch_bytes: int | None = Field(default=None, description="limit for shards waiting to leave its host")


class WorkerView(WorkerStatus):
    """A live worker."""

    name: str
    pid: int
    alive_until: datetime = Field(description="when it counts as gone, unless it reports again")
    waits: str | None = Field(default=None, description="why it takes no units now")


class HostView(Wire):
    """A data folder, or a scratch folder of workers without one, identified by the id stored in it."""

    id: str
    name: str = Field(description="name of the machine that it was last seen on")
    is_home: bool = Field(description="whether it is the data folder, where jobs are planned and finished")
    is_lost: bool = Field(description="whether its captured but unstored units were given up")
    seen_at: datetime
    units_to_store: int
    bytes_to_store: int
    to_store_since: datetime | None = Field(
        default=None, description="commit time of the oldest unit to store whose job is still capturing"
    )
    scratch_used_bytes: int | None = Field(
        default=None, description="bytes of shards waiting to leave; null if no worker has a limit"
    )
    scratch_limit_bytes: int | None = None
    workers: tuple[WorkerView, ...]


class Forgotten(Wire):
    """The answer of `DELETE /workers/{host_id}`: how many units will be captured again."""

    units: int


class HostList(Wire):
    """The answer of `GET /workers`."""

    hosts: tuple[HostView, ...]
