"""A job counts once its manifest is there: what a push has left so far is never read as if it were whole."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from schemas.dataset.manifest import body_sha256
from service.artifacts.dataset_files import LocalFiles
from service.proof.verify import verify_dataset
from service.reader import Eagle3, QuarryDataset, ReaderError
from service.reader.errors import JobsDiffer
from tests.contract.reader.conftest import NUM_SAMPLES, finished
from tests.contract.reader.test_dataset import assert_right
from tests.support.fake_hub import FakeHub
from tests.support.shards import entry_of
from tests.support.tiny_model import random_target

NIGHTLY = "j-ffffffffffffffff"
MANIFEST = f"manifests/{NIGHTLY}.json"


def put(made: Path, folder: Path, *patterns: str) -> None:
    """Copy files of the job in `made` to `folder`, as the files of another job."""
    for pattern in patterns:
        for path in sorted(made.glob(pattern)):
            copy = folder / path.parent.relative_to(made).parent / NIGHTLY / path.name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
            if path.match("index/*/*"):
                table = pq.read_table(path)
                shards = [f"data/{NIGHTLY}/{Path(shard).name}" for shard in table["shard"].to_pylist()]
                place = table.schema.get_field_index("shard")
                pq.write_table(table.set_column(place, table.schema.field(place), [shards]), copy)


def land(made: Path, folder: Path) -> None:
    """Let the last commit of the other job's push happen."""
    manifest = next(made.glob("manifests/*.json"))
    body = json.loads(manifest.read_text().replace(manifest.stem, NIGHTLY))
    for entry in body["indexes"]:
        entry |= entry_of(folder, entry["path"]).model_dump()
    (folder / MANIFEST).write_text(json.dumps(body | {"sha256": body_sha256(body)}))


@pytest.fixture(scope="module", params=["other layers", "other weights"])
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    """Return a dataset of the same model and other layers, or of its folder with other weights."""
    folder = tmp_path_factory.mktemp("other")
    if request.param == "other layers":
        return finished(folder, target, layers=[1])
    overwritten = random_target(folder / "models" / target.name, seed=1, hidden=64, max_position=512)
    return finished(folder, overwritten)


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    """Return a dataset that a second job is pushed to: the test says what has come."""
    return shutil.copytree(plain, tmp_path / "repository")


def test_a_job_is_read_when_its_manifest_is_there_and_not_before(plain, folder):
    put(plain, folder, "data/*/*", "index/*/*")
    rows = QuarryDataset(folder)
    assert rows.sample_ids == QuarryDataset(plain).sample_ids
    land(plain, folder)
    both = QuarryDataset(folder)
    assert len(both) == 2 * NUM_SAMPLES
    assert {both.shard_of(number).split("/")[1] for number in range(len(both))} > {NIGHTLY}


@pytest.mark.slow
def test_a_part_of_a_job_of_other_states_does_not_keep_the_whole_ones_from_being_read(other, folder):
    put(other, folder, "data/*/*", "index/*/*")
    rows = QuarryDataset(folder)
    assert len(rows) == NUM_SAMPLES
    for number in range(NUM_SAMPLES):
        assert_right(rows[number])
    land(other, folder)
    with pytest.raises(
        JobsDiffer, match=rf"the jobs j-\w+ and {NIGHTLY} differ in (layer_ids|weights_sha256)"
    ):
        QuarryDataset(folder)


def test_a_job_that_is_named_must_be_complete(plain, folder):
    (whole,) = [path.name for path in (plain / "index").iterdir()]
    put(plain, folder, "data/*/*", "index/*/*")
    for jobs in ([NIGHTLY], [whole, NIGHTLY], [whole, "j-none"]):
        with pytest.raises(ReaderError, match=rf"not complete: {jobs[-1]}\..*Complete here: {whole}"):
            QuarryDataset(folder, jobs=jobs)
    assert len(QuarryDataset(folder, jobs=[whole])) == NUM_SAMPLES
    land(plain, folder)
    assert len(QuarryDataset(folder, jobs=[whole, NIGHTLY])) == 2 * NUM_SAMPLES


@pytest.mark.parametrize("beside", [f".{NIGHTLY}.json.tmp", f"{NIGHTLY}.json.part", f"old/{NIGHTLY}.json"])
def test_a_dataset_without_a_complete_job_says_so(plain, folder, beside):
    shutil.rmtree(folder)
    put(plain, folder, "data/*/*", "index/*/*")
    name = folder / "manifests" / beside
    name.parent.mkdir(parents=True)
    shutil.copy(next(plain.glob("manifests/*.json")), name)
    with pytest.raises(ReaderError, match=r"no job is complete.*<job>\.json, which.*Complete here: none"):
        QuarryDataset(folder)


