"""Pushes and downloads in a process of its own: the client chooses LFS or xet, and its endpoint, on import.

The process reads one JSON command a line and answers with one. Waits between tries are noted, not waited.
"""

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, Self

from service.store import jobs

Mode = Literal["lfs", "xet"]


class HubClient:
    """The process, in one mode; its caches lie below `home`. Use it as a context manager."""

    def __init__(
        self, mode: Mode, home: Path, endpoint: str | None = None, silence_s: float | None = None
    ) -> None:
        """Prepare; `endpoint` becomes the default one of the client, `silence_s` how long it bears none.

        The client bears a whole number of seconds of downloads.
        """
        environment = os.environ | {
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1" if mode == "lfs" else "0",
            "HF_XET_CLIENT_RETRY_BASE_DELAY": "1ms",
        }
        if endpoint is not None:
            environment["HF_ENDPOINT"] = endpoint
        if silence_s is not None:
            environment |= {
                "QUARRY_TEST_SILENCE_S": str(silence_s),
                "HF_XET_CLIENT_READ_TIMEOUT": f"{silence_s * 1000:.0f}ms",
                "HF_HUB_ETAG_TIMEOUT": "1",
                "HF_HUB_DOWNLOAD_TIMEOUT": "1",
            }
        self._environment = environment

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            # A main module would be imported again by each process that this one spawns.
            [sys.executable, "-c", "from tests.support.hub_client import main; main()"],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def ask(self, verb: str, within_s: float | None = None, **arguments: Any) -> dict[str, Any]:
        """Return the answer to a command; where there is none `within_s`, begin a new process and say so."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"verb": verb, **arguments}) + "\n")
        self._process.stdin.flush()
        if within_s is not None and not select.select([self._process.stdout], [], [], within_s)[0]:
            self._process.kill()
            self._process.communicate()
            self.__enter__()
            return {"error": f"no answer within {within_s} s"}
        return json.loads(self._process.stdout.readline())


def push(
    folder: str, endpoint: str, token: str, hub: dict[str, Any], first_wait_s: float | None = None
) -> dict[str, Any]:
    """Push a dataset folder; return the commit, or the problem. Its tries wait only if told how long."""
    from schemas.request import HubTarget
    from service.artifacts.repository import Patience
    from service.errors import QuarryError
    from service.publish.publisher import publish_folder
    from service.settings import Settings

    waits: list[float] = []
    patience = Patience(sleep=waits.append)
    if first_wait_s is not None:
        patience = Patience(first_wait_s=first_wait_s)
    settings = Settings(hub_endpoint=endpoint, hub_token=token)
    try:
        commit = publish_folder(Path(folder), HubTarget(**hub), settings, patience)
    except QuarryError as error:
        return {"error": type(error).__name__, **error.problem().model_dump(), "waits": waits}
    return {"commit": commit, "waits": waits}


def publish(data_dir: str, endpoint: str, token: str, lease: int) -> dict[str, Any]:
    """Publish one job of a data folder as its `lease`-th publisher, in commits of few files; return all jobs.

    Every publisher begins when the lease of the one before is over.
    """
    from huggingface_hub import file_download

    from service.artifacts import hub_client
    from service.artifacts.repository import Patience
    from service.publish import push, upload
    from service.settings import Settings
    from service.store import Store
    from tests.support.finished_job import JOB, OTHER_JOB, OWNER
    from tests.support.roles import run_publishing
    from tests.support.store_cases import Clock

    push.MAX_COMMIT_FILES, upload.GROUP_FILES = 4, 2
    hub_client.SILENCE_S = float(os.environ["QUARRY_TEST_SILENCE_S"])
    file_download._ETAG_RETRY_TIMEOUT = 1  # a minute, six times, that no setting shortens
    settings = Settings(data_dir=Path(data_dir), hub_endpoint=endpoint, hub_token=token)
    clock = Clock()
    clock.advance(lease * (settings.lease_s + 1))
    store = Store(settings.database(), clock.of(settings.database()))
    patience = Patience(attempts=3, sleep=lambda _: None)
    try:
        run_publishing(store, settings, OWNER, lambda: False, patience=patience)
        views = [store.read(jobs.job, job_id).view() for job_id in (JOB, OTHER_JOB)]
    finally:
        store.close()
    return {"jobs": {job.id: job.model_dump(mode="json") for job in views}}


def download(repo_id: str, token: str, folder: str) -> dict[str, Any]:
    """Download a whole repository with the client's own snapshot."""
    from huggingface_hub import snapshot_download

    return {"folder": snapshot_download(repo_id, repo_type="dataset", token=token, local_dir=folder)}


def load(repo_id: str, token: str | None, config: str | None, streaming: bool) -> dict[str, Any]:
    """Load a configuration with `datasets`; return its rows, binary values as hex."""
    from datasets import load_dataset

    rows = load_dataset(repo_id, config, split="train", token=token, streaming=streaming)
    return {"rows": [{k: v.hex() if isinstance(v, bytes) else v for k, v in row.items()} for row in rows]}


def main() -> None:
    """Answer commands until the input ends."""
    import huggingface_hub.utils._http as client

    client.time.sleep = lambda _: None
    verbs = {"push": push, "publish": publish, "download": download, "load": load}
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print must not be taken for an answer
    for line in sys.stdin:
        command = json.loads(line)
        answers.write(json.dumps(verbs[command.pop("verb")](**command)) + "\n")
        answers.flush()
