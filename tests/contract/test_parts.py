"""`quarry extract --part`: machines that share a repository and nothing else."""

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from schemas.dataset.jobs_table import JobsTable
from schemas.names import JOBS_PATH
from service.proof.verify import verify_dataset
from service.publish.card import assigned_configs
from tests.contract.test_foreground import extract, manifest_of, write_job
from tests.support.fake_hub import FakeHub
from tests.support.hub_state import Token
from tests.support.tiny_model import random_target

REPO = "org/states"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, a source of seven rows of which the sixth is bad, and a job file."""
    folder = tmp_path_factory.mktemp("parts")
    random_target(folder / "model", layers=4, hidden=64)
    rows = [{"id": str(number), "token_ids": [1, 2, 3, number]} for number in range(7)]
    rows[5] = {"id": "5"}
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_job(folder)
    return folder


def samples(out: Path) -> dict[str, str]:
    """Return the source id of each sample of a folder, by its id."""
    rows = [row for file in sorted(out.glob("index/*/*.parquet")) for row in pq.read_table(file).to_pylist()]
    return {row["sample_id"]: row["source_id"] for row in rows}


@pytest.mark.slow
def test_parts_into_folders_hold_what_the_whole_holds_and_a_rerun_changes_nothing(
    folder: Path, tmp_path: Path
) -> None:
    """1. The whole and three parts are run. 2. A part is run again. 3. Another is refused its folder."""
    job, outs = folder / "job.json", [tmp_path / str(index) for index in (1, 2, 3)]
    done = [extract(job, tmp_path / "whole")]
    done += [extract(job, out, "--part", f"{index}/3") for index, out in enumerate(outs, 1)]
    assert [one.returncode for one in done] == [0] * 4, [one.stderr for one in done]
    parts = [samples(out) for out in outs]
    assert [sorted(part.values()) for part in parts] == [["0", "3", "6"], ["1", "4"], ["2"]]
    assert {name: row for part in parts for name, row in part.items()} == samples(tmp_path / "whole")
    manifests = [manifest_of(out) for out in outs]
    assert len({manifest.provenance.job_id for manifest in manifests}) == 3
    assert [manifest.totals.samples_planned for manifest in manifests] == [3, 2, 2]
    assert [[reject.position for reject in manifest.rejects] for manifest in manifests] == [[], [], [5]]
    assert manifests[2].request.model_dump()["part"] == {"index": 3, "of": 3}
    assert all(verify_dataset(out).ok for out in outs)

    before = {path: path.stat().st_mtime_ns for path in outs[2].rglob("*")}
    assert extract(job, outs[2], "--part", "3/3").returncode == 0
    assert {path: path.stat().st_mtime_ns for path in outs[2].rglob("*")} == before
    other = extract(job, outs[2], "--part", "2/3")
    assert (other.returncode, "field: --out" in other.stderr) == (2, True)


@pytest.mark.slow
def test_a_part_without_a_row_ends_well_and_makes_nothing(folder: Path, tmp_path: Path) -> None:
    done = extract(folder / "job.json", tmp_path / "out", "--part", "8/8")
    assert (done.returncode, "0 samples" in done.stdout) == (0, True), done.stderr
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.slow
def test_parts_side_by_side_end_in_one_repository_that_lists_each(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Two parts run at once. 2. Each is run again on a machine that has neither folder nor engine."""
    job = write_job(folder, "pushed.json", hub={"repo_id": REPO, "private": False})
    with FakeHub() as hub:
        hub.add_token("hf_1", Token("me", orgs={"org": "write"}))
        told = {"QUARRY_HUB_ENDPOINT": hub.url, "QUARRY_HUB_TOKEN": "hf_1", "HF_HUB_DISABLE_XET": "1"}

        def run(index: int, out: Path, **settings: str) -> subprocess.CompletedProcess[str]:
            return extract(job, out, "--part", f"{index}/2", **told, **settings)

        with ThreadPoolExecutor() as machines:
            done = list(machines.map(run, (1, 2), (tmp_path / "first", tmp_path / "second")))
        assert [one.returncode for one in done] == [0, 0], [one.stderr for one in done]
        head = hub.repo(REPO).head
        both = {manifest_of(tmp_path / name).provenance.job_id for name in ("first", "second")}
        table = JobsTable.model_validate_json(head.tree[JOBS_PATH].content or b"")
        card = (head.tree["README.md"].content or b"").decode()
        assert {entry.job_id for entry in table.jobs} == both == assigned_configs(card).keys()
        assert "part 1/2 of the rows" in card and "part 2/2 of the rows" in card
        assert {Path(path).stem for path in head.tree if path.startswith("manifests/")} == both
        for index in (1, 2):
            again = run(index, tmp_path / f"again-{index}", QUARRY_ENGINE="no.such:Engine")
            assert (again.returncode, "already" in again.stdout) == (0, True), again.stderr
            assert not (tmp_path / f"again-{index}").exists()
        assert hub.repo(REPO).head is head
