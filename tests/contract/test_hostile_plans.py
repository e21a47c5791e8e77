"""Templates, tokenizers and sources that never end, or take all memory: they end their own plan by name.

Each is planned in this process with small limits. The child that meets it is killed; nothing else notices.
"""

import gzip
import json
import lzma
import os
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas.job import JobState, Problem
from schemas.request import ExtractRequest
from service.control.submit import check
from service.errors import TemplateRefused, UnknownModel
from service.plan.child.process import CHECKERS
from service.plan.estimate import estimate_request
from service.settings import Settings
from service.store import NewJob, Store, jobs, migration, plans
from service.work.task_loop import TaskLoop
from tests.support import templates
from tests.support.api import serving
from tests.support.children import children_of
from tests.support.fake_hub import FakeHub
from tests.support.roles import PLANNING, run_planning
from tests.support.store_cases import Clock, job_id
from tests.support.waiting import wait_until

ROW_CPU_S = 1.0
MEMORY_BYTES = 2**28
CHAT = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]

NEVER_ENDING = {
    "a loop's filter": "{% for x in range(99999) if range(99999)|select('odd')|sum < 0 %}{% endfor %}",
    "a block that calls itself": "{% set n = namespace(depth=0) %}{% block b %}"
    "{% set n.depth = n.depth + 1 %}{% if n.depth < 30 %}{{ self.b() }}{{ self.b() }}{% endif %}"
    "{% set n.depth = n.depth - 1 %}{% endblock %}",
    "one search": "{% set n = 2000000 %}{{ ('a' * n * 2).rfind('ab' + 'a' * n) }}",
    "one power": "{% set n = 9 %}{{ (n**(n**n)) % 7 }}",
}
TOO_LARGE = {
    "text doubled": "{% set n = namespace(x='a') %}{% for i in range(40) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "text repeated": "{{ ('a' * (messages|length * 10**9))|length }}",
}

FROZEN = NEVER_ENDING["one search"]
"""One call into C: no signal handler, thread or timer of its process can stop it."""


@dataclass
class Shop:
    """A store, a target, and settings with small limits."""

    folder: Path
    settings: Settings
    store: Store
    clock: Clock
    model: Path

    def request(self, **changes: Any) -> ExtractRequest:
        samples = [{"id": "fine", "text": "x"}, {"id": "chat", "messages": CHAT}]
        source = {"kind": "inline", "samples": samples}
        return ExtractRequest.model_validate({"model": str(self.model), "source": source} | changes)

    def problem(self, **changes: Any) -> Problem:
        """Plan a job and return the problem that it failed with."""
        self.store.write(jobs.submit, NewJob.of(job_id(1), "key", self.request(**changes)))
        assert run_planning(self.store, self.settings, "planner", lambda: False)
        job = self.store.read(jobs.job, job_id(1))
        assert job.state is JobState.FAILED and job.problem is not None
        return job.problem


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    settings = Settings(
        data_dir=tmp_path / "data",
        model_roots=(tmp_path,),
        source_roots=(tmp_path,),
        plan_row_cpu_s=ROW_CPU_S,
        plan_memory_bytes=MEMORY_BYTES,
    )
    settings.data_dir.mkdir()
    clock = Clock()
    store = Store(settings.database(), clock.of(settings.database()))
    store.write(migration.migrate)
    while CHECKERS:
        CHECKERS.pop().close()  # of the tests before
    yield Shop(tmp_path, settings, store, clock, templates.write_target(tmp_path / "model"))
    store.close()


def per_row(template: str) -> str:
    """Return a template that is like the tokenizer's own until a row says "now"."""
    return "{% if messages[0].content == 'now' %}" + template + "{% endif %}" + templates.CHATML


def now() -> dict[str, Any]:
    """Return a source whose row 2 is where such a template begins."""
    chats = [[{"role": "user", "content": word}, CHAT[1]] for word in ("one", "two", "now", "four")]
    return {"kind": "inline", "samples": [{"messages": messages} for messages in chats]}


@pytest.mark.parametrize("name", [*NEVER_ENDING, *TOO_LARGE])
def test_a_template_that_takes_too_much_fails_its_job_by_row(shop: Shop, name: str) -> None:
    taken, setting = "1 s of CPU time", "QUARRY_PLAN_ROW_CPU_S"
    if name in TOO_LARGE:
        taken, setting = f"{MEMORY_BYTES} bytes of memory", "QUARRY_PLAN_MEMORY_BYTES"
        shop.settings = shop.settings.model_copy(update={"plan_row_cpu_s": 600.0})
    template = per_row((NEVER_ENDING | TOO_LARGE)[name])
    problem = shop.problem(chat_template=template, source=now(), loss="all")
    assert (problem.type, problem.field) == ("urn:quarry:template-refused", "chat_template")
    assert f"took more than {taken} at row 2" in problem.detail
    assert problem.cure is not None and setting in problem.cure


def test_a_template_that_computes_while_it_compiles_is_refused_when_it_is_submitted(shop: Shop) -> None:
    with pytest.raises(TemplateRefused, match="took more than 1 s of CPU time"):
        check(shop.request(chat_template="{{ 9**(9**9) }}"), shop.settings)


