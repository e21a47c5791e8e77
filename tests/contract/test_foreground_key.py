"""What the id of a job of `quarry extract` is made of: its request, and what its source holds."""

import json
import signal
from dataclasses import asdict
from pathlib import Path

import pytest

from schemas.dataset.manifest import body_sha256
from schemas.identity import Identity
from schemas.job import JobState
from schemas.names import frozen_source_path, job_id_from_content, shown_model
from schemas.request import ExtractRequest
from service.cli.job_file import read_job_file
from service.plan.model_folder import ModelFolder, content_of
from service.settings import Settings
from service.store import NewJob, Store, jobs, migration, plans
from tests.contract.test_foreground import LONG_S, extract, manifest_of, running, write_job
from tests.support.finished_job import an_identity
from tests.support.tiny_model import random_target

pytestmark = pytest.mark.slow

SAMPLES = [{"id": name, "token_ids": [1, 2, 3, number]} for number, name in enumerate("abc")]


def write_source(folder: Path, samples: list[dict[str, object]]) -> None:
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a target, a source of three samples and a job file."""
    folder = tmp_path / "job"
    random_target(folder / "model", layers=4, hidden=64)
    write_source(folder, SAMPLES)
    write_job(folder)
    return folder


def test_a_new_folder_is_another_job_only_where_the_source_holds_other_rows(
    folder: Path, tmp_path: Path
) -> None:
    """1. The same file is run twice. 2. Its source changes. 3. It is run again, each time elsewhere."""
    for name in ("first", "same"):
        assert extract(folder / "job.json", tmp_path / name).returncode == 0
    write_source(folder, SAMPLES[:2])
    done = extract(folder / "job.json", tmp_path / "other")
    assert done.returncode == 0, done.stderr
    first, same, other = (manifest_of(tmp_path / name) for name in ("first", "same", "other"))
    assert first.provenance.job_id == same.provenance.job_id != other.provenance.job_id
    assert first.request == other.request
    assert (first.totals.samples_written, other.totals.samples_written) == (3, 2)


def test_a_complete_folder_is_refused_where_its_source_or_its_model_changed(
    folder: Path, tmp_path: Path
) -> None:
    """1. A run makes a folder whole. 2. Its source, then its model changes. 3. Each time it is run again."""
    out = tmp_path / "out"
    assert extract(folder / "job.json", out).returncode == 0
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    write_source(folder, SAMPLES[:2])
    done = extract(folder / "job.json", out)
    assert done.returncode == 2
    assert "--out" in done.stderr
    assert "its source or model has changed since" in done.stderr
    write_source(folder, SAMPLES)
    assert extract(folder / "job.json", out).returncode == 0
    config = folder / "model" / "config.json"
    config.write_text(config.read_text().replace("rope_theta", "rope_thet_a"))
    done = extract(folder / "job.json", out)
    assert done.returncode == 2
    assert "its source or model has changed since" in done.stderr
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_a_stopped_run_goes_on_with_the_samples_it_had_planned(folder: Path, tmp_path: Path) -> None:
    """1. A run is stopped when all is planned. 2. Its source changes. 3. Run again, it is the same job."""
    out = tmp_path / "out"
    with running(folder / "job.json", out, QUARRY_FAKE_STEP_S=LONG_S, QUARRY_DRAIN_S="0") as child:
        child.send_signal(signal.SIGTERM)
        assert child.wait(120) == 128 + signal.SIGTERM
    (before,) = jobs_of(out)
    write_source(folder, SAMPLES[:2])
    done = extract(folder / "job.json", out)
    assert done.returncode == 0, done.stderr
    manifest = manifest_of(out)
    assert (manifest.provenance.job_id, manifest.totals.samples_written) == (before[0], 3)


def test_a_folder_whose_plan_is_unfinished_is_refused_when_the_source_changed(
    folder: Path, tmp_path: Path
) -> None:
    """1. A run dies while it plans. 2. Its source changes. 3. Run again, no second job begins."""
    out = tmp_path / "out"
    job_id = job_id_from_content("an earlier run")
    begin_planning(out, job_id, read_job_file(folder / "job.json"))
    done = extract(folder / "job.json", out)
    assert done.returncode == 3, done.stderr
    assert "source_fingerprint" in done.stderr
    assert jobs_of(out) == [(job_id, JobState.FAILED)]


def begin(out: Path, job_id: str, request: ExtractRequest) -> None:
    """Leave what a run leaves that is killed, or whose job fails, before anything is planned."""
    settings = Settings(data_dir=out / ".quarry")
    settings.data_dir.mkdir(parents=True)
    store = Store(settings.database())
    store.write(migration.migrate)
    store.write(jobs.submit, NewJob.of(job_id, job_id, request))
    store.close()


def test_a_run_of_which_nothing_was_planned_begins_anew_with_what_source_and_model_hold(
    folder: Path, tmp_path: Path
) -> None:
    """1. A run is killed before it plans. 2. Its source changes. 3. Run again, it is another job."""
    out, earlier = tmp_path / "out", job_id_from_content("the source as it was")
    begin(out, earlier, read_job_file(folder / "job.json"))
    done = extract(folder / "job.json", out)
    assert done.returncode == 0, done.stderr
    assert manifest_of(out).provenance.job_id != earlier
    assert extract(folder / "job.json", out).returncode == 0


def test_a_complete_folder_is_what_its_manifest_says_and_not_what_its_job_is_called(
    folder: Path, tmp_path: Path
) -> None:
    """1. A run makes a folder whole, and its source changed as it began. 2. It is put back, and run again."""
    out = tmp_path / "out"
    assert extract(folder / "job.json", out).returncode == 0
    made = manifest_of(out).provenance
    (manifest,) = (out / "manifests").glob("*.json")
    fingerprint = made.identity.source_fingerprint
    body = json.loads(manifest.read_text().replace(fingerprint, f"{fingerprint[:-4]}0000"))
    body["identity_sha256"] = Identity.model_validate(body["provenance"]["identity"]).sha256()
    manifest.write_text(json.dumps(body | {"sha256": body_sha256(body)}))
    assert extract(folder / "job.json", out).returncode == 2


def begin_planning(out: Path, job_id: str, request: ExtractRequest) -> None:
    """Leave what a run leaves that is killed when it has found out what its dataset is."""
    begin(out, job_id, request)
    settings = Settings(data_dir=out / ".quarry")
    store = Store(settings.database())
    lease = plans.lease(store, "killed", 1.0)
    assert lease is not None
    content = asdict(content_of(ModelFolder(Path(request.model))))
    about = an_identity(model=shown_model(request.model), **content)
    frozen = settings.work_root / frozen_source_path(job_id)
    frozen.parent.mkdir(parents=True)
    frozen.write_text(json.dumps(["samples.jsonl"]))
    store.write(plans.set_identity, lease, about)
    store.close()


def jobs_of(out: Path) -> list[tuple[str, JobState]]:
    store = Store(f"sqlite:///{out / '.quarry' / 'quarry.db'}")
    rows, _ = store.read(jobs.page)
    store.close()
    return [(row.id, row.state) for row in rows]


def test_a_run_killed_before_it_had_a_job_begins_with_one(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / ".quarry").mkdir(parents=True)
    done = extract(folder / "job.json", out)
    assert done.returncode == 0, done.stderr
    assert manifest_of(out).totals.samples_written == 3
