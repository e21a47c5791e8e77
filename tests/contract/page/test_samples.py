"""The page of a sample: a stored row as it is on disk, read by a child."""

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import httpx2
import pytest
from sqlalchemy.orm import Session

from schemas.dataset.shard import open_shard
from schemas.dataset.states import read_states
from schemas.job import UnitView
from schemas.names import shard_path
from schemas.request import HubTarget
from service.page.samples import sizes
from service.plan.child import stored_row
from service.plan.child.stored_row import show
from service.plan.child.task import RowTask, ShownRow
from service.settings import Settings
from service.store import Store, commits
from tests.support.api import api_settings, serving, stored
from tests.support.finished_job import (
    JOB,
    LAYERS,
    a_request,
    an_identity,
    land_files,
    row_tokens,
    run_to_publishing,
)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return api_settings(tmp_path)


@pytest.fixture
def api(settings: Settings) -> Iterator[httpx2.Client]:
    with serving(settings) as client:
        yield client


@pytest.fixture
def store(settings: Settings, api: httpx2.Client) -> Iterator[Store]:
    with stored(settings) as opened:
        run_to_publishing(opened, settings.dataset_dir(JOB), JOB, a_request())
        yield opened


@pytest.mark.parametrize(
    ("compression", "dtype"),
    [
        ("none", "bfloat16"),
        ("none", "float16"),
        ("none", "float32"),
        ("planes", "bfloat16"),
        ("fp8", "bfloat16"),
    ],
)
def test_the_size_of_the_states_is_that_of_the_stored_ones(tmp_path: Path, compression: str, dtype: str):
    about = an_identity(compression, dtype=dtype)
    land_files(tmp_path, JOB, about, 1, 1, 3)
    file = tmp_path / shard_path(JOB, 1)
    shown = show(RowTask(file, 1, "org/none-here", (), about))
    assert not isinstance(shown, str), shown
    assert [token.id for token in shown.tokens] == row_tokens(1, 1)
    assert (shown.supervised, shown.no_text) == (
        len(row_tokens(1, 1)) - 1,
        "the model is not on this machine any more",
    )
    with open_shard(file) as shard:
        for layer in LAYERS:
            rms_T = read_states(shard, 1, layer).double().square().mean(1).sqrt()
            assert list(shown.rms[layer]) == pytest.approx(rms_T.tolist(), rel=1e-2)


def test_of_a_long_row_each_value_is_the_mean_of_some_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    about = an_identity("fp8", dtype="bfloat16")
    land_files(tmp_path, JOB, about, 1, 1, 3)
    task = RowTask(tmp_path / shard_path(JOB, 1), 1, "org/none-here", (), about)
    single = show(task)
    monkeypatch.setattr(stored_row, "MAX_VALUES", 2)
    means = show(task)
    assert not isinstance(single, str) and not isinstance(means, str)
    tokens = len(row_tokens(1, 1))
    assert (single.step, means.step) == (1, -(-tokens // 2))
    for layer, values in single.rms.items():
        parts = values[: means.step], values[means.step :]
        assert means.rms[layer] == pytest.approx([fmean(part) for part in parts])


@pytest.mark.parametrize(("values", "dots"), [((0.7,), 2), ((0.7, 0.8), 0)])
def test_a_row_of_one_token_has_dots_where_no_line_can_be_drawn(values: tuple[float, ...], dots: int):
    lone = {"sample_id": "s", "source_id": None, "prompt_tokens": 1, "supervised": 1, "tokens": (), "step": 1}
    chart = sizes(ShownRow(**lone, num_tokens=len(values), no_text="", rms=dict.fromkeys(LAYERS, values)))
    assert [mark.tag for mark in chart.marks].count("circle") == dots


def test_a_row_is_shown_with_its_mask_and_its_layers(api: httpx2.Client, store: Store):
    answer = api.get(f"/ui/jobs/{JOB}/samples/0/1")
    assert answer.status_code == 200, answer.text
    tokens = row_tokens(0, 1)
    assert re.findall(r'<(mark|bdi) class="id" title="token (\d+) at (\d+)">', answer.text) == [
        ("mark" if place else "bdi", str(token), str(place)) for place, token in enumerate(tokens)
    ]
    assert "the model is not on this machine" in answer.text
    assert [f"layer {layer}" in answer.text for layer in LAYERS] == [True, True]
    assert 'rel="prev"' in answer.text
    for row, status in ((2, 200), (3, 404)):
        assert api.get(f"/ui/jobs/{JOB}/samples/0/{row}").status_code == status
    assert api.get(f"/ui/jobs/{JOB}/samples/7/0").status_code == 404
    assert api.get(f"/ui/jobs/{JOB}/samples/-1/0").status_code == 422


def test_a_file_that_is_damaged_or_gone_is_named(api: httpx2.Client, store: Store, settings: Settings):
    file = settings.dataset_dir(JOB) / shard_path(JOB, 0)
    whole = file.read_bytes()
    for content in (whole[:-1], b"PAR1" * 100, b""):
        file.write_bytes(content)
        answer = api.get(f"/ui/jobs/{JOB}/samples/0/0")
        assert answer.status_code == 422, answer.text
        assert "quarry verify" in answer.text
    file.unlink()
    assert "No such file" in api.get(f"/ui/jobs/{JOB}/samples/0/0").text


def test_a_row_that_is_only_in_the_repository_is_verified_there(
    api: httpx2.Client, settings: Settings, monkeypatch: pytest.MonkeyPatch
):
    def gone(session: Session, job_id: str, unit: int) -> UnitView | None:
        found = readable_unit(session, job_id, unit)
        return found and found.model_copy(update={"in_folder": False, "in_repository": True})

    readable_unit = commits.readable_unit
    monkeypatch.setattr(commits, "readable_unit", gone)
    request = a_request(HubTarget(repo_id="org/states"))
    with stored(settings) as store:
        run_to_publishing(store, settings.dataset_dir(JOB), JOB, request)
    assert (
        "<code>quarry verify org/states --report page.html</code>"
        in api.get(f"/ui/jobs/{JOB}/samples/0/1").text
    )
