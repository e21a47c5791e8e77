"""Webhooks over HTTP: what a request may name, the secret, and a report once more."""

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from service.client import Quarry
from service.settings import Settings
from service.store import Store, jobs
from tests.support.api import api_settings, job_body, problem_of, serving, stored


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("webhooks")
    (folder / "secret").write_text("s" * 32)
    return api_settings(folder, webhook_secret_file=folder / "secret", webhook_hosts=("10.0.0.2",))


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    with stored(settings) as store:
        yield store


@pytest.mark.parametrize(
    ("url", "field"),
    [
        ("http://hooks.example/", "webhook.url"),
        ("https://", "webhook.url"),
        ("https:///path", "webhook.url"),
        ("https://user@hooks.example/", "webhook.url"),
        ("https://user:word@hooks.example/", "webhook.url"),
        ("https://hooks.example/#part", "webhook.url"),
        ("https://hooks.example:0/", "webhook.url"),
        ("https://hooks.example:port/", "webhook.url"),
        ("https://hooks.example/ two", "webhook.url"),
        ("https://a..b/", "webhook.url"),
        (f"https://{'a' * 64}.example/", "webhook.url"),
        ("https://hooks.example/\r\nX: y", "webhook.url"),
        ("https://[::1", "webhook.url"),
        ("https://" + "a" * 2100, "webhook.url"),
        ("file:///etc/passwd", "webhook.url"),
        ("https://10.0.0.1/", "webhook.url"),
        ("https://[::ffff:169.254.169.254]/", "webhook.url"),
        (None, "webhook.url"),
    ],
)
def test_an_address_that_cannot_be_called_is_refused_at_once(
    api: httpx2.Client, model: Path, url: str | None, field: str
):
    problem = problem_of(api.post("/extract", json=job_body(model, webhook={"url": url})), 422)
    assert problem.field == field


@pytest.mark.parametrize("url", ["https://hooks.example:8443/a?b=c", "https://10.0.0.2/", "https://1.1.1.1"])
def test_a_job_with_a_webhook_is_taken_and_its_last_end_is_reported_again(
    api: httpx2.Client, store: Store, model: Path, url: str
):
    with Quarry(str(api.base_url)) as quarry:
        job = quarry.submit(job_body(model, webhook={"url": url}))
        assert quarry.request(job.id).webhook is not None
        assert "state" in str(problem_of(api.post(f"/jobs/{job.id}/webhook"), 409).field)
        store.write(jobs.cancel, job.id)
        assert quarry.redeliver(job.id).id == job.id
        assert quarry.webhook_secret().secret.startswith("whsec_")


def test_a_service_without_a_secret_takes_no_job_with_a_webhook(tmp_path: Path, model: Path):
    settings = api_settings(tmp_path, model_roots=(model.parent,))
    with serving(settings) as api:
        body = job_body(model, webhook={"url": "https://hooks.example/"})
        problem = problem_of(api.post("/extract", json=body), 422)
        assert (problem.field, "QUARRY_WEBHOOK_SECRET_FILE" in str(problem.cure)) == ("webhook", True)
        assert problem_of(api.get("/webhooks/secret"), 422).field == "webhook"
