"""The engine rows: what each runs, and when it counts as done. Each lives in a `benchmarks.engine_process`.

Every engine is started with Quarry's own arguments, less the capture (plain) or with vLLM's example connector
in the place of ours (example), and is fed through the service's own bound on what is in flight.
"""

import asyncio
import contextlib
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from benchmarks.workload import MAX_NUM_BATCHED_TOKENS, Workload
from connector.wire import RowRef
from schemas.names import attempt_dir, plan_path
from schemas.receipts import OpenUnit, UnitSealed
from service.capture.budget import InFlight
from service.capture.engine import EngineSpec, Prompt
from service.capture.link import EngineLink
from service.capture.vllm_engine import VllmEngine, engine_arguments, sampling_parameters
from service.proof.checks import Witness, check_unit
from service.proof.head import Head
from service.settings import Settings
from tests.support.plans import JOB, identity, order, write_plan

STOP_TIMEOUT_S = 30.0
FILES_TIMEOUT_S = 120.0
FILES_POLL_S = 0.005

CAPTURE_ARGUMENTS = frozenset({"speculative_config", "kv_transfer_config"})


class RowFailed(RuntimeError):
    """A row that did not do its whole work has no figure."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a round left on disk."""

    files: int
    bytes: int


class Row(Protocol):
    """One engine, kept through all rounds. A round is `prepare`, `measure`, `clean`; `measure` counts."""

    async def start(self) -> None:
        """Start the engine."""

    async def prepare(self, turn: int) -> None:
        """Make ready for a round; `turn` counts them, the warm-up included."""

    async def measure(self) -> float:
        """Do the work and return the seconds until it counts as done. Raises RowFailed."""

    async def clean(self) -> Written:
        """Say what was written, and delete it."""

    async def stop(self) -> None:
        """Stop the engine."""


class PlainRow:
    """Prefill alone: no speculative method, no connector. Done when the last prompt is answered."""

    def __init__(self, work: Workload, weights: Path, folder: Path) -> None:
        """Run `work` on the target in `weights`; files go below `folder`."""
        self._prompts = work.prompts()
        self._spec = spec_of(work, weights)
        self._settings = settings_of(folder)
        self._turn = 0
        self._llm: AsyncLLM | None = None

    async def start(self) -> None:
        """Start vLLM."""
        link = EngineLink()  # its path is an argument that `arguments` replaces or drops
        arguments = self.arguments(engine_arguments(self._spec, self._settings, link))
        await link.close()
        self._llm = await asyncio.to_thread(AsyncLLM.from_engine_args, AsyncEngineArgs(**arguments))

    def arguments(self, quarry: dict[str, Any]) -> dict[str, Any]:
        """Return this row's engine arguments, given Quarry's."""
        return {name: value for name, value in quarry.items() if name not in CAPTURE_ARGUMENTS}

    async def prepare(self, turn: int) -> None:
        """Note the round: request ids are made of it."""
        self._turn = turn

    async def measure(self) -> float:
        """Run every prompt."""
        begin = time.perf_counter()
        await self._run_prompts()
        return time.perf_counter() - begin

    async def clean(self) -> Written:
        """Nothing was written."""
        return Written(0, 0)

    async def stop(self) -> None:
        """End the engine's processes."""
        if self._llm is not None:
            if self._llm.output_handler is not None:
                self._llm.output_handler.cancel()
            await asyncio.to_thread(self._llm.shutdown, STOP_TIMEOUT_S)

    async def _run_prompts(self) -> None:
        prompts = [Prompt(f"{self._turn}-{index}", ids, None) for index, ids in enumerate(self._prompts)]
        await run_bounded(self._run, prompts, in_flight(self._settings))

    async def _run(self, prompt: Prompt) -> None:
        assert self._llm is not None, "start() comes first"
        last = None
        stream = self._llm.generate(
            {"prompt_token_ids": list(prompt.token_ids)}, sampling_parameters(prompt), prompt.request_id
        )
        async for output in stream:
            last = output
        if last is None or last.outputs[0].finish_reason != "length":
            raise RowFailed(f"request {prompt.request_id} did not end well")


