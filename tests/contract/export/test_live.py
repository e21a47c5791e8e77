"""speculators' own training command takes the rows of a job while it is captured."""

import asyncio
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from schemas.job import JobState
from service.errors import Conflict
from service.store import consumers, jobs
from service.store.database import Transaction
from tests.contract.export.conftest import HIDDEN
from tests.contract.export.test_in_place import ON_CPU, REFUSED, TRAINED
from tests.support.api import serving
from tests.support.jobs import Shop, conversations, request
from tests.support.roles import Capture
from tests.support.tiny_model import random_target
from tests.support.trainers import environment, loaded_by

pytestmark = pytest.mark.slow

KILLS = 3
SAMPLES, BUDGET = 60, 5 * 2**20


@pytest.fixture
def shop(tmp_path: Path, real: Path) -> Iterator[Shop]:
    settings = {"scratch_bytes": BUDGET, "units_in_flight": 1, "units_in_proof": 1}
    shop = Shop.open(tmp_path, real, engine="tests.support.model_engine:ModelEngine", **settings)
    yield shop
    shop.store.close()


@pytest.fixture
def kept(shop: Shop, real: Path) -> Path:
    """A finished dataset of a few other samples."""
    job = shop.run(request(real, conversations(8, longest=10), loss="all"), "kept")
    assert job.state is JobState.COMPLETED, job.problem
    return shop.settings.dataset_dir(job.id)


def planned_job(shop: Shop, real: Path) -> str:
    """Plan a job whose rows go once they are consumed, and which is larger than the disk may hold."""
    source = {"kind": "inline", "samples": list(conversations(SAMPLES, longest=40))}
    storage = {"shard_bytes": 65_536, "retention": "consumed"}
    job_id = shop.submit(request(real, [], source=source, storage=storage, loss="all"), "live")
    shop.plan()
    return job_id


@contextmanager
def captured_beside(shop: Shop, job_id: str) -> Iterator[str]:
    """Capture and publish a job beside the block, behind a service; yield the job's URL."""

    def run() -> None:
        asyncio.run(Capture(shop.store, shop.settings, "worker", only_job=job_id).run())
        shop.publish()

    with serving(shop.settings) as api:
        worker = threading.Thread(target=run, daemon=True)
        worker.start()
        yield f"{api.base_url}/jobs/{job_id}"
        worker.join()


SOON = """
import service.trainers.ahead
service.trainers.ahead.WAIT_S = 0.5

if __name__"""


def command(folder: Path, *words: str, ranks: int = 1) -> list[str]:
    script = folder / "train_on_cpu.py"
    script.write_text(TRAINED.replace("\nif __name__", SOON))
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return [sys.executable, *launch, str(script), "quarry", "train", "speculators", *words]


def quietly(folder: Path) -> dict[str, Any]:
    return {"cwd": folder, "env": environment() | {"PYTHONWARNINGS": "ignore"}}


def refused(folder: Path, words: list[str], *, ranks: int = 1) -> str:
    """Train, which must fail; return what it says."""
    done = subprocess.run(
        command(folder, *words, ranks=ranks), **quietly(folder), capture_output=True, text=True, check=False
    )
    assert done.returncode != 0, done.stdout
    return done.stdout + done.stderr