def bomb(path: Path) -> None:
    """Write a Parquet file of a few kB whose one text is a GB."""
    text = pa.DictionaryArray.from_arrays([0] * 4, ["x" * 2**28])
    pq.write_table(pa.table({"text": text}), path, compression="zstd", write_statistics=False)
    assert path.stat().st_size < 2**17


def endless_gzip(path: Path) -> None:
    """Write a compressed file of blank lines that takes seconds to read."""
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(200):
            file.write(b"\n" * 2**20)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "write"), [("bomb.parquet", bomb), ("blank.jsonl.gz", endless_gzip)])
def test_a_source_that_takes_too_much_fails_its_job(
    shop: Shop, name: str, write: Callable[[Path], None]
) -> None:
    write(shop.folder / name)
    problem = shop.problem(source={"kind": "file", "path": name})
    assert (problem.type, problem.field) == ("urn:quarry:source-refused", "source.path")
    assert "took more than" in problem.detail and "at row 0" in problem.detail and problem.cure


@pytest.mark.parametrize("charsmap", ["AAAA", "BAAAAAEAAAA="], ids=["as it is loaded", "as it encodes"])
def test_a_tokenizer_that_panics_is_an_unknown_model(shop: Shop, charsmap: str) -> None:
    """The panic of its library is a BaseException, which no guard of Exceptions holds."""
    normalizer = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    with pytest.raises(UnknownModel, match="breaks") as caught:
        estimate_with(shop, normalizer=normalizer)
    assert caught.value.field == "model" and caught.value.cure


def test_a_tokenizer_or_config_that_contradicts_itself_is_an_unknown_model(shop: Shop) -> None:
    """The library of tokenizers raises Exception itself, and that of configs an error of its own."""
    with pytest.raises(UnknownModel, match=r"cannot be loaded: .*out of vocabulary"):
        estimate_with(shop, model={"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]})
    config = json.loads((shop.model / "config.json").read_text())
    config |= {"model_type": "qwen3", "layer_types": ["full_attention"]}
    (shop.model / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnknownModel, match=r"cannot be loaded: .*`num_hidden_layers`.* must be equal"):
        estimate_with(shop)


def test_a_tokenizer_that_never_ends_is_an_unknown_model(shop: Shop) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    with pytest.raises(UnknownModel, match="CPU time at row 0") as caught:
        estimate_with(shop, pre_tokenizer=split, text=("x" * 20 + " ") * 5000)
    assert caught.value.field == "model" and "QUARRY_PLAN_ROW_CPU_S" in str(caught.value.cure)


def estimate_with(shop: Shop, text: str = "the quick brown fox", **parts: Any) -> None:
    whole = json.loads((shop.model / "tokenizer.json").read_text())
    (shop.model / "tokenizer.json").write_text(json.dumps(whole | parts))
    source = {"kind": "inline", "samples": [{"text": text}]}
    estimate_request(shop.request(source=source), shop.settings)


def child_pids(owner: int | None = None) -> set[int]:
    """Return the children behind the keepers of a process's fork server."""
    owner = owner or os.getpid()
    servers = [pid for pid in children_of(owner) if "child.fork_server" in command_of(pid)]
    keepers = [pid for server in servers for pid in children_of(server)]
    return {pid for keeper in keepers for pid in children_of(keeper)}


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def busy_s(owner: int | None = None) -> float:
    """Return the CPU time of the busiest child."""
    return max((cpu_s(pid) for pid in child_pids(owner)), default=0.0)


def test_a_planner_that_is_stopped_kills_its_child_at_once_and_gives_the_plan_on(shop: Shop) -> None:
    shop.settings = shop.settings.model_copy(update={"plan_row_cpu_s": 600.0})
    shop.store.write(jobs.submit, NewJob.of(job_id(1), "key", shop.request(chat_template=FROZEN)))
    stopped = threading.Event()
    with ThreadPoolExecutor() as threads:
        plan = threads.submit(run_planning, shop.store, shop.settings, "planner", stopped.is_set)
        wait_until(lambda: busy_s() > 0.5)
        stopped.set()
        assert plan.result(60)
        wait_until(lambda: not child_pids())
    assert shop.store.read(jobs.state, job_id(1)) is JobState.RUNNING


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_a_planner_process_that_is_told_to_end_gives_a_frozen_plan_back(shop: Shop) -> None:
    settings = shop.settings.model_copy(update={"plan_row_cpu_s": 600.0, "poll_s": 0.05})
    store = Store(settings.database())
    store.write(jobs.submit, NewJob.of(job_id(1), "key", shop.request(chat_template=FROZEN)))
    with TaskLoop("planner", PLANNING, settings):
        wait_until(lambda: any(busy_s(pid) > 0.5 for pid in children_of(os.getpid())))
    assert plans.lease(store, "next", 60) is not None
    store.close()


def test_a_job_whose_child_is_killed_three_times_is_blocked_and_the_next_job_is_planned(shop: Shop) -> None:
    """1. three planners in turn lose the child of one job  2. it is blocked  3. another job is planned."""
    shop.settings = shop.settings.model_copy(update={"plan_row_cpu_s": 600.0})
    shop.store.write(jobs.submit, NewJob.of(job_id(1), "poison", shop.request(chat_template=FROZEN)))
    with ThreadPoolExecutor() as threads:
        for owner in ("first", "second", "third"):
            assert shop.store.read(jobs.state, job_id(1)) is not JobState.BLOCKED
            wait_until(lambda: not child_pids())  # the one before is not taken for it
            plan = threads.submit(run_planning, shop.store, shop.settings, owner, lambda: False)
            wait_until(lambda: busy_s() > 0.2)
            for pid in child_pids():
                os.kill(pid, signal.SIGKILL)
            assert plan.result(60)
            shop.clock.advance(shop.settings.lease_s + 1)
    job = shop.store.read(jobs.job, job_id(1))
    assert job.state is JobState.BLOCKED and job.problem is not None
    assert job.problem.type == "urn:quarry:planning-died" and "-9" in job.problem.detail
    shop.store.write(jobs.submit, NewJob.of(job_id(2), "good", shop.request()))
    assert run_planning(shop.store, shop.settings, "fourth", lambda: False)
    assert shop.store.read(jobs.job, job_id(2)).progress.plan_done


def test_a_child_has_none_of_its_parents_secrets_and_ends_with_it(shop: Shop) -> None:
    body = shop.request(chat_template=FROZEN).model_dump_json()
    program = (
        "import sys; from schemas.request import ExtractRequest; from service.settings import Settings\n"
        "from service.plan.estimate import estimate_request\n"
        "estimate_request(ExtractRequest.model_validate_json(sys.argv[1]),"
        " Settings(model_roots=(sys.argv[2],)))\n"
    )
    command = [sys.executable, "-c", program, body, str(shop.folder)]
    secrets = {"HF_TOKEN": "hf_secret", "QUARRY_DATABASE_URL": "postgresql://secret"}
    with subprocess.Popen(command, env=os.environ | secrets) as parent:
        wait_until(lambda: busy_s(parent.pid) > 0.5)
        family = {*children_of(parent.pid), *child_pids(parent.pid)}
        environments = [Path(f"/proc/{pid}/environ").read_text() for pid in family]
        assert len(family) == 2
        assert not any("secret" in environment or "QUARRY_" in environment for environment in environments)
        # Nor does it read the token of `hf auth login` from its file.
        assert all("HF_HUB_DISABLE_IMPLICIT_TOKEN=1" in environment for environment in environments)
        parent.kill()
        parent.wait()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in family))


