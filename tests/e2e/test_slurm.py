"""`deploy/batch/nightly.sbatch` on a cluster of one node: queued again where that may help, and not else."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from service.proof.verify import verify_dataset
from tests.support.fake_hub import FakeHub
from tests.support.hub_state import Fault, Token
from tests.support.slurm import WAIT_S, Cluster, missing, one_node
from tests.support.tiny_model import random_target

pytestmark = [
    pytest.mark.slow,
    pytest.mark.outside,
    pytest.mark.skipif(missing() != [], reason=f"not installed: {', '.join(missing())} (slurm-wlm)"),
]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "batch" / "nightly.sbatch"

WriteJob = Callable[..., Path]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with one_node(tmp_path_factory.mktemp("slurm")) as cluster:
        binaries = Path(sys.executable).parent
        cluster.environment.update(
            PATH=f"{binaries}:{cluster.environment['PATH']}",
            PYTHONPATH=str(ROOT),
            QUARRY_ENGINE="tests.support.fake_engine:FakeEngine",
        )
        yield cluster


@pytest.fixture
def write_job(tmp_path: Path) -> WriteJob:
    random_target(tmp_path / "model", layers=4, hidden=64)
    (tmp_path / "nights").mkdir()

    def write(**changes: Any) -> Path:
        samples = [{"id": str(number), "token_ids": [1, 2, 3, number]} for number in range(3)]
        source = {"kind": "inline", "samples": samples}
        body = {"model": "./model", "layers": [1, 2], "canary": "skip", "source": source} | changes
        path = tmp_path / "job.json"
        path.write_text(json.dumps(body))
        return path

    return write


def begin(cluster: Cluster, job: Path, *options: str, log: str = "log", **variables: str) -> int:
    folder = job.parent
    return cluster.submit(SCRIPT, folder / log, *options, JOB=job, NIGHTS=folder / "nights", **variables)


def stop_in_the_middle(cluster: Cluster, number: int | str, log: Path, *options: str) -> None:
    """Send SIGTERM once the engine has work, as before the time is over, or what other options say."""
    deadline = time.monotonic() + WAIT_S
    while not (log.exists() and "running: " in log.read_text()):
        assert time.monotonic() < deadline, cluster.job(number)
        time.sleep(0.2)
    cluster.call("scancel", *(options or ("--signal=TERM", "--batch")), str(number))


def test_a_night_whose_hub_is_away_is_queued_again_and_pushed(
    cluster: Cluster, write_job: WriteJob, tmp_path: Path
) -> None:
    """1. The Hub does not answer. 2. The job is queued again. 3. The Hub is back, and has the night."""
    with FakeHub(cas=tmp_path / "cas") as hub:
        hub.add_token("hf_1", Token("me"))
        hub.fail("whoami", Fault(status=503, times=10_000))
        job = write_job(hub={"repo_id": "me/states"})
        number = begin(cluster, job, QUARRY_HUB_ENDPOINT=hub.url, QUARRY_HUB_TOKEN="hf_1")
        cluster.wait(number, Restarts="1")
        hub.heal()
        cluster.wait(number, JobState="COMPLETED", Restarts="1", ExitCode="0:0")
        assert (tmp_path / "nights" / str(number) / "README.md").exists()
        assert any(path.startswith("manifests/") for path in hub.repo("me/states").head.tree)


def test_a_request_that_is_refused_is_not_queued_again(cluster: Cluster, write_job: WriteJob) -> None:
    number = begin(cluster, write_job(layers=[99]))
    assert cluster.wait(number, JobState="FAILED")["ExitCode"] == "2:0"
    assert cluster.job(number)["Restarts"] == "0"


def test_a_night_that_is_stopped_goes_on_in_its_next_turn(
    cluster: Cluster, write_job: WriteJob, tmp_path: Path
) -> None:
    """1. SIGTERM comes in the middle, as before the time is over. 2. The next turn ends the same dataset."""
    number = begin(cluster, write_job(), QUARRY_FAKE_STEP_S="5", QUARRY_DRAIN_S="0")
    stop_in_the_middle(cluster, number, tmp_path / "log")
    cluster.wait(number, Restarts="1")
    cluster.wait(number, JobState="COMPLETED")
    assert "stopped; run the same command again to go on" in (tmp_path / "log").read_text()
    (night,) = (tmp_path / "nights").iterdir()
    report = verify_dataset(night)
    assert report.ok, report.findings


def test_a_night_that_is_cancelled_is_not_queued_again(
    cluster: Cluster, write_job: WriteJob, tmp_path: Path
) -> None:
    number = begin(cluster, write_job(), QUARRY_FAKE_STEP_S="5", QUARRY_DRAIN_S="0")
    stop_in_the_middle(cluster, number, tmp_path / "log", "--quiet")
    assert cluster.wait(number, JobState="CANCELLED")["Restarts"] == "0"
    assert "stopped; run the same command again to go on" in (tmp_path / "log").read_text()


def test_the_jobs_of_an_array_take_a_part_each_and_one_that_is_stopped_goes_on_alone(
    cluster: Cluster, write_job: WriteJob, tmp_path: Path
) -> None:
    """1. The first part ends. 2. The second, whose number is the array's, is stopped. 3. It alone goes on."""
    slow = {"QUARRY_FAKE_STEP_S": "5", "QUARRY_DRAIN_S": "0"}
    number = begin(cluster, write_job(), "--array=1-2", log="log-%a", PARTS="2", **slow)
    cluster.wait(f"{number}_1", JobState="COMPLETED")
    stop_in_the_middle(cluster, f"{number}_2", tmp_path / "log-2")
    cluster.wait(f"{number}_2", Restarts="1")
    cluster.wait(f"{number}_2", JobState="COMPLETED")
    assert cluster.job(f"{number}_1")["Restarts"] == "0"
    written = []
    for part in (1, 2):
        report = verify_dataset(tmp_path / "nights" / f"{number}_{part}")
        assert report.ok, report.findings
        written.append(report.rows)
    assert written == [2, 1]