class ExampleRow(PlainRow):
    """vLLM's example connector. Done when every request's file opens as safetensors of all its tokens.

    That is not durable: the connector never calls fsync, and this row adds none.
    """

    def __init__(self, work: Workload, weights: Path, folder: Path) -> None:
        """Keep a folder of its own for the connector's files."""
        super().__init__(work, weights, folder)
        self._files = folder / "files"

    def arguments(self, quarry: dict[str, Any]) -> dict[str, Any]:
        """Put the example in the place of our connector, set as its authors advise for batch use."""
        return quarry | {
            "kv_transfer_config": {
                "kv_connector": "ExampleOnCpu",
                "kv_connector_module_path": "benchmarks.example_on_cpu",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {
                    "shared_storage_path": str(self._files.resolve()),
                    "use_synchronization_lock": False,
                },
            }
        }

    async def measure(self) -> float:
        """Run every prompt, then wait for the files."""
        begin = time.perf_counter()
        await self._run_prompts()
        num_tokens = await self._tokens_in_files()
        seconds = time.perf_counter() - begin
        if num_tokens != sum(map(len, self._prompts)):
            raise RowFailed(f"the example's files hold {num_tokens} tokens of {sum(map(len, self._prompts))}")
        return seconds

    async def clean(self) -> Written:
        """Delete the files."""
        return removed(self._files, "*.safetensors")

    async def _tokens_in_files(self) -> int:
        """Wait until there is a whole file for every prompt; return the tokens that they hold together."""
        tokens: dict[Path, int] = {}
        deadline = time.monotonic() + FILES_TIMEOUT_S
        while len(tokens) < len(self._prompts):
            for path in set(self._files.glob("*.safetensors")) - tokens.keys():
                # A file still being written is shorter than its header says, which safetensors refuses.
                with contextlib.suppress(SafetensorError), safe_open(path, framework="pt") as file:
                    tokens[path] = file.get_slice("hidden_states").get_shape()[0]
            if time.monotonic() > deadline:
                raise RowFailed(f"only {len(tokens)} of {len(self._prompts)} files could be read in time")
            await asyncio.sleep(FILES_POLL_S)
        return sum(tokens.values())


class QuarryRow:
    """Our connector, at default settings. Done when every unit could be committed.

    Its shard is checked, sealed, durable, receipted, and the logits of its sample are proven.
    """

    witnessed = True
    """Ask the engine for what every row's last state is held against."""

    def __init__(self, work: Workload, weights: Path, folder: Path) -> None:
        """Run `work` on the target in `weights`; files go below `folder`."""
        self._units = work.units()
        self._spec = spec_of(work, weights)
        self._settings = settings_of(folder)
        self._about = identity(
            layer_ids=work.target.layer_ids,
            hidden_size=work.target.hidden_size,
            num_layers=work.target.num_layers,
        )
        self._orders: list[OpenUnit] = []
        self._link = EngineLink()
        self._engine = VllmEngine()
        self._head = Head.load(weights, self._about.dtype)

    async def start(self) -> None:
        """Start vLLM with our connector."""
        await self._link.listen()
        await self._engine.start(self._spec, self._settings, self._link)

    async def prepare(self, turn: int) -> None:
        """Write the plans of the round's units, as the planner would have done long before."""
        first = turn * len(self._units)
        self._orders = [
            order(self._about, len(rows), unit=unit) for unit, rows in enumerate(self._units, start=first)
        ]
        for told, rows in zip(self._orders, self._units, strict=True):
            write_plan(self._settings.work_root, rows, unit=told.key.unit)

    async def measure(self) -> float:
        """Run every unit, as many at once as a worker of the service does."""
        begin = time.perf_counter()
        budget = in_flight(self._settings)
        gate = asyncio.Semaphore(self._settings.units_in_flight)
        async with asyncio.TaskGroup() as group:
            for told, rows in zip(self._orders, self._units, strict=True):
                group.create_task(self._run_unit(told, rows, budget, gate))
        return time.perf_counter() - begin

    async def clean(self) -> Written:
        """Delete the round's plans and shards; only shards count."""
        return removed(self._settings.work_root / JOB, "attempts/*/*.parquet")

    async def stop(self) -> None:
        """End the engine's processes."""
        await self._engine.stop()
        await self._link.close()

    async def _run_unit(
        self, told: OpenUnit, rows: list[tuple[int, ...]], budget: InFlight, gate: asyncio.Semaphore
    ) -> None:
        key = told.key
        prompts = [
            Prompt(f"{key.unit}-{row}", ids, RowRef(key, row, len(ids)), witness=self.witnessed)
            for row, ids in enumerate(rows)
        ]
        witnesses: dict[int, Witness] = {}

        async def run(prompt: Prompt) -> None:
            answer = await self._engine.run(prompt)
            if prompt.ref is not None and answer.likely:
                witnesses[prompt.ref.row] = Witness.of(answer.likely)

        async with gate:
            await self._link.open(told)
            await run_bounded(run, prompts, budget)
            (receipt,) = await self._link.receipts(key)
            if not isinstance(receipt, UnitSealed) or len(receipt.rows) != told.num_rows:
                raise RowFailed(f"unit {key.unit} was not written whole: {receipt}")
            await asyncio.to_thread(self.prove, receipt, witnesses)

    def prove(self, receipt: UnitSealed, witnesses: Mapping[int, Witness]) -> None:
        """Hold the sealed unit against its plan and the model, as the service does before it commits."""
        key = receipt.key
        check_unit(
            attempt=self._settings.work_root / attempt_dir(key.job_id, key.unit, key.epoch),
            plan_file=self._settings.work_root / plan_path(key.job_id, key.unit),
            receipts=[receipt],
            witnesses=witnesses,
            head=self._head,
            identity=self._about,
            logit_share=self._settings.logit_share,
            logit_rows_min=self._settings.logit_rows_min,
        )


