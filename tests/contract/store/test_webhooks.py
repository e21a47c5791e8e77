"""Reports of a job's end: signed, sent to no private address, repeated until they are taken."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from standardwebhooks import Webhook as Signature

from schemas.job import JobState, Problem
from schemas.keys import NewKey, Scope
from schemas.webhook import Webhook, WebhookBody
from service.control import webhooks as control
from service.control.webhooks import run_webhooks, secret
from service.errors import (
    IllegalMove,
    LeaseLost,
    OptionRefused,
    QuotaExceeded,
    StoreUnavailable,
    WebhookFailed,
)
from service.settings import Settings
from service.store import NewJob, Store, jobs, keys, transitions, webhooks
from service.work.keeper import Keeper
from service.work.runner import LoopContext
from tests.support.receiver import NAME, Receiver, receiving
from tests.support.store_cases import OWNER, TTL_S, Clock, a_request, job_id, reach, stop_job

JOB, OTHER, THIRD = job_id(1), job_id(2), job_id(3)


@pytest.fixture
def receiver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """A server whose name leads to this machine, and whose certificate is trusted."""
    found = socket.getaddrinfo

    def resolve(host: str, *rest: object, **more: object) -> object:
        return found("127.0.0.1" if host in (NAME, "other.example") else host, *rest, **more)  # type: ignore[arg-type]

    with receiving(tmp_path) as (server, certificate):
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        yield server


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "secret").write_text("s" * 32)
    return Settings(data_dir=tmp_path, webhook_secret_file=tmp_path / "secret", webhook_hosts=(NAME,))


def submit(store: Store, url: str, owner: str | None = None, job: str = JOB) -> str:
    request = a_request().model_copy(update={"webhook": Webhook(url=url)})
    store.write(jobs.submit, NewJob.of(job, job, request, owner=owner))
    return job


def end(store: Store, url: str, owner: str | None = None, job: str = JOB) -> None:
    """Submit a job and cancel it, so that a report waits."""
    store.write(jobs.cancel, submit(store, url, owner, job))


def own(store: Store, *names: str) -> None:
    for n, name in enumerate(names):
        store.write(keys.add, f"{n:08}", f"{n:064}", NewKey(name=name, scopes=(Scope.JOBS_WRITE,)))


def run(store: Store, settings: Settings) -> bool:
    with Keeper(store, TTL_S) as keeper:
        return run_webhooks(LoopContext(store, settings, OWNER, keeper))


def said(store: Store, job: str = JOB) -> list[tuple[str, Problem | None]]:
    """What a job's events say of its reports."""
    events = store.read(jobs.events, job, after=0, limit=100)
    return [(event.message, event.problem) for event in events if event.message.startswith("webhook")]


def body_of(came: tuple[dict[str, str], bytes], key: str) -> WebhookBody:
    headers, body = came
    Signature(key).verify(body, headers)
    return WebhookBody.model_validate_json(body)


def test_each_end_is_reported_once_signed_and_as_it_was(store: Store, settings: Settings, receiver: Receiver):
    """1. Nothing before the end. 2. Cancelled, resumed, cancelled: two reports, by two ids."""
    submit(store, receiver.url)
    assert not run(store, settings)
    store.write(jobs.cancel, JOB)
    store.write(jobs.resume, JOB)
    assert not run(store, settings)  # it is queued; the report comes with its next turn
    stop_job(store, JOB, JobState.BLOCKED)
    assert [run(store, settings) for _ in range(3)] == [True, True, False]
    first, second = (body_of(came, secret(None, settings)) for came in receiver.came)
    assert (first.type, first.data.state, first.data.problem) == ("job.cancelled", JobState.CANCELLED, None)
    assert (second.type, second.data.state) == ("job.blocked", JobState.BLOCKED)
    assert second.data.problem is not None and second.data.id == JOB
    ids = [headers["webhook-id"] for headers, _ in receiver.came]
    assert len(set(ids)) == 2 and all(one.startswith(JOB) for one in ids)
    assert said(store) == [("webhook: answered 204", second.data.problem)] * 2
    assert store.read(jobs.state, JOB) is JobState.BLOCKED
    host, _, port = receiver.came[0][0]["host"].partition(":")
    assert (host, port) == (NAME, str(receiver.server_port))


