"""The second run within a job: which rows run twice, what is recorded of them, and what fails a unit."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from connector.scheduler import SchedulerHalf
from schemas.dataset.manifest import CanaryReport, CheckReport, LayerAgreement, Manifest
from schemas.job import JobState
from schemas.names import job_id_from_content, manifest_path
from schemas.receipts import AttemptId
from schemas.request import ExtractRequest
from service.capture import second_run
from service.capture.canary import Canary
from service.capture.engine import Answer, EngineSpec, Prompt
from service.capture.session import EngineSession, How
from service.errors import StoreUnavailable
from service.proof.canary import canary_prompts
from service.store import JobRow, Store, canaries, commits, jobs, units
from tests.support.fake_engine import FakeEngine
from tests.support.jobs import Shop, request
from tests.support.plans import identity, random_ids
from tests.support.roles import Capture, capture_until
from tests.support.tiny_model import random_target

BOTH = ["alone", "beside"]
SECOND: list[Prompt] = []
"""Which rows the engine of the running test ran a second time."""


class NotingEngine(FakeEngine):
    """Notes second runs; tokens from `is_wrong_from` on get other states if they are a unit's own."""

    is_wrong_from: int | None = None
    _is_second = False

    async def run(self, prompt: Prompt) -> Answer:
        self._is_second = prompt.request_id.startswith("canary-")
        if self._is_second:
            company = canary_prompts(self._head.vocab_size, self._spec.max_model_len - 1)
            SECOND.extend([prompt] if list(prompt.token_ids) not in company else [])
        return await super().run(prompt)

    def _states(self, token_ids: list[int]) -> Any:
        states = super()._states(token_ids)
        if self.is_wrong_from is not None and not self._is_second:
            states[0, self.is_wrong_from :] *= 2
        return states


