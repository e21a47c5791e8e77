"""Weights that do not arrive: what passes is tried again, what is refused is named, a full disk waits."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from schemas.request import ExtractRequest
from service.errors import DiskFull, HubUnavailable, Outcome, QuarryError, UnknownModel
from service.plan.target import Target, fetch_weights
from service.settings import Settings
from tests.support import templates
from tests.support.fake_hub import FakeHub, Fault
from tests.support.tokenized import inspected

WEIGHTS = save({"w": np.ones(3, dtype=np.float32)})


def a_target(model: str, settings: Settings) -> Target:
    body = {"model": model, "source": {"kind": "inline", "samples": [{"text": "x"}]}}
    return inspected(ExtractRequest.model_validate(body), settings)


@pytest.fixture
def hub(hub: FakeHub, tmp_path: Path) -> FakeHub:
    files = {path.name: path.read_bytes() for path in templates.write_target(tmp_path / "hub").iterdir()}
    hub.add_repo("org/model", {**files, "model.safetensors": WEIGHTS}, kind="model")
    return hub


@pytest.fixture
def stored(hub: FakeHub, tmp_path: Path) -> FakeHub:
    """Return the Hub where the real client of the storage is sent to a file without any chunk."""
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model.safetensors").write_bytes(WEIGHTS)
    hub.know_xet(tmp_path / "weights")
    return hub


@pytest.fixture
def settings(hub: FakeHub) -> Settings:
    return Settings(hub_endpoint=hub.url)


@pytest.fixture
def target(settings: Settings) -> Target:
    """Return the Hub's model with its small files here, as it is when a unit is begun."""
    return a_target("org/model", settings)


def fault_of(target: Target, settings: Settings) -> QuarryError:
    with pytest.raises(QuarryError) as caught:
        fetch_weights(target, settings)
    assert caught.value.field == "model" and "org/model" in caught.value.detail
    return caught.value


def test_the_weights_come_to_the_small_files(target: Target, settings: Settings) -> None:
    folder = fetch_weights(target, settings)
    assert folder == target.folder and (folder / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=429, headers={"Retry-After": "0"}),
        Fault(status=500, nth=2),
        Fault(drop="before"),
        Fault(drop="before", nth=2),
    ],
    ids=["429 for its length", "500 for its bytes", "silence for its length", "silence for its bytes"],
)
def test_a_fault_of_the_hub_that_passes_is_tried_again(
    hub: FakeHub, target: Target, settings: Settings, fault: Fault
) -> None:
    hub.fail("resolve", replace(fault, times=1000))
    error = fault_of(target, settings)
    assert type(error) is HubUnavailable and error.outcome is Outcome.RETRY
    hub.heal()
    assert (fetch_weights(target, settings) / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize(("asked", "wait_s"), [({"Retry-After": "7"}, 7.0), ({}, 0.0)])
def test_a_wait_that_the_hub_asks_for_is_passed_on(
    hub: FakeHub,
    target: Target,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    asked: dict[str, str],
    wait_s: float,
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)  # the client asks again by itself
    hub.fail("resolve", Fault(status=503, headers=asked, times=1000))
    assert fault_of(target, settings).wait_s == wait_s


@pytest.mark.parametrize("status", [401, 403, 404])
def test_weights_that_the_hub_denies_are_an_unknown_model(
    hub: FakeHub, target: Target, settings: Settings, status: int
) -> None:
    hub.fail("resolve", Fault(status=status, times=1000))
    error = fault_of(target, settings)
    assert type(error) is UnknownModel and error.cure and str(status) in error.detail


def test_weights_that_the_storage_does_not_give_are_tried_again(
    target: Target, settings: Settings, stored: FakeHub
) -> None:
    assert type(fault_of(target, settings)) is HubUnavailable


@pytest.mark.parametrize(
    ("raised", "expected", "outcome"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/cache/blob"), DiskFull, Outcome.BLOCK),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), DiskFull, Outcome.BLOCK),
        (OSError(errno.EIO, os.strerror(errno.EIO), "/cache/blob"), HubUnavailable, Outcome.RETRY),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES)), HubUnavailable, Outcome.RETRY),
        (OSError("Consistency check failed"), HubUnavailable, Outcome.RETRY),
        (ConnectionResetError(), HubUnavailable, Outcome.RETRY),
        (RuntimeError("the storage's client lost its connection"), HubUnavailable, Outcome.RETRY),
        (FileNotFoundError("no such file"), UnknownModel, Outcome.FAIL),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), UnknownModel, Outcome.FAIL),
    ],
)
def test_a_download_that_breaks_off_has_its_own_error(
    target: Target,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    raised: Exception,
    expected: type[QuarryError],
    outcome: Outcome,
) -> None:
    def broken(*_: object, **__: object) -> str:
        raise raised

    monkeypatch.setattr("huggingface_hub.snapshot_download", broken)
    error = fault_of(target, settings)
    assert (type(error), error.outcome) == (expected, outcome)
    assert "/cache" not in error.detail and (error.cure or expected is HubUnavailable)


def test_a_cache_that_cannot_be_written_is_not_the_models_fault(
    hub: FakeHub, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(HubUnavailable) as caught:
        a_target("org/model", settings)
    assert caught.value.field == "model"


def test_a_full_disk_is_told_from_a_lost_connection_by_the_disk(
    target: Target, settings: Settings, stored: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage's client raises the same error for both."""
    monkeypatch.setattr("service.artifacts.hub_client.FULL_BELOW_BYTES", 2**62)
    error = fault_of(target, settings)
    assert type(error) is DiskFull and error.cure


def test_a_hub_model_without_safetensors_is_an_unknown_model(hub: FakeHub, settings: Settings) -> None:
    files = dict(hub.repo("org/model", "model").head.tree)
    del files["model.safetensors"]
    hub.add_repo("org/bare", {}, kind="model").add("files", files)
    with pytest.raises(UnknownModel, match="no safetensors"):
        fetch_weights(a_target("org/bare", settings), settings)


def test_a_local_model_is_its_own_folder_and_asks_nobody(tmp_path: Path) -> None:
    folder = templates.write_target(tmp_path / "m")
    settings = Settings(model_roots=(tmp_path,), hub_endpoint="http://127.0.0.1:1")
    target = a_target(str(folder), settings)
    with pytest.raises(UnknownModel, match="no safetensors"):
        fetch_weights(target, settings)
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    assert fetch_weights(target, settings) == folder
