"""`quarry workers`: the workers of a running service, and their hosts."""

from typing import Annotated

import typer
from rich.filesize import decimal

from schemas.worker import HostView, WorkerView
from service.cli.console import AsJson, group, say, show_json, show_table
from service.cli.server import SERVER, Quarry

app = group("workers", "List the workers of a running service by host, and give up a lost host.")


@app.command("list")
def list_workers(quarry: Quarry = SERVER, as_json: AsJson = False) -> None:
    """List hosts and their workers, the data folder's host first."""
    hosts = quarry.workers().hosts
    if as_json:
        show_json(*hosts)
    else:
        rows = [_fields(host, worker) for host in hosts for worker in host.workers or (None,)]
        show_table(("host", "name", "kind", "to store", "worker", "engine", "works on", "waits"), rows)


@app.command()
def forget(
    host_id: Annotated[str, typer.Argument(metavar="HOST", help="Id of the host, as 'list' prints it.")],
    quarry: Quarry = SERVER,
    as_json: AsJson = False,
) -> None:
    """Give up what a host captured but did not store; it is captured again elsewhere."""
    forgotten = quarry.forget_host(host_id)
    said = f"{_units(forgotten.units)} to capture again"
    say(forgotten.model_dump_json() if as_json else said)


def _units(number: int) -> str:
    return "1 unit" if number == 1 else f"{number} units"


def _fields(host: HostView, worker: WorkerView | None) -> tuple[str, ...]:
    """Return a worker, or a host without one, as a row."""
    kind = "data folder" if host.is_home else "lost" if host.is_lost else "scratch"
    size = f"{_units(host.units_to_store)}, {decimal(host.bytes_to_store)}"
    about = (host.id, host.name, kind, size)
    if worker is None:
        return (*about, f"none, seen {host.seen_at:%Y-%m-%d %H:%M:%S}", "", "", "")
    what = f"{_units(worker.units)} of {worker.job}" if worker.units else "no unit"
    model = f", {worker.model}" if worker.model else ""
    return (*about, worker.name, worker.engine or "no engine", f"{what}{model}", worker.waits or "")
