"""The page of a repository: the real client against a local Hub, its copy gone before the page is drawn."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from service.artifacts.dataset_files import HubFiles
from service.proof.tally import DatasetTally
from service.proof.verify import verify_dataset
from service.report.page import render_page
from tests.support.fake_hub import FakeHub
from tests.support.html_page import read_page
from tests.support.hub_state import Token
from tests.support.reference_models import TinyModel
from tests.support.shards import LENGTHS, capture, write_dataset

REPO = "org/states"


@pytest.mark.parametrize("compression", ["none", "planes", "fp8"])
def test_a_repository_has_the_page_that_its_folder_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    model = TinyModel(tmp_path / "model", "llama", "bfloat16")
    captured = capture(model, dtype="bfloat16", compression=compression)
    write_dataset(tmp_path / "made", {0: captured})
    files = {
        path.relative_to(tmp_path / "made").as_posix(): path.read_bytes()
        for path in (tmp_path / "made").rglob("*")
        if path.is_file()
    }
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    tally = DatasetTally()
    with FakeHub() as hub:
        hub.add_token("hf_reads", Token("me", role="read"))
        hub.add_repo(REPO, files)
        remote = HubFiles(REPO, endpoint=hub.url, token="hf_reads")
        report = verify_dataset(remote, model_folder=model.folder, tally=tally)
    assert not list((tmp_path / "scratch").iterdir())
    assert report.ok, report.findings
    root = read_page(render_page(report, tally, None, datetime(2025, 3, 1, tzinfo=UTC)))
    assert root.one("h1").text() == f"dataset {REPO}"
    assert len(root.all("figure")) == 8
    assert root.one("dl", "tiles").text().startswith(f"samples {len(LENGTHS)} ")
