"""Workers and their hosts: list them, and give up a host."""

from typing import Annotated

from fastapi import APIRouter, Path, Security

from schemas.keys import Scope
from schemas.worker import Forgotten, HostList
from service.api.auth import caller
from service.api.head_route import HeadRoute
from service.api.problems import problem_responses
from service.api.routes.options import NO_QUERY
from service.api.routes.resources import StoreOf
from service.store import hosts

router = APIRouter(
    prefix="/workers",
    tags=["workers"],
    dependencies=NO_QUERY,
    responses=problem_responses(401, 403, 422, 429),
    route_class=HeadRoute,
)


@router.get("", dependencies=[Security(caller, scopes=[Scope.METRICS])])
def list_workers(store: StoreOf) -> HostList:
    """List capturing workers by host, and what each host still has to store."""
    return HostList(hosts=tuple(store.read(hosts.views)))


@router.delete(
    "/{host_id}", dependencies=[Security(caller, scopes=[Scope.ADMIN])], responses=problem_responses(404)
)
def forget_host(host_id: Annotated[str, Path(pattern=r"^[0-9a-f]{32}$")], store: StoreOf) -> Forgotten:
    """Give up what a host captured but did not store; it is captured again elsewhere."""
    return Forgotten(units=store.write(hosts.forget, host_id))