class SharedEngine(NotingEngine):
    """Computes in steps, of all that wait when one begins; gives other states to those that share a step."""

    started = 0

    def __init__(self) -> None:
        super().__init__()
        SharedEngine.started += 1
        self._step = asyncio.Lock()
        self._waiting: list[tuple[int, ...]] = []
        self._is_shared: dict[tuple[int, ...], bool] = {}

    async def run(self, prompt: Prompt) -> Answer:
        self._waiting.append(prompt.token_ids)
        async with self._step:
            if prompt.token_ids in self._waiting:
                self._is_shared |= dict.fromkeys(self._waiting, len(self._waiting) > 1)
                self._waiting = []
                await asyncio.sleep(0.02)
        return await super().run(prompt)

    def _states(self, token_ids: list[int]) -> Any:
        return super()._states(token_ids) * (2 if self._is_shared[tuple(token_ids)] else 1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_target(tmp_path_factory.mktemp("models") / "target", max_position=8192)


@pytest.fixture(autouse=True)
def canary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every canary pass without a reference, which the states of the fake engine do not have."""
    SECOND.clear()

    async def run(self: Canary, session: EngineSession, spec: EngineSpec) -> None:
        layers = tuple(
            LayerAgreement(layer_id=layer, cosine=1.0, max_rel_error=0.0, best_match_layer=layer)
            for layer in self._lease.identity.layer_ids
        )
        report = CanaryReport(
            job_id=self._lease.job_id,
            prompts=1,
            tokens=2**20,
            layers=layers,
            reference="none",
            seconds=0.0,
            peak_bytes=0,
        )
        self._store.write(canaries.record, self._digest(session), report)
        session.canary = report

    async def begin_early(self: Canary, spec: EngineSpec, head: object) -> None:
        return

    monkeypatch.setattr(Canary, "run", run)
    monkeypatch.setattr(Canary, "begin_early", begin_early)


def shop_of(folder: Path, target: Path, engine: type = NotingEngine, **settings: Any) -> Shop:
    return Shop.open(folder, target, engine=f"{__name__}:{engine.__name__}", unit_attempts=1, **settings)


def a_request(target: Path, lengths: list[int], **changes: Any) -> ExtractRequest:
    samples = [{"id": str(n), "token_ids": ids} for n, ids in enumerate(random_ids(lengths, vocab_size=1500))]
    return request(target, samples, **{"canary": "run"} | changes)


def checks_of(shop: Shop, job_id: str) -> CheckReport | None:
    path = shop.settings.dataset_dir(job_id) / manifest_path(job_id)
    return Manifest.model_validate_json(path.read_bytes()).checks if path.exists() else None


def run(folder: Path, target: Path, lengths: list[int], **changes: Any) -> tuple[JobRow, CheckReport | None]:
    shop = shop_of(folder, target)
    job = shop.run(a_request(target, lengths, **changes))
    return job, checks_of(shop, job.id)


@pytest.mark.parametrize("compression", ["none", "planes", "fp8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_row_of_the_first_unit_runs_twice_and_the_manifest_says_so(tmp_path, target, compression, dtype):
    storage = {"shard_bytes": 2**20, "compression": compression}
    job, checks = run(tmp_path, target, [30, 200, 5], storage=storage, dtype=dtype)
    assert job.state is JobState.COMPLETED, job.problem
    alone, beside = SECOND
    assert alone.token_ids == beside.token_ids
    assert len(alone.token_ids) == 200
    assert not alone.reads_cache
    assert not beside.reads_cache
    assert checks is not None
    assert checks.second_runs == 1
    assert checks.second_run_cosine == pytest.approx(1.0, abs=1e-3)


def test_later_units_run_a_row_twice_as_the_share_allows(tmp_path, target, monkeypatch):
    monkeypatch.setattr(second_run, "SHARE", 0.0)
    _, checks = run(tmp_path / "none", target, [60] * 300)
    assert checks is not None
    assert checks.second_runs == 1
    assert len(SECOND) == 2, "the first unit's row, alone and beside others"
    SECOND.clear()
    monkeypatch.setattr(second_run, "SHARE", 1.0)
    run(tmp_path / "all", target, [60] * 300)
    assert len(SECOND) > 2


@pytest.mark.parametrize("bound", [{"TOKENS_MAX": 150}, {"BYTES_MAX": 150 * 4 * 128 * 2}])
def test_of_a_long_row_the_beginning_runs_twice(tmp_path, target, monkeypatch, bound):
    for name, value in bound.items():
        monkeypatch.setattr(second_run, name, value)
    job, _ = run(tmp_path, target, [400])
    assert job.state is JobState.COMPLETED, job.problem
    assert {len(prompt.token_ids) for prompt in SECOND} == {150}


@pytest.mark.parametrize("capture", ["one_pass", "second_prefill"])
def test_an_answer_runs_again_without_being_answered_again(tmp_path, target, capture):
    generate = {"max_tokens": 7, "capture": capture}
    samples = [{"id": f"q{n}", "messages": [{"role": "user", "content": f"Question {n}"}]} for n in range(12)]
    source = {"kind": "inline", "samples": samples}
    job, checks = run(tmp_path, target, [1], generate=generate, source=source)
    assert job.state is JobState.COMPLETED, job.problem
    assert checks is not None
    assert checks.second_runs > 0
    assert SECOND
    assert all(prompt.generate is None for prompt in SECOND)


def test_states_that_are_other_in_the_answer_alone_fail_the_unit(tmp_path, target, monkeypatch):
    healthy = NotingEngine._states

    def states(self: NotingEngine, token_ids: list[int]) -> Any:
        made = healthy(self, token_ids)
        made[0, -3:] *= 1 if self._is_second else 2
        return made

    monkeypatch.setattr(NotingEngine, "_states", states)
    samples = [{"id": "q", "messages": [{"role": "user", "content": "Question" * 30}]}]
    answers = {"generate": {"max_tokens": 4, "capture": "one_pass"}, "layers": [1], "final_layer": False}
    job, _ = run(tmp_path, target, [1], source={"kind": "inline", "samples": samples}, **answers)
    assert job.problem is not None
    assert "layer 1 has other states for 3 of the 3 tokens" in job.problem.detail


@pytest.mark.parametrize("wrong_from", [0, 170])
def test_other_states_beside_other_rows_fail_the_unit_by_name(tmp_path, target, monkeypatch, wrong_from):
    monkeypatch.setattr(NotingEngine, "is_wrong_from", wrong_from)
    job, _ = run(tmp_path, target, [30, 200, 5], layers=[1], final_layer=False)
    assert job.problem is not None
    assert job.problem.type == "urn:quarry:states-wrong"
    assert "unit 0, row 1: computed a second time, layer 1 has other states for" in job.problem.detail


def test_states_that_are_not_finite_the_second_time_fail_the_unit(tmp_path, target, monkeypatch):
    healthy = NotingEngine._states

    def states(self: NotingEngine, token_ids: list[int]) -> Any:
        made = healthy(self, token_ids)
        return made * float("nan") if self._is_second else made

    monkeypatch.setattr(NotingEngine, "_states", states)
    job, _ = run(tmp_path, target, [30, 200])
    assert job.problem is not None
    assert "unit 0, row 1: computed a second time, its states are not finite" in job.problem.detail


def test_a_second_run_that_the_engine_drops_is_not_said_to_have_wrong_states(tmp_path, target, monkeypatch):
    ended = SchedulerHalf.request_finished

    def request_finished(self: SchedulerHalf, request: Any, blocks: Any) -> bool:
        if request.request_id.startswith("canary-"):
            request.num_computed_tokens -= 1
        return ended(self, request, blocks)

    monkeypatch.setattr(SchedulerHalf, "request_finished", request_finished)
    job = shop_of(tmp_path, target, engine_rest_s=36.0).run(a_request(target, [30, 200]))
    assert job.problem is not None
    assert job.problem.type == "urn:quarry:engine-died"
    assert "the engine dropped prompts [0], which ran beside unit 0" in job.problem.detail


def test_no_row_runs_twice_without_a_canary(tmp_path, target):
    job, checks = run(tmp_path, target, [30, 200], canary="skip")
    assert job.state is JobState.COMPLETED, job.problem
    assert checks is not None
    assert (checks.second_runs, SECOND) == (0, [])


def test_a_unit_keeps_its_rows_while_the_store_is_away(tmp_path, target, monkeypatch):
    """The report of the canary was read before the rows were captured; a second time it cannot be."""
    read, asked = Store.read, iter([False, True])

    def away(self: Store, verb: Any, *given: Any, **named: Any) -> Any:
        if verb is canaries.report and next(asked, False):
            raise StoreUnavailable("away")
        return read(self, verb, *given, **named)

    monkeypatch.setattr(Store, "read", away)
    shop = shop_of(tmp_path, target)
    job_id = shop.submit(a_request(target, [30, 200]))
    shop.plan()
    shop.capture(job_id)
    assert [unit.epoch for unit in shop.store.read(units.of_job, job_id)] == [1]
    assert len(SECOND) == 2


def test_an_engine_whose_requests_spoil_each_other_is_caught_while_other_units_keep_it_busy(tmp_path, target):
    shop = shop_of(tmp_path, target, SharedEngine, in_flight_requests=4)
    job = shop.run(a_request(target, [60] * 100, layers=[1], final_layer=False))
    assert job.problem is not None
    assert "computed a second time, layer 1 has other states for 60 of the 60" in job.problem.detail
    rows = {prompt.token_ids for prompt in SECOND}
    assert len(rows) == 2, "one on each engine: its other units go by the verdict"


@pytest.mark.parametrize(
    ("units_in_flight", "room"),
    [(1, {}), (2, {}), (2, {"in_flight_requests": 5}), (2, {"in_flight_tokens": 250})],
    ids=["one unit", "two units", "few requests", "few tokens"],
)
def test_such_an_engine_fails_a_job_of_units_of_one_row_though_each_may_have_it_to_itself(
    tmp_path, target, units_in_flight, room
):
    """Such a row is right, and runs again beside others: on the next engine a unit runs alone in any case.

    Of two that are in the engine at once, each may have a step to itself, and is right when it runs alone.
    """
    settings = {"unit_max_samples": 1, "units_in_flight": units_in_flight, "units_in_proof": 0} | room
    shop, before = (
        shop_of(tmp_path, target, SharedEngine, engine_rest_s=3.6, **settings),
        SharedEngine.started,
    )
    job = shop.run(a_request(target, [125] * 6, layers=[1], final_layer=False))
    assert job.state is JobState.FAILED
    assert job.problem is not None
    assert "computed a second time, layer 1 has other states for 125 of the 125" in job.problem.detail
    # Another unit of the second engine may begin a third, before the job has failed.
    assert SharedEngine.started - before in {2, 3}
    assert not shop.store.read(commits.unit_commits, job.id)


def test_an_engine_to_which_only_one_request_is_given_is_not_refused_for_what_others_would_spoil(
    tmp_path, target
):
    shop = shop_of(tmp_path, target, SharedEngine, in_flight_requests=1)
    job = shop.run(a_request(target, [60] * 3, layers=[1], final_layer=False))
    assert job.state is JobState.COMPLETED, job.problem
    assert len(SECOND) == 1


def test_an_engine_that_captured_for_a_job_without_a_canary_still_runs_a_row_twice(
    tmp_path, target, monkeypatch
):
    monkeypatch.setattr(second_run, "SHARE", 0.0)
    shop = shop_of(tmp_path, target, units_in_flight=1, units_in_proof=0)
    skips, proven = (shop.submit(a_request(target, [60], canary=how), how) for how in ("skip", "run"))
    shop.plan()
    loop = Capture(shop.store, shop.settings, "worker")
    capture_until(
        lambda: all(shop.store.read(jobs.job, job).progress.is_captured for job in (skips, proven)), loop
    )
    assert len(SECOND) == 1


def test_an_engine_that_ran_a_prefill_twice_owes_a_second_run_of_an_answer(tmp_path, target, monkeypatch):
    monkeypatch.setattr(second_run, "SHARE", 0.0)
    shop = shop_of(tmp_path, target, units_in_flight=1, units_in_proof=0)
    asked = [{"id": "q", "messages": [{"role": "user", "content": "Question"}]}]
    answers = {"generate": {"max_tokens": 7}, "source": {"kind": "inline", "samples": asked}}
    bodies = {"answers": a_request(target, [1], **answers), "rows": a_request(target, [60])}
    made = [shop.submit(bodies[key], key) for key in ("answers", "rows")]
    made.append(shop.submit(bodies["rows"], "again"))
    shop.plan()
    loop = Capture(shop.store, shop.settings, "worker")
    capture_until(lambda: all(shop.store.read(jobs.job, job).progress.is_captured for job in made), loop)
    assert len(SECOND) == 2


@pytest.mark.parametrize(
    "units",
    [
        # Units of known answers come first where a lost machine's are captured again.
        [({}, {0}, BOTH), ({0: 60}, {0}, [None]), ({0: 59}, {0}, BOTH), ({0: 59}, {0}, [None])],
        # A job of one row comes first, and does not say that rows which share the engine are right.
        [({}, set(), ["beside"]), ({}, set(), [None]), ({}, {0}, ["alone"]), ({}, {0}, [None])],
        [({}, {0}, BOTH), ({}, set(), [None]), ({0: 59}, set(), ["beside"])],
    ],
    ids=["known answers", "a row to itself", "a shared row"],
)
def test_an_engine_owes_a_second_run_of_each_way_of_capture_and_of_rows_that_share_it(monkeypatch, units):
    ran = []

    async def fits(*_: object, how: How | None = None) -> float:
        ran.append(how)
        return 1.0

    monkeypatch.setattr(second_run, "_run", fits)
    monkeypatch.setattr(second_run, "_choose", lambda *_, is_first: None)
    sealed: Any = [SimpleNamespace(file="train-00000.parquet", rows=[0], num_tokens=[60])]
    session: Any = SimpleNamespace(
        canary=SimpleNamespace(layers=()),
        ran_again=set(),
        before_second_run=asyncio.Lock(),
    )
    of_answers = identity().model_copy(update={"capture": "one_pass"})
    lease: Any = SimpleNamespace(skips_canary=False, identity=of_answers)
    for answers, shared, _ in units:
        asyncio.run(second_run.run_again(lease, session, sealed, answers, shared))
    assert ran == [how for *_, hows in units for how in hows]


def test_jobs_of_one_unit_differ_in_whether_and_which_row_runs_twice():
    """As a schedule makes them, one a night, on an engine that stays."""
    sealed: Any = [SimpleNamespace(file="train-00000.parquet", rows=range(50), num_tokens=[60] * 50)]
    drawn = []
    for night in range(100):
        attempt_id = AttemptId(job_id=job_id_from_content(str(night)), unit=0, epoch=1)
        lease: Any = SimpleNamespace(attempt_id=attempt_id, identity=identity())
        drawn.append(second_run._choose(lease, second_run._rows(lease, sealed, {}, set()), is_first=False))
    rows = [chosen.row for chosen in drawn if chosen is not None]
    assert 0 < len(rows) < 100
    assert len(set(rows)) > 1


@pytest.mark.parametrize(
    ("length", "begin", "runs", "compared"),
    [
        (5000, 0, 4096, 4096),
        (5000, 100, 4096, 4096),
        (9000, 6000, 8048, 4096),
        (6010, 6000, 6010, 4096),
    ],
)
def test_of_an_answer_behind_a_long_prompt_the_answer_is_compared(length, begin, runs, compared):
    sealed: Any = [SimpleNamespace(file="train-00000.parquet", rows=[3], num_tokens=[length])]
    lease: Any = SimpleNamespace(identity=identity())
    (row,) = second_run._rows(lease, sealed, {3: begin} if begin else {}, set())
    assert (row.tokens, row.compared, row.answer_begin) == (runs, compared, begin)