@pytest.mark.parametrize("answer", [500, 302, 404])
def test_a_report_that_is_not_taken_comes_again_by_the_same_id(
    store: Store, settings: Settings, receiver: Receiver, clock: Clock, answer: int
):
    receiver.answers = [answer]
    end(store, receiver.url)
    assert run(store, settings)
    assert not run(store, settings)
    clock.advance(webhooks.WAITS_S[0])
    assert run(store, settings)
    assert not run(store, settings)
    (one, body), (other, same) = receiver.came
    assert (one["webhook-id"], body) == (other["webhook-id"], same)
    (_, problem), (last, _) = said(store)
    assert problem is not None and f"{NAME} answered {answer}" in problem.detail
    assert last == "webhook: answered 204"


def test_it_is_given_up_in_the_end_and_tried_again_when_somebody_asks(
    store: Store, settings: Settings, receiver: Receiver, clock: Clock
):
    receiver.answers = [503] * 10
    submit(store, receiver.url)
    with pytest.raises(IllegalMove, match="nothing to report"):
        store.write(webhooks.again, JOB)
    store.write(jobs.cancel, JOB)
    for wait_s in (*webhooks.WAITS_S, 0.0):
        assert run(store, settings)
        clock.advance(wait_s)
    clock.advance(10 * webhooks.WAITS_S[-1])
    assert not run(store, settings)
    assert said(store)[-1][0] == "webhook: given up"
    assert store.read(jobs.state, JOB) is JobState.CANCELLED
    assert store.write(webhooks.again, JOB).state is JobState.CANCELLED
    assert run(store, settings)
    assert said(store)[-1][0] == "webhook: answered 204"
    assert len({headers["webhook-id"] for headers, _ in receiver.came}) == 1


def test_an_attempt_is_fenced_by_one_that_somebody_asked_for(store: Store, clock: Clock):
    end(store, "https://hooks.example/")
    old = webhooks.lease(store, OWNER, TTL_S)
    assert old is not None
    store.write(webhooks.again, JOB)
    new = webhooks.lease(store, OWNER, TTL_S)
    assert new is not None and new.epoch > old.epoch
    with pytest.raises(LeaseLost):
        store.write(webhooks.delivered, old, 200)


