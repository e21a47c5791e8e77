"""Who follows a job reads on while its units leave for the repository."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from schemas.request import HubTarget
from service.store import storing
from tests.contract.publish.test_storing import FULL_FILES, UNITS, Run
from tests.support.api import serving
from tests.support.desk import REPO, TOKEN, writable_hub
from tests.support.finished_job import JOB, an_identity, capture_unit, layer_bytes

pytestmark = pytest.mark.slow


@pytest.fixture
def passing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A job whose shards are not kept here; two units fill a commit."""
    monkeypatch.setattr(storing, "FULL_FILES", FULL_FILES)
    with writable_hub(tmp_path, monkeypatch) as hub:
        run = Run(tmp_path, hub, HubTarget(repo_id=REPO), keep_local=False)
        yield run
        run.store.close()


FOLLOWER = """
import sys
from service.reader import QuarryStream
for row in QuarryStream.follow(sys.argv[1], sys.argv[2], folder=sys.argv[3] or None):
    print(row.sample_id, row.layer(2).float().sum().item(), flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("folder", ["", "/not/on/this/host"])
def test_who_follows_a_job_finds_units_that_left_for_the_repository(
    passing: Run, folder: str, tmp_path: Path
) -> None:
    """1. A row is read from the first unit. 2. That unit and the next go to the repository. 3. All rows come.

    From the folder of this host, and by ranges from another, where a file that is open ends as well.
    """
    with (
        serving(passing.settings) as api,
        following(passing, tmp_path, str(api.base_url), JOB, folder) as follower,
    ):
        first = follower.stdout.readline()
        passing.hub.know_xet(passing.dataset)
        assert passing.keep() and passing.shards_here() == [2]
        capture_unit(passing.store, passing.dataset)
        capture_unit(passing.store, passing.dataset)
        passing.hub.know_xet(passing.dataset)
        passing.publish()
        rest, errors = follower.communicate("\n" * 100)
    assert follower.returncode == 0, errors
    are_all(came=[first, *rest.splitlines()])


def test_a_repository_is_followed_from_its_publication_on(passing: Run, tmp_path: Path) -> None:
    """1. Two units are in the repository, and nothing says so. 2. The job is published. 3. All rows come."""
    passing.hub.know_xet(passing.dataset)
    assert passing.keep()
    with following(passing, tmp_path, f"hf://datasets/{REPO}", JOB, "") as follower:
        said = follower.stderr.readline()
        assert said.startswith(f"job {JOB} of hf://datasets/{REPO} is not published yet; waiting (")
        capture_unit(passing.store, passing.dataset)
        capture_unit(passing.store, passing.dataset)
        passing.hub.know_xet(passing.dataset)
        passing.publish()
        came, errors = follower.communicate("\n" * 100)
    assert follower.returncode == 0, errors
    are_all(came.splitlines())


def following(run: Run, folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    environment = os.environ | {"HF_ENDPOINT": run.hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(folder / "hf")}
    command, pipe = [sys.executable, "-c", FOLLOWER, *arguments], subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def are_all(came: list[str]) -> None:
    """Hold the rows that came, in order, against what was captured."""
    dtype = getattr(torch, an_identity().dtype)
    for place, line in enumerate(came):
        sample_id, total = line.split()
        unit, row = divmod(place, 3)
        states = torch.frombuffer(bytearray(layer_bytes(unit, row, 2)), dtype=dtype).float()
        assert (sample_id, float(total)) == (f"{JOB}-{unit}-{row}", states.sum().item())
    assert len(came) == UNITS * 3
