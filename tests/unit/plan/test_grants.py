"""What a key does not allow is read as anybody could read it: without the service's Hub token."""

import json
from pathlib import Path

import pytest
from pydantic import SecretStr

from schemas.job import JobState
from schemas.keys import Grants, NewKey, Scope
from schemas.names import job_id_from_content
from schemas.request import ExtractRequest, HubTarget
from schemas.source import HubSource, InlineSource, Sample
from service.control.submit import check
from service.errors import HubDenied, SourceRefused, UnknownModel
from service.plan.sources import open_source
from service.publish.push import check_target
from service.settings import Settings
from service.store import NewJob, jobs, keys
from tests.support import templates
from tests.support.fake_hub import FakeHub, Token
from tests.support.jobs import Shop, conversations, request
from tests.support.tokenized import inspected

TOKEN = "hf_of_the_service"


@pytest.fixture
def settings(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> Settings:
    hub.add_token(TOKEN, Token("team", orgs={"partner": "write"}))
    # What the library would send if it were given none.
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return Settings(hub_endpoint=hub.url, hub_token=SecretStr(TOKEN))


def narrowed(settings: Settings, *namespaces: str) -> Settings:
    return settings.narrowed(Grants(scopes=(Scope.JOBS_WRITE,), hub_namespaces=namespaces))


def a_request(revision: str | None = None) -> ExtractRequest:
    source = InlineSource(kind="inline", samples=(Sample(text="x"),))
    return ExtractRequest(model="partner/model", revision=revision, source=source, loss="all")


def add_model(hub: FakeHub, folder: Path, *, private: bool = False, gated: bool = False) -> None:
    files = {path.name: path.read_bytes() for path in templates.write_target(folder).iterdir()}
    hub.add_repo("partner/model", files, kind="model", private=private).gated = gated


def test_a_private_model_is_read_in_the_keys_namespaces_alone(
    hub: FakeHub, settings: Settings, tmp_path: Path
) -> None:
    """Also where another's job has put it into the cache, by its branch or by its commit."""
    add_model(hub, tmp_path / "model", private=True)
    commit = inspected(a_request(), narrowed(settings, "partner")).located.commit
    inspected(a_request(), narrowed(settings, "*"))
    for revision in (None, commit):
        with pytest.raises(UnknownModel):
            inspected(a_request(revision), narrowed(settings, "team"))


def test_a_gated_model_is_read_in_the_keys_namespaces_alone(
    hub: FakeHub, settings: Settings, tmp_path: Path
) -> None:
    add_model(hub, tmp_path / "model", gated=True)
    inspected(a_request(), narrowed(settings, "partner"))
    with pytest.raises(UnknownModel, match="gated"):
        inspected(a_request(), narrowed(settings, "team"))


def test_a_public_model_is_read_with_any_key(hub: FakeHub, settings: Settings, tmp_path: Path) -> None:
    add_model(hub, tmp_path / "model")
    assert inspected(a_request(), narrowed(settings)).model == "partner/model"


def test_a_private_dataset_is_read_in_the_keys_namespaces_alone(hub: FakeHub, settings: Settings) -> None:
    hub.add_repo("partner/set", {"train.jsonl": b'{"text": "x"}\n'}, private=True)
    source = HubSource(kind="hub", repo_id="partner/set")
    open_source(source, narrowed(settings, "partner"))
    with pytest.raises(SourceRefused):
        open_source(source, narrowed(settings, "team"))


def test_nothing_is_pushed_outside_the_keys_namespaces(hub: FakeHub, settings: Settings) -> None:
    target = HubTarget(repo_id="partner/states")
    check_target(target, narrowed(settings, "partner"))
    with pytest.raises(HubDenied, match="partner"):
        check_target(target, narrowed(settings, "team"))
    with pytest.raises(HubDenied, match="partner"):
        check_target(target, settings.model_copy(update={"hub_namespaces": ("team",)}))


def test_a_job_is_planned_only_if_its_owner_may_still_push_it(tmp_path: Path) -> None:
    """1. The key that it was submitted with is replaced by one without the namespace. 2. One has it."""
    target = templates.write_target(tmp_path / "models" / "target")
    shop = Shop.open(tmp_path, target, hub_token=SecretStr(TOKEN))
    may = NewKey(name="team", scopes=(Scope.JOBS_WRITE,), model_roots=(str(target.parent),))
    shop.store.write(keys.add, "new", "0" * 64, may)
    body = request(target, conversations(4), hub={"repo_id": "partner/states"})
    job_id = job_id_from_content("team's")
    shop.store.write(jobs.submit, NewJob.of(job_id, "team's", body, owner="team"))
    shop.plan()
    job = shop.store.read(jobs.job, job_id)
    assert (job.state, job.progress.units_planned) == (JobState.BLOCKED, 0)
    assert job.problem is not None and "nothing may be pushed to partner" in job.problem.detail
    shop.store.write(keys.add, "own", "1" * 64, may.model_copy(update={"hub_namespaces": ("partner",)}))
    shop.store.write(jobs.resume, job_id)
    shop.plan()
    assert shop.store.read(jobs.job, job_id).progress.units_planned > 0
    shop.store.close()


@pytest.mark.parametrize("weights", ["model.safetensors", "model.bin", "none.safetensors"])
def test_a_link_to_weights_leads_only_where_the_key_may_load_models_from(
    tmp_path: Path, weights: str
) -> None:
    """Its own folder may be written by the key's owner, who would otherwise load another owner's weights."""
    own, shared, others = (
        templates.write_target(tmp_path / name / "m") for name in ("own", "shared", "other")
    )
    for folder in (shared, others):
        (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        (folder / "model.bin").write_bytes(b"weights")
    settings = Settings(model_roots=(tmp_path,))
    roots = (str(tmp_path / "own"), str(tmp_path / "shared"))
    less = settings.narrowed(Grants(scopes=(Scope.JOBS_WRITE,), model_roots=roots))
    body = request(own, conversations(1))
    (own / "model.safetensors").symlink_to(shared / "model.safetensors")
    check(body, less)
    (own / weights).unlink(missing_ok=True)
    (own / weights).symlink_to(own / weights)
    with pytest.raises(UnknownModel, match=f"{weights}' cannot be found: .*loop"):
        inspected(body, less)
    (own / weights).unlink()
    (own / weights).symlink_to(others / weights)
    with pytest.raises(UnknownModel, match=f"{weights} .* the key may not load"):
        check(body, less)
    with pytest.raises(UnknownModel, match=f"{weights} .* the key may not load"):
        inspected(body, less)
    if (others / weights).exists():
        check(body, settings)


@pytest.mark.parametrize("key", ["speculators_config", "text_model_id", "configuration_files"])
def test_a_config_by_which_the_engine_would_load_another_model_is_refused(tmp_path: Path, key: str) -> None:
    """Neither the roots nor the identity would cover it."""
    folder = templates.write_target(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: {"verifier": {"name_or_path": "/other"}}}))
    with pytest.raises(UnknownModel, match=f"names another model or config with '{key}'"):
        check(request(folder, conversations(1)), Settings(model_roots=(tmp_path,)))


def test_a_key_never_widens_the_services_own_bounds(tmp_path: Path) -> None:
    """A link in a folder of the key's that leads out of the service's is followed first."""
    own, elsewhere = tmp_path / "own", tmp_path / "elsewhere"
    for folder in (own / "team", elsewhere):
        folder.mkdir(parents=True)
    (own / "link").symlink_to(elsewhere)
    (own / "loop").symlink_to(own / "loop")
    settings = Settings(source_roots=(own,), model_roots=(own,), hub_namespaces=("team",))
    roots = tuple(
        str(path) for path in (own / "team", own / "loop", own / "link", elsewhere, own / ".." / "elsewhere")
    )
    grants = Grants(scopes=(Scope.JOBS_WRITE,), source_roots=roots, model_roots=roots, hub_namespaces=("*",))
    less = settings.narrowed(grants)
    assert less.source_roots == less.model_roots == (own / "team",)
    assert less.hub_namespaces == ("team",)
    assert settings.narrowed(grants.model_copy(update={"hub_namespaces": ("partner",)})).hub_namespaces == ()
