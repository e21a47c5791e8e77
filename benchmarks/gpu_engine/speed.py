"""Tokens a second of plain prefill and of extraction on one GPU, turn by turn in shuffled rounds.

Three or four engines stay up on the same GPU; while one works the others wait.

| row | counted until |
| --- | --- |
| plain, plain-v1 | the last answer; the engine's own choice of runner, and the runner that extraction uses |
| capture | the last answer; vLLM stores the states in its cache, nothing is drained |
| quarry-disk, quarry-ram | the last unit's receipt: rows checked, hashed, fsynced, renamed |
| example-disk, example-ram | every request's safetensors file opens whole; page cache, no fsync |
"""

import asyncio
import contextlib
import os
import random
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from benchmarks.gpu_engine.cases import SPEED_SHAPE, TINY_SPEED_SHAPE
from benchmarks.gpu_engine.engines import Capture, Engine, RunFailed, spec_of, without_capture
from benchmarks.gpu_engine.models import write_model
from benchmarks.harness import paired, shuffled_rounds, spread
from benchmarks.meter import TreeMeter
from connector.wire import RowRef
from schemas.names import job_id_from_key
from schemas.receipts import OpenUnit, UnitKey
from service.capture.engine import Prompt
from service.capture.vllm_engine import engine_arguments
from service.settings import Settings
from tests.support.plans import identity, order, write_plan

NUM_UNITS = 8
DISK_JOB, RAM_JOB = job_id_from_key("disk"), job_id_from_key("ram")
"""The second one's folder is a link into memory, so that one engine serves both."""
SHORTEST, LONGEST = 384, 640
FILES_TIMEOUT_S = 120.0
FILES_POLL_S = 0.005
PROBE_BYTES = 2**31

OPTIONS: dict[str, str | int | float | bool | None] = {
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 256,
    "kv_cache_memory_bytes": 8 * 2**30,
    "gpu_memory_utilization": 0.2,
}
"""Equal for every engine. Rounds repeat the prompts, so nothing may come from the prefix cache."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured, and an empty folder in memory for the target and the rows that write there."""

    num_prompts: int
    num_rounds: int
    ram: Path
    tiny: bool


