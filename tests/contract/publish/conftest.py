"""The desk, in xet mode, and among the slow tests in LFS mode."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.desk import READ_TOKEN, TOKEN, Desk
from tests.support.fake_hub import FakeHub
from tests.support.finished_job import OTHER_JOB, a_dataset
from tests.support.hub_client import HubClient, Mode
from tests.support.hub_state import Token


@pytest.fixture(scope="module", params=[pytest.param("lfs", marks=pytest.mark.slow), "xet"])
def mode(request: pytest.FixtureRequest) -> Mode:
    return request.param


@pytest.fixture(scope="module")
def client(mode: Mode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubClient]:
    with HubClient(mode, tmp_path_factory.mktemp("home")) as client:
        yield client


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    a_dataset(first)
    a_dataset(second, OTHER_JOB)
    return first, second


@pytest.fixture(scope="module")
def hub(mode: Mode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    with FakeHub(cas=tmp_path_factory.mktemp("cas") if mode == "xet" else None) as hub:
        yield hub


@pytest.fixture
def desk(hub: FakeHub, mode: Mode, client: HubClient, folders: tuple[Path, Path]) -> Desk:
    hub.forget()
    hub.tokens.clear()
    hub.calls.clear()
    hub.seen_authorizations.clear()
    hub.add_token(TOKEN, Token("me", orgs={"org": "write"}))
    hub.add_token(READ_TOKEN, Token("me", role="read", orgs={"org": "write"}))
    return Desk(hub, client, mode, *folders)
