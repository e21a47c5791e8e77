"""`quarry verify --report`: the page appears beside what the command says anyway."""

import json

import pytest

from service.report.sample_text import HEAD_TOKENS, TAIL_TOKENS
from tests.support.html_page import read_page
from tests.support.shards import capture, write_dataset


@pytest.mark.slow
def test_the_page_is_written_and_the_output_stays_what_it_was(run, dataset, tmp_path):
    page = tmp_path / "page.html"
    plain, paged = run("verify", dataset, "--json"), run("verify", dataset, "--json", "--report", page)
    assert (plain.code, paged.code) == (0, 0)
    assert json.loads(paged.out) == json.loads(plain.out)
    assert str(page) in paged.err
    assert read_page(page.read_text()).one("section", "verdict").text().startswith("The dataset is right")


def test_a_page_is_written_of_a_broken_dataset_too(run, dataset, tmp_path):
    shard = next(dataset.glob("data/*/*.parquet"))
    shard.write_bytes(shard.read_bytes()[:-1])
    page = tmp_path / "page.html"
    page.write_text("an older page")
    assert run("verify", dataset, "--report", page).code == 1
    root = read_page(page.read_text())
    assert root.one("section", "verdict").text().startswith("The dataset is BROKEN")
    assert shard.name in root.one("section", "findings").text()


@pytest.mark.parametrize("place", ["missing/page.html", "file/page.html"])
def test_a_page_that_could_not_be_written_is_refused_before_anything_is_read(run, tmp_path, place):
    (tmp_path / "file").write_text("")
    ran = run("verify", tmp_path / "no-dataset", "--report", tmp_path / place)
    assert (ran.code, "field: report" in ran.err, "cure:" in ran.err) == (2, True, True)


def test_a_folder_is_no_page(run, dataset, tmp_path):
    ran = run("verify", dataset, "--report", tmp_path)
    assert (ran.code, "is a directory" in ran.err) == (2, True)


@pytest.mark.slow
def test_a_long_sample_is_shown_by_its_two_ends(run, model, tmp_path):
    captured = capture(model, dtype="bfloat16", lengths=(HEAD_TOKENS + TAIL_TOKENS + 7,))
    write_dataset(tmp_path / "dataset", {0: captured})
    assert run("verify", tmp_path / "dataset", "--report", tmp_path / "page.html").code == 0
    shown = read_page((tmp_path / "page.html").read_text()).one("div", "tokens")
    assert shown.one("p", "skipped").text() == "7 tokens are not shown"
    ids = captured.rows[0].input_ids
    expected = [str(token) for token in (*ids[:HEAD_TOKENS], *ids[-TAIL_TOKENS:])]
    assert [node.text() for node in shown.nodes() if "title" in node.attributes] == expected
