"""Workers on the nodes of a Ray cluster: detached actors, each running and restarting one `quarry worker`.

Ray places the actors and restarts them when a node dies. The leases in the database decide what each worker
does, and that no two do the same. No rows or results go through Ray.

A pool belongs to a data folder, which no node needs to see: `POOL_FILE` in it holds the pool's secret, whose
first characters name its Ray namespace. The workers capture and store, on each node's own scratch. The
settings go through Ray without their secrets, which come from the environment in which Ray was started on
each node. A worker's name ends with a digest of the settings, so that `scale` replaces workers with other
settings.
"""

import hashlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import ray
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError
from ray.util import get_placement_group, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from schemas.worker import Role
from service.errors import OptionRefused
from service.folder_lock import locked
from service.host import kept_word
from service.settings import Settings, load_settings
from service.work.supervisor import Supervisor
from service.work.worker_process import stop_grace_s, worker_command

logger = logging.getLogger(__name__)

POOL_FILE = "ray-pool"
CALL_S = 10.0
"""How long an actor may take to answer."""
NO_ANSWER = (GetTimeoutError, ActorUnavailableError)
"""What a call to an actor raises while the actor restarts."""
POLL_S = 0.5
SCRATCH = Path("/var/tmp/quarry")  # noqa: S108 - a worker creates it with access for its owner only
"""A node's default scratch: on disk, and kept across reboots."""


class WorkerActor:
    """Runs in a Ray process on one node. Its worker ends with it."""

    def __init__(self, settings_json: str) -> None:
        """Start the worker, unless this node lacks what it needs."""
        # Ray sets this to the actor's CPU count, and the engine would use no more.
        os.environ.pop("OMP_NUM_THREADS", None)
        self._problem = ""
        self._supervisor: Supervisor | None = None
        settings = Settings.model_validate_json(settings_json).with_secrets_of(load_settings())
        if settings.database_url is None:
            cure = "set it where `ray start` runs on this node, and start that again"
            self._problem = f"QUARRY_DATABASE_URL is not known here: {cure}"
            return
        # Ray restarts an actor whose process has ended.
        self._supervisor = Supervisor(
            worker_command(),
            settings.with_secrets(),
            stop_grace_s(settings),
            on_giving_up=lambda: os._exit(1),
        )
        self._supervisor.start()

    def drain(self) -> bool:
        """Ask the worker to shut down cleanly; return whether it has. Call until it has."""
        if self._supervisor is None:
            return True
        self._supervisor.stop()
        return not self._supervisor.is_alive()

    def describe(self) -> tuple[str, str]:
        """Return the node's host name, and what is wrong with it (empty: nothing)."""
        return socket.gethostname(), self._problem


class PoolWorker(NamedTuple):
    """One worker of the pool, for people and scripts."""

    name: str
    state: str
    """`running`; `waiting` for a node with room; `starting`, also after a node's death; or `failed`."""
    node: str
    """Host name, or empty."""
    problem: str
    """What is wrong, or empty."""