class SpeedRun:
    """The engines, and a turn of every row."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        """Make the target; files go below `folder` and `plan.ram`."""
        self._shape = TINY_SPEED_SHAPE if plan.tiny else SPEED_SHAPE
        self._ram, self._folder = plan.ram, folder
        weights = self._ram / "target"
        write_model("llama", self._shape, "bfloat16", weights, "cpu" if plan.tiny else "cuda")
        draw = random.Random(0)
        self._prompts = [
            tuple(draw.choices(range(self._shape.vocab_size), k=draw.randint(SHORTEST, LONGEST)))
            for _ in range(plan.num_prompts)
        ]
        self.num_tokens = sum(map(len, self._prompts))
        self._settings = Settings(data_dir=folder, engine_options=OPTIONS)
        spec = spec_of(weights, self._shape, "bfloat16", LONGEST + 1)
        self._quarry = Capture(spec, self._settings, {})
        arguments = engine_arguments(spec, self._settings, self._quarry.link)
        example = {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "shared_storage_path": str(folder),
                "use_synchronization_lock": False,
                "allow_custom_save_path": True,
            },
        }
        self._engines: dict[str, Engine] = {
            "quarry": self._quarry,
            "example": Engine(arguments | {"kv_transfer_config": example}),
            "plain": Engine(without_capture(arguments)),
            "plain-v1": Engine(without_capture(arguments)),
        }
        self._turn = 0
        self.rows: dict[str, Callable[[], Awaitable[None]]] = {
            "plain": lambda: self._run_plain("plain"),
            "plain-v1": lambda: self._run_plain("plain-v1"),
            "capture": lambda: self._run_plain("quarry"),
            "quarry-disk": lambda: self._run_quarry(DISK_JOB),
            "quarry-ram": lambda: self._run_quarry(RAM_JOB),
            "example-disk": lambda: self._run_example(self._folder / "example"),
            "example-ram": lambda: self._run_example(self._ram / "example"),
        }

    async def start(self) -> None:
        """Start the engines one after the other: each measures the memory that is left."""
        for name, engine in self._engines.items():
            with environment({"VLLM_USE_V2_MODEL_RUNNER": "0"} if name == "plain-v1" else {}):
                await engine.start()

    async def stop(self) -> None:
        """Stop every engine."""
        for engine in self._engines.values():
            await engine.stop()

    def facts(self) -> dict[str, object]:
        """Return what each engine is."""
        return {name: engine.facts() for name, engine in self._engines.items()}

    def settings(self) -> dict[str, int]:
        """Return the service's settings that matter here: its defaults, if the environment says nothing."""
        named = {"pool_bytes", "units_in_flight", "in_flight_tokens", "in_flight_requests"}
        return self._settings.model_dump(include=named) | {"writer_threads": self._settings.writers()}

    async def turn(self, row: str) -> tuple[float, float]:
        """Run every prompt through a row; return seconds and CPU seconds of all processes together."""
        self._turn += 1
        self._prepare()
        # Dirty pages of whoever wrote before would be written back at this row's expense.
        os.sync()
        with TreeMeter(os.getpid()) as meter:
            begin = time.perf_counter()
            await self.rows[row]()
            seconds = time.perf_counter() - begin
        self._clean()
        return seconds, meter.cpu_s

    def _prepare(self) -> None:
        """Write the plans, as the planner would have done long before."""
        (self._ram / "job").mkdir()
        self._work.mkdir(parents=True, exist_ok=True)
        (self._work / RAM_JOB).symlink_to(self._ram / "job")
        for job_id in (DISK_JOB, RAM_JOB):
            for unit in range(NUM_UNITS):
                write_plan(self._work, self._prompts[unit::NUM_UNITS], unit=unit, job_id=job_id)

    def _clean(self) -> None:
        (self._work / RAM_JOB).unlink()
        shutil.rmtree(self._work)
        shutil.rmtree(self._ram / "job")
        for folder in (self._folder, self._ram):
            shutil.rmtree(folder / "example", ignore_errors=True)

    @property
    def _work(self) -> Path:
        return self._settings.work_root

    async def _run_plain(self, engine: str) -> None:
        prompts = [Prompt(f"{self._turn}-{index}", ids, None) for index, ids in enumerate(self._prompts)]
        await self._engines[engine].run_all(prompts, self._settings)

    async def _run_quarry(self, job_id: str) -> None:
        about = identity(
            layer_ids=self._shape.layer_ids,
            hidden_size=self._shape.hidden_size,
            num_layers=self._shape.num_layers,
        )
        gate = asyncio.Semaphore(self._settings.units_in_flight)
        async with asyncio.TaskGroup() as group:
            for unit in range(NUM_UNITS):
                rows = self._prompts[unit::NUM_UNITS]
                key = UnitKey(job_id=job_id, unit=unit, epoch=self._turn)
                told = order(about, len(rows), unit=unit).model_copy(update={"key": key})
                group.create_task(self._run_unit(told, rows, gate))

    async def _run_unit(self, told: OpenUnit, rows: list[tuple[int, ...]], gate: asyncio.Semaphore) -> None:
        prompts = [
            Prompt(f"{self._turn}-{told.key.unit}-{row}", ids, RowRef(told.key, row, len(ids)))
            for row, ids in enumerate(rows)
        ]
        async with gate:
            await self._quarry.run_unit(told, prompts)

    async def _run_example(self, folder: Path) -> None:
        folder.mkdir()
        paths = [folder / f"{index}.safetensors" for index in range(len(self._prompts))]
        prompts = [Prompt(f"{self._turn}-{index}", ids, None) for index, ids in enumerate(self._prompts)]
        params = [{"hidden_states_path": str(path)} for path in paths]
        await self._engines["example"].run_all(prompts, self._settings, params)
        deadline = time.monotonic() + FILES_TIMEOUT_S
        for path, ids in zip(paths, self._prompts, strict=True):
            while tokens_in(path) != len(ids):
                if time.monotonic() > deadline:
                    raise RunFailed(f"the example wrote no whole {path.name} in time")
                await asyncio.sleep(FILES_POLL_S)


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables while an engine starts."""
    os.environ |= variables
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def tokens_in(path: Path) -> int:
    """Return the tokens that a whole safetensors file holds; 0 for one that is not there or still written."""
    with contextlib.suppress(SafetensorError, FileNotFoundError), safe_open(path, framework="pt") as file:
        return int(file.get_slice("hidden_states").get_shape()[0])
    return 0


def write_rate(folder: Path) -> float:
    """Return bytes a second of one thread's plain write() and fsync()."""
    path, data = folder / "probe", os.urandom(2**24)
    begin = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(PROBE_BYTES // len(data)):
            file.write(data)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begin
    path.unlink()
    return PROBE_BYTES / seconds


async def measure_speed(plan: Plan, folder: Path) -> dict[str, object]:
    """Run every row once to warm up, then in shuffled rounds; return every turn and the summary."""
    rates = {"disk": write_rate(folder), "ram": write_rate(plan.ram)}
    run = SpeedRun(plan, folder)
    try:
        await run.start()
        for row in run.rows:
            await run.turn(row)
        orders = shuffled_rounds(list(run.rows), plan.num_rounds, seed=0)
        turns: dict[str, list[tuple[float, float]]] = {row: [] for row in run.rows}
        for order_of_round in orders:
            for row in order_of_round:
                turns[row].append(await run.turn(row))
                print(f"{row}: {turns[row][-1][0]:.2f} s", flush=True)
        facts = run.facts()
    finally:
        await run.stop()
    rate = {row: [run.num_tokens / seconds for seconds, _ in of_row] for row, of_row in turns.items()}
    return {
        "shape": asdict(TINY_SPEED_SHAPE if plan.tiny else SPEED_SHAPE),
        "options": OPTIONS,
        "engines": facts,
        "service": run.settings(),
        "prompts": plan.num_prompts,
        "tokens_a_turn": run.num_tokens,
        "write_bytes_a_second": rates,
        "orders": orders,
        "seconds_and_cpu_seconds": turns,
        "summary": {
            row: {
                "tokens_a_second": asdict(spread(rates_of_row)),
                "ratio_to_plain": asdict(paired(rates_of_row, rate["plain"])),
                "ratio_to_plain_v1": asdict(paired(rates_of_row, rate["plain-v1"])),
            }
            for row, rates_of_row in rate.items()
        },
    }
