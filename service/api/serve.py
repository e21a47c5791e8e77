"""`quarry serve`: the API in this process and workers alongside it, until a signal arrives."""

import errno
import gc
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI

from service.api.app import create_app
from service.api.connection import Connection, most_connections
from service.control.keys import check_bind
from service.errors import OptionRefused
from service.host import check_data_dir, host_of
from service.settings import Settings
from service.store import Store
from service.work.placement import Placement
from service.work.runner import migrate
from service.work.supervisor import EXIT_WORKER_LOST, NodeSupervisor

UVICORN = logging.getLogger("uvicorn.error")

EXIT_NOT_STARTED = 1
CLOSE_CONNECTIONS_S = 10


def api_server(app: FastAPI, **options: Any) -> uvicorn.Server:  # noqa: ANN401 - those of uvicorn.Config
    """Return a server of `app`. Open event streams end when it is asked to stop; they would delay it."""
    settings: Settings = app.state.settings
    most = app.state.budget.connections = most_connections(settings.max_connections)
    config = uvicorn.Config(
        app, http=Connection, ws="none", proxy_headers=False, backlog=most // 2, **options
    )
    server = uvicorn.Server(config)
    app.state.stopping = lambda: server.should_exit
    app.openapi()  # cached: else the first request for it, which needs no key, blocks all others for 0.1 s
    return server


def bound(settings: Settings) -> socket.socket:
    """Return a socket at the service's address, which does not listen yet. Raises OptionRefused."""
    host, port = settings.host, settings.port
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        detail = f"the service cannot listen at {host}, port {port}: {error.strerror}"
        field, cure = "host", "give an address of this machine in --host or QUARRY_HOST"
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            field, cure = "port", "end what listens there, or give another --port or QUARRY_PORT"
        raise OptionRefused(detail, field=field, cure=cure) from error
    return listener


def serve(settings: Settings, listener: socket.socket, workers: Sequence[Placement]) -> int:
    """Serve until SIGTERM or SIGINT, then drain; return the exit code. Must run in the main thread.

    `listener` is what `bound` returned. `workers` run alongside the API, each where it is placed.

    Waits for an unavailable database. Raises OptionRefused, VersionRefused.
    """
    # A request of 100,000 samples is built in one go: the garbage collector would scan it a hundred times.
    gc.set_threshold(100_000, 10, 10)
    # Threads that validate large bodies yield to the event loop ten times as often.
    sys.setswitchinterval(0.0005)
    check_data_dir(settings)
    store = Store(settings.database())
    # Before the worker looks at it, and before uvicorn would turn an error into a traceback.
    migrate(store)
    if not settings.is_at_home:
        cure = "leave QUARRY_ROLES out, or run `quarry worker --roles capture,store`"
        raise OptionRefused("a service plans and finishes jobs", field="roles", cure=cure)
    host_of(store, settings)
    check_bind(store, settings)
    store.close()
    app = create_app(settings)
    server = api_server(
        app,
        host=settings.host,
        port=settings.port,
        timeout_graceful_shutdown=CLOSE_CONNECTIONS_S,
        server_header=False,
        **({"log_config": None} if settings.log_format == "json" else {}),  # else uvicorn has its own format
    )
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    UVICORN.info("Uvicorn running on http://%s:%d (Press CTRL+C to quit)", host, listener.getsockname()[1])

    def end() -> None:
        server.should_exit = True

    # A signal before uvicorn listens must end it too. When done, uvicorn raises again those it caught.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: end())

    from service.plan.child.fork_server import FORK_SERVER  # imports pyarrow

    FORK_SERVER.warm()  # its imports take seconds, and a submission waits for them
    node = NodeSupervisor(settings, workers, on_giving_up=end)
    app.state.workers_lost = lambda: node.lost
    node.start()
    try:
        server.run(sockets=[listener])
    finally:
        node.stop()
        node.join()
    if workers and node.gave_up:
        return EXIT_WORKER_LOST
    return 0 if server.started else EXIT_NOT_STARTED
