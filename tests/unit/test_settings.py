"""What a setting becomes where nobody set it."""

import os
from pathlib import Path

import pytest

from service.errors import HubDenied, OptionRefused
from service.settings import Settings, load_settings


@pytest.mark.parametrize(
    ("cores", "ranks", "writers"),
    [(1, 1, 2), (2, 1, 2), (8, 1, 4), (16, 1, 8), (128, 1, 8), (128, 8, 8), (64, 8, 4), (16, 8, 2)],
)
def test_writers_follow_a_ranks_share_of_the_cores(monkeypatch, cores, ranks, writers):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert Settings(tensor_parallel_size=ranks).writers() == writers
    assert Settings(tensor_parallel_size=ranks, writer_threads=3).writers() == 3


BAD_TOKENS = {
    "two lines": b"hf_one\nhf_two\n",
    "a blank inside": b"hf_one hf_two",
    "a control character": b"hf_one\x1b[1m",
    "not ASCII": "hf_one\u00e9".encode(),
    "not a text": b"hf_one\xff\x00",
}


@pytest.mark.parametrize("given", BAD_TOKENS.values(), ids=BAD_TOKENS)
def test_a_hub_token_of_another_form_is_refused_unquoted(given: bytes, tmp_path: Path):
    file = tmp_path / "token"
    file.write_bytes(given)
    settings = {
        "QUARRY_HUB_TOKEN_FILE": Settings(hub_token_file=file),
        "QUARRY_HUB_TOKEN": Settings(hub_token=given.decode("latin-1")),
    }
    for name, one in settings.items():
        with pytest.raises(HubDenied) as refused:
            one.token()
        assert (refused.value.field, refused.value.cure) == (name, "give the token alone, on one line")
        assert "hf_one" not in refused.value.problem().model_dump_json()


def test_a_hub_token_file_may_end_its_line_may_be_empty_and_must_be_there(tmp_path: Path):
    file = tmp_path / "token"
    settings = Settings(hub_token_file=file)
    with pytest.raises(HubDenied) as refused:
        settings.token()
    assert (refused.value.field, refused.value.cure) == (
        "QUARRY_HUB_TOKEN_FILE",
        "name a file that this user can read",
    )
    file.write_text("")
    assert settings.token() is None
    file.write_text("hf_one\n")
    assert settings.token() == "hf_one"


def test_a_folder_for_the_datasets_of_all_jobs_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("QUARRY_OUT_DIR", str(tmp_path))
    with pytest.raises(OptionRefused, match="cannot share a folder") as refused:
        load_settings()
    assert refused.value.field == "out_dir"


def test_a_variable_that_is_nearly_a_setting_is_refused(monkeypatch: pytest.MonkeyPatch):
    """The token would be good for every namespace."""
    for other in ("QUARRY_SERVER", "QUARRY_KEY_FILE", "QUARRY_SERVICE_HOST", "QUARRY_PORT_8000_TCP_PORT"):
        monkeypatch.setenv(other, "x")
    load_settings()
    monkeypatch.setenv("QUARRY_HUB_NAMESPACE", '["ours"]')
    with pytest.raises(OptionRefused, match="no setting QUARRY_HUB_NAMESPACE") as refused:
        load_settings()
    assert (refused.value.field, refused.value.cure) == (
        "QUARRY_HUB_NAMESPACE",
        "did you mean QUARRY_HUB_NAMESPACES?",
    )


@pytest.mark.parametrize("setting", ["QUARRY_DRAIN_S", "QUARRY_SCRATCH_BYTES", "QUARRY_KEEP_JOBS_DAYS"])
def test_a_setting_without_its_unit_is_refused(monkeypatch: pytest.MonkeyPatch, setting: str):
    monkeypatch.setenv(setting.rpartition("_")[0], "180")
    with pytest.raises(OptionRefused, match="there is no setting") as refused:
        load_settings()
    assert refused.value.cure == f"did you mean {setting}?"


def test_a_list_that_is_not_json_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("QUARRY_SOURCE_ROOTS", "/data")
    with pytest.raises(OptionRefused, match="is not JSON") as refused:
        load_settings()
    assert refused.value.field == "source_roots"


def test_an_option_that_is_given_twice_is_refused_by_its_setting(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("QUARRY_ENGINE_OPTIONS", '{"config": {"seed": 1, "seed": 2}}')
    with pytest.raises(OptionRefused, match="QUARRY_ENGINE_OPTIONS has several") as refused:
        load_settings()
    assert refused.value.field == "engine_options.config.seed"


REACHED = "lease_s", "host_lost_s", "engine_rest_s", "keep_jobs_days"
WAITED = "poll_s", "plan_row_cpu_s", "plan_silence_s"


@pytest.mark.parametrize("name", [*REACHED, *WAITED])
@pytest.mark.parametrize("given", ["inf", "1e12", "nan"])
def test_a_time_that_no_clock_reaches_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, given: str):
    """It ended every heartbeat, search for old jobs, read of a request or plan in an overflow."""
    monkeypatch.setenv(f"QUARRY_{name.upper()}", given)
    with pytest.raises(OptionRefused, match=r"less than or equal|greater than") as refused:
        load_settings()
    assert refused.value.field == name


@pytest.mark.parametrize("name", ["source_roots", "model_roots"])
def test_an_empty_folder_is_not_the_current_one(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setenv(f"QUARRY_{name.upper()}", '["/data", ""]')
    with pytest.raises(OptionRefused, match="name is empty") as refused:
        load_settings()
    assert refused.value.field == name