class RayPool:
    """The workers of one data folder on one cluster. `ray_pool` opens it."""

    def __init__(self, settings: Settings, secret: str) -> None:
        """Keep the workers' settings. This process must be connected to Ray in the namespace of `secret`."""
        self._settings = settings
        self._prefix = f"{_namespace(secret)}-"

    def scale(self, workers: int, gpus_per_worker: int) -> None:
        """Run `workers` workers, each on `gpus_per_worker` GPUs of one node, or on one CPU if it is 0.

        A worker already running with the same settings is left alone. All others are drained first. Workers
        that no node has room for wait for one to join.
        """
        settings_json = self._settings.without_secrets().model_dump_json()
        digest = hashlib.sha256(f"{settings_json} {gpus_per_worker}".encode()).hexdigest()[:8]
        wanted = [f"{self._prefix}{number}-{digest}" for number in range(workers)]
        states = self._group_states()
        self._remove([name for name in states if name not in wanted])
        resources = {"GPU": gpus_per_worker} if gpus_per_worker else {"CPU": 1}
        for name in wanted:
            if name in states:
                group = get_placement_group(name)
            else:
                group = placement_group([resources], strategy="STRICT_PACK", name=name, lifetime="detached")
            ray.remote(WorkerActor).options(
                name=name,
                get_if_exists=True,
                lifetime="detached",
                max_restarts=-1,
                num_cpus=resources.get("CPU", 0),
                num_gpus=gpus_per_worker,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group),
            ).remote(settings_json)

    def status(self) -> list[PoolWorker]:
        """Return every worker of the pool, by name."""
        return [self._status_of(name, state) for name, state in sorted(self._group_states().items())]

    def _status_of(self, name: str, group_state: str) -> PoolWorker:
        if group_state != "CREATED":
            return PoolWorker(name, "waiting", "", "no node has room for it")
        try:
            node, problem = ray.get(ray.get_actor(name).describe.remote(), timeout=CALL_S)
        except NO_ANSWER:
            return PoolWorker(name, "starting", "", "")
        except (RayError, ValueError) as error:  # ValueError: no actor has this name
            return PoolWorker(name, "failed", "", str(error))
        return PoolWorker(name, "failed" if problem else "running", node, problem)

    def _group_states(self) -> dict[str, str]:
        """Return the state of each worker's placement group, by the name they share."""
        groups = placement_group_table().values()
        own = [group for group in groups if group["name"].startswith(self._prefix)]
        return {group["name"]: group["state"] for group in own if group["state"] != "REMOVED"}

    def _remove(self, names: list[str]) -> None:
        """Drain workers, all at once; then release their placement groups."""
        if names:
            logger.info("draining %s", ", ".join(names))
        deadline = time.monotonic() + stop_grace_s(self._settings) + CALL_S
        draining = list(names)
        while draining and time.monotonic() < deadline:
            states = self._group_states()
            draining = [name for name in draining if states.get(name) == "CREATED" and not _has_drained(name)]
            time.sleep(POLL_S)
        for name in names:
            group = get_placement_group(name)
            actor = _find_actor(name)
            if actor is not None:
                ray.kill(actor)
            remove_placement_group(group)


def _has_drained(name: str) -> bool:
    actor = _find_actor(name)
    try:
        return actor is None or bool(ray.get(actor.drain.remote(), timeout=CALL_S))
    except NO_ANSWER:
        return False
    except RayError:
        return True  # it is dead


def _find_actor(name: str) -> ActorHandle | None:
    try:
        return ray.get_actor(name)
    except ValueError:
        return None


def _namespace(secret: str) -> str:
    return f"quarry-{secret[:8]}"


@contextmanager
def ray_pool(settings: Settings, address: str, scratch: Path = SCRATCH) -> Iterator[RayPool]:
    """Connect to the cluster at `address`; other users of the pool of `settings.data_dir` wait meanwhile.

    `scratch` is the folder on every node that its workers capture into.

    Raises:
        OptionRefused: the database is not PostgreSQL, or no cluster answers.
    """
    if not settings.database().startswith("postgresql"):
        raise OptionRefused(
            "workers on several nodes need PostgreSQL; SQLite's file is safe on one node only",
            field="database_url",
            cure="set QUARRY_DATABASE_URL=postgresql+psycopg://...",
        )
    settings = _with_absolute_paths(settings)
    secret, busy = kept_word(settings.data_dir, POOL_FILE), "another command is changing the pool"
    with locked(settings.data_dir / POOL_FILE, busy, "data_dir", wait=True):
        try:
            _ask_head(address)
            ray.init(address, namespace=_namespace(secret), log_to_driver=False, logging_level="ERROR")
        except (OSError, RayError, ValueError) as error:
            raise OptionRefused(
                f"no Ray cluster answers at {address}: {error}",
                field="address",
                cure="run this on a node of the cluster, or give --address HOST:PORT of its head",
            ) from error
        try:
            there = {"data_dir": scratch, "roles": (Role.CAPTURE, Role.STORE)}
            yield RayPool(settings.model_copy(update=there), secret)
        finally:
            ray.shutdown()


def _ask_head(address: str) -> None:
    """Connect to the port of the cluster's head, then disconnect.

    If nothing answers, Ray retries for seven minutes, and "auto" also finds a cluster that was killed.

    Raises:
        OSError: nothing answers there.
        ValueError: not an address.
    """
    if "://" not in address:
        head = canonicalize_bootstrap_address_or_die(address)
        host, port = head.rsplit(":", 1)
        socket.create_connection((host.strip("[]"), int(port)), timeout=CALL_S).close()


def _with_absolute_paths(settings: Settings) -> Settings:
    """Return settings that name the same files from Ray's working directory."""
    changes = {
        "data_dir": settings.data_dir.resolve(),
        "source_roots": tuple(path.resolve() for path in settings.source_roots),
        "model_roots": tuple(path.resolve() for path in settings.model_roots),
    }
    if settings.hub_token_file is not None:
        changes["hub_token_file"] = settings.hub_token_file.resolve()
    return settings.model_copy(update=changes)
