"""The options of all commands that talk to a running service."""

from typing import Any

import typer

from service.client import Quarry
from service.client.clients import DEFAULT_SERVER


def _connected(context: typer.Context, server: str) -> Quarry:
    return context.with_resource(Quarry(server))


SERVER: Any = typer.Option(
    DEFAULT_SERVER,
    "--server",
    metavar="<str>",
    parser=str,
    callback=_connected,
    envvar="QUARRY_SERVER",
    help="Base URL of the service.",
)
"""The option of a parameter `quarry: Quarry`."""

__all__ = ["SERVER", "Quarry"]