def train(folder: Path, words: list[str], out: Path, *, ranks: int, killed: bool) -> None:
    """Train to the end; kill the trainer at some moments behind its first checkpoint, if that is wanted."""
    options = quietly(folder)
    for kill in range(KILLS if killed else 0):
        begun_s = time.time()
        with subprocess.Popen(command(folder, *words, ranks=ranks), **options) as training:
            while not is_newer(out / "0" / "quarry_rows.json", begun_s):
                assert training.poll() is None
                time.sleep(0.01)
            time.sleep(random.Random(kill).random())
            training.kill()
    done = subprocess.run(
        command(folder, *words, ranks=ranks), **options, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def is_newer(path: Path, than_s: float) -> bool:
    return path.exists() and path.stat().st_mtime > than_s


@pytest.mark.parametrize(
    ("ranks", "killed", "options"),
    [
        pytest.param(1, False, [], marks=pytest.mark.long),
        (2, False, []),
        (1, True, []),
        pytest.param(1, False, ["--checkpoint-freq", "1"], marks=pytest.mark.long),
    ],
    ids=["alone", "two ranks", "killed", "no checkpoint but where rows are waited for"],
)
def test_a_drafter_is_trained_on_rows_that_go_as_it_has_had_them(
    shop: Shop, real: Path, kept: Path, tmp_path: Path, ranks: int, killed: bool, options: list[str]
) -> None:
    """1. The disk holds a part of the job. 2. Capture goes on as checkpoints are kept. 3. Every row came."""
    job_id = planned_job(shop, real)
    planned = shop.store.read(jobs.job, job_id)
    assert planned.identity is not None
    assert planned.progress.tokens_planned * planned.identity.state_bytes_per_token > 1.5 * BUDGET
    out = tmp_path / "drafter"
    with captured_beside(shop, job_id) as url:
        words = ["--live", url, "--consumer", "trainer", str(kept), *ON_CPU, "--save-path", str(out)]
        words += ["--num-workers", "0", *options]
        train(tmp_path, words, out, ranks=ranks, killed=killed)
        others = 3 - ranks
        assert f"is of {ranks} ranks, and not of {others}" in refused(tmp_path, words, ranks=others)
    job = shop.store.read(jobs.job, job_id)
    assert job.state is JobState.COMPLETED, job.problem
    assert (job.progress.samples_written, job.progress.bytes_gone) == (SAMPLES, job.progress.bytes_written)
    states: list[dict[str, Any]] = json.loads((out / "0" / "quarry_rows.json").read_text())
    assert len(states) == ranks
    assert {state["next"] for state in states} == {SAMPLES}
    (consumer,) = shop.store.read(consumers.of_job, job_id).consumers
    assert consumer.place == states[0]["after"]


def test_an_acknowledgement_that_is_refused_ends_the_training_which_then_goes_on_behind_its_checkpoint(
    shop: Shop, real: Path, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. The disk is full, and the checkpoint that would make room is refused. 2. The next run makes it."""
    job_id = planned_job(shop, real)
    acknowledge = consumers.acknowledge

    def refuse(tx: Transaction, job_id: str, name: str, after: int, expires_s: int | None) -> list[str]:
        if after >= 0:
            raise Conflict("no more rows are let go", cure="ask again")
        return acknowledge(tx, job_id, name, after, expires_s)

    out = tmp_path / "drafter"
    with captured_beside(shop, job_id) as url:
        words = ["--live", url, "--consumer", "trainer", str(kept), *ON_CPU, "--save-path", str(out)]
        words += ["--num-workers", "0", "--checkpoint-freq", "1"]
        with monkeypatch.context() as patch:
            patch.setattr(consumers, "acknowledge", refuse)
            assert "no more rows are let go" in refused(tmp_path, words)
        assert (out / "0" / "quarry_rows.json").exists()
        assert shop.store.read(jobs.job, job_id).progress.bytes_gone == 0
        train(tmp_path, words, out, ranks=1, killed=False)
    job = shop.store.read(jobs.job, job_id)
    assert (job.progress.samples_written, job.progress.bytes_gone) == (SAMPLES, job.progress.bytes_written)


def test_a_job_of_another_model_is_refused_and_one_that_failed_is_named(
    shop: Shop, real: Path, kept: Path, tmp_path: Path
) -> None:
    """The second one's model lies where none may be loaded from, so that its planning fails."""
    for folder, said in (
        (real.parent, "the job captures another model"),
        (tmp_path, "is failed: 'another' is not inside a folder"),
    ):
        other = random_target(folder / "another", hidden=HIDDEN, dtype="float32", max_position=512, seed=1)
        job_id = shop.submit(request(other, conversations(3, longest=5), loss="all"), str(other))
        shop.plan()
        with captured_beside(shop, job_id) as url:
            words = ["--live", url, str(kept), *ON_CPU, "--save-path", str(tmp_path / "out")]
            assert said in refused(tmp_path, words).replace(str(other), "another")


def test_what_does_not_fit_is_refused_with_its_field_and_a_cure(kept: Path, tmp_path: Path) -> None:
    job = "http://127.0.0.1:9/jobs/j-0123456789abcdef"
    of_kept = str(kept)
    cases = [
        ("http://127.0.0.1:9", of_kept),
        (job, of_kept, "--epochs", "2"),
        (job, of_kept, "--save-best"),
    ]
    refusals = loaded_by(REFUSED, json.dumps(cases), result=tmp_path / "result.pt")
    assert [field for _, field, _, _ in refusals] == ["live", "epochs", "save_best"]
    assert all(cure for *_, cure in refusals)