def test_a_server_that_sends_its_answer_slowly_is_left(
    store: Store, settings: Settings, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(control, "DEADLINE_S", 0.5)
    receiver.answers = ["HTTP/1.1 204 No Content\r\n" + "X: y\r\n" * 1000]
    end(store, receiver.url)
    assert run(store, settings)
    ((_, problem),) = said(store)
    assert problem is not None and "did not answer in time" in problem.detail


def test_a_certificate_of_nobody_is_refused(
    store: Store, settings: Settings, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("SSL_CERT_FILE")
    end(store, receiver.url)
    assert run(store, settings)
    ((_, problem),) = said(store)
    assert problem is not None and "certificate" in problem.detail
    assert receiver.came == []


def test_a_name_that_also_leads_to_a_private_address_is_not_called(
    store: Store, settings: Settings, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
):
    both = [(2, 1, 6, "", (address, 443)) for address in ("1.1.1.1", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    end(store, receiver.url)
    assert run(store, settings.model_copy(update={"webhook_hosts": ()}))
    ((_, problem),) = said(store)
    assert problem is not None and f"{NAME} has an address that is not public" in problem.detail
    assert "127.0.0.1" not in problem.detail
    assert "QUARRY_WEBHOOK_HOSTS" in str(problem.cure)
    assert receiver.came == []


def test_a_report_that_was_taken_is_not_called_untaken_where_the_database_is_away(
    store: Store, settings: Settings, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
):
    end(store, receiver.url)
    away = StoreUnavailable("away")

    def write(*_: object) -> None:
        raise away

    monkeypatch.setattr(webhooks, "delivered", write)
    run(store, settings)
    assert len(receiver.came) == 1
    assert "webhook: not taken" not in [message for message, _ in said(store, JOB)]


def test_a_name_that_is_not_resolved_in_time_is_left_and_one_that_cannot_be_is_given_up_in_the_end(
    store: Store, settings: Settings, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    ended = threading.Event()
    monkeypatch.setattr(control, "DEADLINE_S", 0.2)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [ended.wait(60)][1:])
    end(store, "https://slow.example/")
    at = store.read(jobs.job, JOB).updated_at
    assert run(store, settings)
    ended.set()

    def fail(*_: object, **__: object) -> None:
        raise UnicodeError("label empty or too long " * 100)

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    for wait_s in webhooks.WAITS_S:
        clock.advance(wait_s)
        assert run(store, settings)
    assert not run(store, settings)
    problems = [str(problem and problem.detail) for _, problem in said(store)]
    assert len(problems) == 10 and "in time" in problems[0] and "UnicodeError" in problems[1]
    assert max(map(len, problems)) < 400
    assert store.read(jobs.job, JOB).updated_at == at  # its end, as others read it


def test_what_a_receiver_says_is_cut(store: Store, settings: Settings, receiver: Receiver):
    receiver.answers = ["BANNER" * 3]
    end(store, receiver.url)
    assert run(store, settings)
    ((_, problem),) = said(store)
    assert problem is not None and len(problem.detail) < 300


def test_a_report_that_waits_is_not_hurried_by_a_resume(
    store: Store, settings: Settings, receiver: Receiver, clock: Clock
):
    receiver.answers = [500]
    end(store, receiver.url)
    assert run(store, settings)
    store.write(jobs.resume, JOB)
    stop_job(store, JOB, JobState.BLOCKED)
    assert [run(store, settings), run(store, settings)] == [True, False]  # the new one
    clock.advance(webhooks.WAITS_S[0])
    assert run(store, settings)


def test_the_secret_of_an_owner_signs_for_nobody_else(
    store: Store, settings: Settings, receiver: Receiver, tmp_path: Path
):
    assert len({secret(owner, settings) for owner in (None, "a", "b")}) == 3
    (tmp_path / "short").write_text("s" * 31)
    for file in (None, tmp_path / "missing", tmp_path / "short"):
        with pytest.raises(OptionRefused, match="webhook"):
            secret("a", settings.model_copy(update={"webhook_secret_file": file}))
    own(store, "a")
    end(store, receiver.url, owner="a")
    assert run(store, settings)
    assert body_of(receiver.came[0], secret("a", settings)).data.owner == "a"


def test_an_owner_has_one_report_under_way_and_others_have_theirs(store: Store):
    """1. Of the two of a, one is leased. 2. The one of b is too. 3. a's other follows the first."""
    own(store, "a", "b")
    for job, owner in ((JOB, "a"), (OTHER, "a"), (THIRD, "b")):
        end(store, "https://hooks.example/", owner, job)
    first, second = (webhooks.lease(store, OWNER, TTL_S) for _ in range(2))
    assert first is not None and second is not None
    assert (first.job_id, second.job_id) == (JOB, THIRD)
    assert webhooks.lease(store, OWNER, TTL_S) is None
    store.write(webhooks.delivered, first, 200)
    last = webhooks.lease(store, OWNER, TTL_S)
    assert last is not None and last.job_id == OTHER


def test_what_waits_for_a_receiver_that_fails_lets_others_go_first(
    store: Store, settings: Settings, receiver: Receiver, clock: Clock
):
    """1. A receiver fails. 2. The owner's report to another comes next, and not one to the same, which comes
    later. Another owner's comes, too."""
    own(store, "a")
    receiver.answers = [500]
    settings = settings.model_copy(update={"webhook_hosts": (NAME, "other.example")})
    end(store, receiver.url, job=JOB)
    end(store, f"{receiver.url}?job=2", job=OTHER)
    end(store, receiver.url.replace(NAME, "other.example"), job=THIRD)
    end(store, receiver.url, "a", job_id(4))
    assert [run(store, settings) for _ in range(4)] == [True, True, True, False]
    assert [len(said(store, job)) for job in (JOB, OTHER, THIRD, job_id(4))] == [1, 0, 1, 1]
    clock.advance(webhooks.WAITS_S[0])
    assert [run(store, settings) for _ in range(4)] == [True, True, True, False], "the third fails again"
    assert [said(store, job)[-1][0] for job in (JOB, OTHER)] == ["webhook: answered 204"] * 2


def test_a_host_whose_name_only_begins_as_that_of_one_that_fails_is_another(store: Store):
    submit(store, "https://hooks.example?job=1", job=JOB)
    submit(store, "https://hooks.example/x", job=OTHER)
    submit(store, "https://hooks.example.org/x", job=THIRD)
    store.write(jobs.cancel, JOB)
    lease = webhooks.lease(store, OWNER, TTL_S)
    assert lease is not None
    for job in (OTHER, THIRD):
        store.write(jobs.cancel, job)
    store.write(webhooks.undelivered, lease, WebhookFailed("busy").problem(), 3600.0)
    following = webhooks.lease(store, OWNER, TTL_S)
    assert following is not None and following.job_id == THIRD
    store.write(webhooks.delivered, following, 204)
    assert webhooks.lease(store, OWNER, TTL_S) is None


@pytest.mark.parametrize(
    ("asked", "wait_s"),
    [("60", 60.0), ("999999999", 86_400.0), ("9" * 400, 86_400.0), ("1", 5.0), ("-60", 5.0), ("soon", 5.0)],
)
def test_the_wait_that_a_receiver_asks_for_is_kept(
    store: Store, settings: Settings, receiver: Receiver, clock: Clock, asked: str, wait_s: float
):
    receiver.answers, receiver.retry_after = [429], asked
    end(store, receiver.url, job=JOB)
    end(store, receiver.url, job=OTHER)
    assert run(store, settings)
    clock.advance(wait_s - 1.0)
    assert not run(store, settings)
    clock.advance(1.0)
    assert [run(store, settings) for _ in range(3)] == [True, True, False]


def test_a_receiver_that_is_gone_is_not_called_again_until_somebody_asks(
    store: Store, settings: Settings, receiver: Receiver, clock: Clock
):
    receiver.answers = [410]
    end(store, receiver.url)
    assert run(store, settings)
    clock.advance(10 * webhooks.WAITS_S[-1])
    assert not run(store, settings)
    assert said(store)[-1][0] == "webhook: answered 410"
    store.write(webhooks.again, JOB)
    assert run(store, settings)
    assert said(store)[-1][0] == "webhook: answered 204"


def test_each_attempt_goes_to_the_next_of_the_hosts_addresses(
    store: Store, settings: Settings, receiver: Receiver, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    """1. Nobody answers at the first, which stands twice. 2. The receiver is at the second."""
    both = [(2, 1, 6, "", (address, 443)) for address in ("127.0.0.2", "127.0.0.2", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    end(store, receiver.url)
    assert run(store, settings)
    clock.advance(webhooks.WAITS_S[0])
    assert run(store, settings)
    assert [message for message, _ in said(store)] == ["webhook: not taken", "webhook: answered 204"]


def test_an_owner_has_so_many_reports_that_wait_and_the_event_says_what_is_not_sent(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    """1. a's second is not sent, b's is. 2. Nor again. 3. Once the first was taken, it is sent when asked."""
    monkeypatch.setattr(transitions, "MAX_REPORTS", 1)
    monkeypatch.setattr(webhooks, "MAX_REPORTS", 1)
    own(store, "a", "b")
    for job, owner in ((JOB, "a"), (OTHER, "a"), (THIRD, "b")):
        end(store, "https://hooks.example/", owner, job)
    assert [len(said(store, job)) for job in (JOB, OTHER, THIRD)] == [0, 1, 0]
    assert "not sent, since 1 reports of its owner wait" in said(store, OTHER)[0][0]
    with pytest.raises(QuotaExceeded):
        store.write(webhooks.again, OTHER)
    leases = [webhooks.lease(store, OWNER, TTL_S) for _ in range(3)]
    assert [one and one.job_id for one in leases] == [JOB, THIRD, None]
    assert leases[0] is not None
    store.write(webhooks.delivered, leases[0], 200)
    store.write(webhooks.again, OTHER)
    last = webhooks.lease(store, OWNER, TTL_S)
    assert last is not None and last.job_id == OTHER


@pytest.mark.parametrize("state", set(JobState) - {JobState.DELETING})
def test_a_job_without_a_webhook_reports_nothing(store: Store, state: JobState):
    reach(store, state)
    assert webhooks.lease(store, OWNER, TTL_S) is None