def test_many_jobs_without_a_manifest_are_not_all_named(plain):
    with pytest.raises(ReaderError, match="not complete: j-0, j-1, j-2, j-3, j-4 and 4 more"):
        QuarryDataset(plain, jobs=[f"j-{job}" for job in range(9)])


def test_files_of_a_job_that_its_manifest_does_not_name_are_not_read(plain, folder):
    """They are whole, and where the job's own files are: only the manifest tells."""
    (job,) = [path.name for path in (plain / "index").iterdir()]
    strays = [f"{kind}/{job}/train-00099.parquet" for kind in ("data", "index")]
    for stray in strays:
        shutil.copy(next((folder / stray).parent.iterdir()), folder / stray)
    rows = QuarryDataset(folder)
    assert rows.sample_ids == QuarryDataset(plain).sample_ids
    assert {finding.path for finding in verify_dataset(folder).findings} == set(strays)


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def lose_a_row(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.slice(1), path)


@pytest.mark.parametrize(
    ("harm", "reseal", "what"),
    [
        (longer, False, r"train-00000\.parquet has \d+ bytes, its manifest says"),
        (lose_a_row, True, r"the indexes hold \d+ rows of data/.*train-00000\.parquet, the manifests \d+"),
    ],
)
def test_an_index_that_is_not_what_the_manifest_says_is_refused(plain, folder, harm, reseal, what):
    put(plain, folder, "data/*/*", "index/*/*")
    if not reseal:
        land(plain, folder)
    harm(folder / "index" / NIGHTLY / "train-00000.parquet")
    if reseal:
        land(plain, folder)
    with pytest.raises(ReaderError, match=what):
        QuarryDataset(folder, jobs=[NIGHTLY])


class Landing(LocalFiles):
    """A folder in which something happens after the first look."""

    def __init__(self, folder: Path, happens: Callable[[], None]) -> None:
        super().__init__(folder)
        self.happens = happens

    def manifests(self) -> list[str]:
        found = super().manifests()
        self.happens()
        self.happens = lambda: None
        return found


def test_a_job_that_lands_while_it_is_looked_for_is_read_whole_or_not_at_all(plain, folder):
    """1. Half of the indexes are there. 2. After the first look the rest comes, and the manifest."""
    put(plain, folder, "data/*/*", "index/*/*")
    files = sorted((folder / "index" / NIGHTLY).iterdir())
    assert len(files) > 1
    files[-1].unlink()

    def last_commit() -> None:
        put(plain, folder, f"index/*/{files[-1].name}")
        land(plain, folder)

    assert len(QuarryDataset(Landing(folder, last_commit))) == NUM_SAMPLES
    assert len(QuarryDataset(folder)) == 2 * NUM_SAMPLES


HUB = """
import json, sys, torch
from service.reader import Eagle3, QuarryDataset, ReaderError
for name in sys.argv[1:]:
    try:
        rows = QuarryDataset("hf://datasets/" + name, view=Eagle3(layers=(4,)))
        states = rows[2]["hidden_states"].view(dtype=torch.int16)
        print(json.dumps([rows.sample_ids, states.tolist()]))
    except ReaderError as error:
        print(json.dumps(str(error)))
"""


@pytest.mark.slow
def test_a_repository_is_read_without_what_a_push_has_left_so_far(plain, folder, tmp_path):
    """Three repositories: a job complete and one in its push; nothing but a push; nothing at all."""
    put(plain, folder, "data/*/*", "index/*/*")
    held = [path for path in folder.rglob("*") if path.is_file()]
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in held}
    begun = {path: files[path] for path in files if NIGHTLY in path}
    with FakeHub() as hub:
        for name, content in {"both": files, "begun": begun, "empty": {}}.items():
            hub.add_repo(f"org/{name}", content)
        hub_variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-W", "ignore", "-c", HUB, "org/both", "org/begun", "org/empty"]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=os.environ | hub_variables
        )
    assert done.returncode == 0, done.stderr
    (ids, states), only_begun, empty = map(json.loads, done.stdout.splitlines())
    here = QuarryDataset(plain, view=Eagle3(layers=(4,)))
    assert ids == here.sample_ids
    assert states == here[2]["hidden_states"].view(torch.int16).tolist()
    assert "no job is complete" in only_begun
    assert "no job is complete" in empty
