"""`quarry verify` of a repository: the real client against a local Hub."""

from pathlib import Path

import pytest

from schemas.names import shard_path
from service.artifacts.dataset_files import HubFiles
from service.errors import OptionRefused
from service.proof.tally import JobTally
from service.proof.verify import VerifyReport, verify_dataset
from service.proof.verify_unit import verify_unit
from tests.support.fake_hub import FakeHub
from tests.support.hub_state import Token
from tests.support.plans import JOB
from tests.support.reference_models import TinyModel
from tests.support.shards import LENGTHS, capture, write_dataset

REPO = "org/states"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return TinyModel(tmp_path_factory.mktemp("model"), "llama", "bfloat16")


@pytest.fixture(scope="module")
def files(model, tmp_path_factory) -> dict[str, bytes]:
    root = tmp_path_factory.mktemp("dataset")
    write_dataset(root / "made", {0: capture(model, dtype="bfloat16")})
    made = [path for path in (root / "made").rglob("*") if path.is_file()]
    return {path.relative_to(root / "made").as_posix(): path.read_bytes() for path in made}


def verify(hub: FakeHub, repo_id: str = REPO, **options: object) -> VerifyReport:
    files = HubFiles(repo_id, endpoint=hub.url, token="hf_reads")
    return verify_dataset(files, **options)


@pytest.fixture
def hub():
    with FakeHub() as hub:
        hub.add_token("hf_reads", Token("me", role="read"))
        yield hub


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files."""
    (scratch := tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    return scratch


def test_a_right_repository_has_no_findings_and_leaves_no_copy(hub, files, model, scratch):
    hub.add_repo(REPO, files)
    report = verify(hub, model_folder=model.folder)
    assert report.ok, str(report)
    assert report.rows == report.logit_rows == len(LENGTHS)
    assert report.where == f"dataset {REPO}"
    assert not list(scratch.iterdir())


def test_a_damaged_shard_of_a_repository_is_named(hub, files):
    path = shard_path(JOB, 0)
    hub.add_repo(REPO, files | {path: files[path][:-100]})
    report = verify(hub)
    assert not report.ok
    assert {finding.path for finding in report.findings} == {path}


@pytest.mark.parametrize("repo_id", ["org/none", "not a name"])
def test_a_repository_that_does_not_exist_is_named(hub, files, repo_id):
    hub.add_repo(REPO, files)
    with pytest.raises(OptionRefused, match=repo_id) as refusal:
        verify(hub, repo_id)
    assert refusal.value.cure is not None


def test_a_repository_is_held_unit_by_unit(hub, model, scratch, tmp_path, monkeypatch):
    made = {unit: capture(model, dtype="bfloat16", lengths=(3 + unit, 9 + unit)) for unit in range(3)}
    write_dataset(tmp_path / "made", made)
    paths = [path for path in (tmp_path / "made").rglob("*") if path.is_file()]
    hub.add_repo(REPO, {path.relative_to(tmp_path / "made").as_posix(): path.read_bytes() for path in paths})
    most = 0

    def look(*given: object) -> JobTally:
        nonlocal most
        most = max(most, len(list(scratch.rglob("*.parquet"))))
        return verify_unit(*given)

    monkeypatch.setattr("service.proof.verify.verify_unit", look)
    report = verify(hub)
    assert report.ok, str(report)
    assert (report.shards, most) == (3, 2), "a shard and its index"
    assert not list(scratch.iterdir())