def test_estimates_leave_the_service_free_and_end_with_their_clients(shop: Shop) -> None:
    """1. two estimates freeze  2. a third gets 429, others answer  3. the clients hang up  4. one runs."""
    settings = shop.settings.model_copy(update={"plan_row_cpu_s": 600.0})
    frozen = shop.request(chat_template=FROZEN).model_dump(mode="json")
    with serving(settings) as api:
        clients = [HTTPConnection(api.base_url.host, api.base_url.port) for _ in range(2)]
        for client in clients:
            client.request("POST", "/estimate", json.dumps(frozen), {"Content-Type": "application/json"})
        wait_until(lambda: len(child_pids()) == 2)
        answer = api.post("/estimate", json=frozen)
        assert answer.status_code == 429 and int(answer.headers["Retry-After"]) > 0
        assert Problem.model_validate(answer.json()).type == "urn:quarry:quota-exceeded"
        assert api.get("/healthz", timeout=60).status_code == 200
        for client in clients:
            client.close()
        wait_until(lambda: not child_pids())
        body = shop.request().model_dump(mode="json")
        wait_until(lambda: api.post("/estimate", json=body).status_code == 200)


def packed_row(suffix: str) -> bytes:
    """Return one row of a gigabyte, compressed piece by piece."""
    packer: Any = lzma.LZMACompressor(preset=0) if suffix == "xz" else zlib.compressobj(9, wbits=31)
    pieces = [packer.compress(b'{"text": "')]
    pieces += [packer.compress(b"a" * 2**20) for _ in range(1024)]
    return b"".join((*pieces, packer.compress(b'"}\n'), packer.flush()))


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["gz", "xz"])
def test_a_compressed_file_of_the_hub_that_holds_a_row_of_a_gigabyte_ends_its_plan_within_the_bound(
    shop: Shop, suffix: str
) -> None:
    packed = packed_row(suffix)
    assert len(packed) < 2**21
    with FakeHub() as hub:
        hub.add_repo("org/rows", {f"train.jsonl.{suffix}": packed})
        shop.settings = shop.settings.model_copy(update={"hub_endpoint": hub.url})
        problem = shop.problem(source={"kind": "hub", "repo_id": "org/rows"})
    assert problem.type != "urn:quarry:internal-error", problem
    assert "memory" in problem.detail or "CPU" in problem.detail, problem