class _UncheckedEngine(VllmEngine):
    connector_module = "benchmarks.unchecked"


class UncheckedRow(QuarryRow):
    """The same without the checks: what it costs less is what they cost. The file's checksums stay."""

    witnessed = False

    def __init__(self, work: Workload, weights: Path, folder: Path) -> None:
        """Load the connector whose rows are not checked."""
        super().__init__(work, weights, folder)
        self._engine = _UncheckedEngine()

    def prove(self, receipt: UnitSealed, witnesses: Mapping[int, Witness]) -> None:
        """Prove nothing."""


ROWS: dict[str, Callable[[Workload, Path, Path], Row]] = {
    "plain": PlainRow,
    "quarry": QuarryRow,
    "unchecked": UncheckedRow,
    "example": ExampleRow,
}


def spec_of(work: Workload, weights: Path) -> EngineSpec:
    """Return what the engines are started for: room for the longest prompt and the one sampled token."""
    return EngineSpec(
        weights=weights,
        revision="0",
        dtype="bfloat16",
        layer_ids=work.target.layer_ids,
        hidden_size=work.target.hidden_size,
        max_model_len=work.target.longest_prompt + 1,
        decode=False,
    )


def settings_of(folder: Path) -> Settings:
    """Return the service's settings for `folder`; no prefix caching, since rounds repeat the prompts."""
    return Settings(
        data_dir=folder,
        engine_options={
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        },
    )


def in_flight(settings: Settings) -> InFlight:
    """Return the service's bound on what is in the engine at once."""
    return InFlight(settings.in_flight_tokens, settings.in_flight_requests)


async def run_bounded(
    run: Callable[[Prompt], Awaitable[object]], prompts: list[Prompt], budget: InFlight
) -> None:
    """Run every prompt, first come first served within `budget`."""

    async def one(prompt: Prompt) -> None:
        async with budget.hold(len(prompt.token_ids)):
            await run(prompt)

    async with asyncio.TaskGroup() as group:
        for prompt in prompts:
            group.create_task(one(prompt))


def removed(folder: Path, pattern: str) -> Written:
    """Delete `folder` and return what stood in the files that match `pattern`."""
    sizes = [path.stat().st_size for path in folder.glob(pattern)]
    shutil.rmtree(folder)
    return Written(len(sizes), sum(sizes))
