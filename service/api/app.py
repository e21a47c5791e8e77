"""Builds the FastAPI application: settings, lifespan, routers, middleware. No logic."""

from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from importlib.metadata import version

from anyio import CapacityLimiter
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from prometheus_fastapi_instrumentator import Instrumentator
from starlette.concurrency import run_in_threadpool

from service.api import problems
from service.api.gate import Gate
from service.api.metrics import JobMetrics
from service.api.routes import consumers, extract, health, jobs, keys, schedules, webhooks, workers
from service.api.sse import EventFeed
from service.control.budget import TURNS, Budget, Turn
from service.page.router import router as page_router
from service.settings import Settings
from service.store import Store, migration


def create_app(settings: Settings) -> FastAPI:
    """Return the application. Its store is opened and migrated at server startup, and closed at shutdown.

    The server's runner may set two callables: `app.state.stopping` returns whether the server is shutting
    down, which ends event streams; `app.state.workers_lost` returns how many of its workers are not running.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        with closing(Store(settings.database())) as store:
            await run_in_threadpool(store.write, migration.migrate)
            app.state.store = store
            app.state.feed = EventFeed(store, lambda: app.state.stopping())
            metrics = JobMetrics(store, settings.data_dir, lambda: app.state.workers_lost())
            app.state.registry.register(metrics)
            async with consumers.listening(store):
                yield

    app = FastAPI(
        title="Quarry",
        description="Hidden states of a target LLM as proven, durable training sets for drafters.",
        version=version("eagle-quarry"),
        lifespan=lifespan,
        # FastAPI's docs pages load scripts from another host, on an origin that may start jobs.
        docs_url=None,
        redoc_url=None,
        # Behind a proxy that ends TLS, a redirect would name plain HTTP.
        redirect_slashes=False,
        # Any request with a body may get these, even if its route takes none.
        responses=problems.problem_responses(400, 413),
        generate_unique_id_function=lambda route: route.name,
        # One schema per model, for input and output.
        separate_input_output_schemas=False,
    )
    app.state.settings = settings
    app.state.stopping, app.state.workers_lost = lambda: False, lambda: 0
    app.state.budget, app.state.connections = Budget(settings), OrderedDict()
    # Submissions may wait for the Hub; with threads of their own, they keep no probe or other route waiting.
    app.state.submit_threads = CapacityLimiter(TURNS[Turn.SUBMISSION])
    app.state.probe_threads = CapacityLimiter(2)
    app.state.registry = CollectorRegistry()
    app.state.looks = {}  # what each open page saw last
    problems.install(app)
    for module in (extract, jobs, consumers, webhooks, schedules, keys, workers, health):
        app.include_router(module.router)
    app.include_router(page_router)
    Instrumentator(
        should_group_status_codes=False,
        should_exclude_streaming_duration=True,
        excluded_handlers=["/metrics", "/healthz", "/readyz"],
        registry=app.state.registry,
    ).instrument(app)
    # Outside the instrumentation, which keeps every method it has ever seen.
    app.add_middleware(Gate, settings=settings, budget=app.state.budget)
    return app
