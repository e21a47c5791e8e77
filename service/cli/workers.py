"""`quarry workers`: which workers a running service has, and on which hosts."""

from typing import Annotated

import typer

from schemas.worker import Forgotten, HostList, HostView
from service.cli.console import say
from service.cli.jobs import DEFAULT_SERVER, AsJson, Server
from service.client import Client

app = typer.Typer(
    help="List the workers of a running service by their hosts, and give up a host that is lost.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("list")
def list_workers(server: Server = DEFAULT_SERVER, as_json: AsJson = False) -> None:
    """List hosts and their workers; the data folder's host comes first."""
    with Client(server) as client:
        hosts = HostList.model_validate(client.call("GET", "/workers")).hosts
    for host in hosts:
        if as_json:
            say(host.model_dump_json(ensure_ascii=True))
            continue
        say(*_about(host))
        for worker in host.workers:
            what = f"{worker.units} units of {worker.job}" if worker.units else "no unit"
            engine = worker.engine or "no engine"
            say(f"  {worker.name}", what, engine, *([worker.model] if worker.model else []))
            if worker.waits:
                say("    waits:", worker.waits)


@app.command()
def forget(
    host_id: Annotated[str, typer.Argument(metavar="HOST", help="Its id, as 'list' prints it.")],
    server: Server = DEFAULT_SERVER,
) -> None:
    """Give up what a host had captured and not stored: it is captured again elsewhere."""
    with Client(server) as client:
        forgotten = Forgotten.model_validate(client.call("DELETE", f"/workers/{host_id}"))
    say(f"{forgotten.units} units are captured again")


def _about(host: HostView) -> list[str]:
    size = f"{host.units_to_store} units ({host.bytes_to_store / 1e9:.1f} GB) to store"
    kind = "data folder" if host.is_home else "lost" if host.is_lost else "scratch"
    return [host.id, host.name, kind, f"seen {host.seen_at:%Y-%m-%d %H:%M:%S}", size]
