"""`quarry verify --report`: the page appears beside what the command says anyway."""

import json
from pathlib import Path

import pytest

from service.cli import main
from service.report.job_view import HEAD_TOKENS, TAIL_TOKENS
from tests.support.html_page import read_page
from tests.support.reference_models import TinyModel
from tests.support.shards import capture, write_dataset


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    model = TinyModel(tmp_path / "model", "llama", "bfloat16")
    write_dataset(tmp_path / "dataset", tmp_path, {0: capture(model, dtype="bfloat16", lengths=(3, 5))})
    return tmp_path / "dataset"


def run(*arguments: object) -> int:
    """Run the command line and return the code that it leaves with."""
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    assert isinstance(left.value.code, int)
    return left.value.code


def test_the_page_is_written_and_the_output_stays_what_it_was(dataset, tmp_path, capsys):
    assert run("verify", dataset, "--json") == 0
    plain = json.loads(capsys.readouterr().out)
    page = tmp_path / "page.html"
    assert run("verify", dataset, "--json", "--report", page) == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == plain
    assert str(page) in told.err
    assert read_page(page.read_text()).one("section", "verdict").text().startswith("The dataset is right")


def test_a_page_is_written_of_a_broken_dataset_too(dataset, tmp_path, capsys):
    shard = next(dataset.glob("data/*/*.parquet"))
    shard.write_bytes(shard.read_bytes()[:-1])
    page = tmp_path / "page.html"
    page.write_text("an older page")
    assert run("verify", dataset, "--report", page) == 1
    root = read_page(page.read_text())
    assert root.one("section", "verdict").text().startswith("The dataset is BROKEN")
    assert shard.name in root.one("section", "findings").text()


@pytest.mark.parametrize("place", ["missing/page.html", "file/page.html"])
def test_a_page_that_could_not_be_written_is_refused_before_anything_is_read(tmp_path, capsys, place):
    (tmp_path / "file").write_text("")
    assert run("verify", tmp_path / "no-dataset", "--report", tmp_path / place) == 2
    told = capsys.readouterr().err
    assert "field: report" in told
    assert "cure:" in told


def test_a_folder_is_no_page(dataset, tmp_path, capsys):
    assert run("verify", dataset, "--report", tmp_path) == 2
    assert "is a directory" in capsys.readouterr().err


def test_a_long_sample_is_shown_by_its_two_ends(tmp_path):
    model = TinyModel(tmp_path / "model", "llama", "bfloat16")
    captured = capture(model, dtype="bfloat16", lengths=(HEAD_TOKENS + TAIL_TOKENS + 7,))
    write_dataset(tmp_path / "dataset", tmp_path, {0: captured})
    assert run("verify", tmp_path / "dataset", "--report", tmp_path / "page.html") == 0
    shown = read_page((tmp_path / "page.html").read_text()).one("div", "tokens")
    assert shown.one("p", "skipped").text() == "7 tokens are not shown"
    ids = captured.rows[0].input_ids
    due = [str(token) for token in (*ids[:HEAD_TOKENS], *ids[-TAIL_TOKENS:])]
    assert [node.text() for node in shown.nodes() if "title" in node.attributes] == due
