"""What every row does, and what the rows have in common."""

import asyncio
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.workload import MAX_NUM_BATCHED_TOKENS, Workload
from schemas.generate import Generate
from service.capture.budget import InFlight
from service.capture.engine import EngineSpec, Prompt
from service.settings import Settings


class RowFailed(RuntimeError):
    """A row that did not do its whole work has no figure."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a round left on disk, or passed through it."""

    files: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Site:
    """What an engine is given: its work, the target's weights, and a folder of its own."""

    work: Workload
    weights: Path
    folder: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    """More of the engine's options; they win."""

    def spec(self) -> EngineSpec:
        """Return what the engines are started for: room for the longest request and one token."""
        return EngineSpec(
            weights=self.weights,
            model_sha256="0",
            dtype="bfloat16",
            layer_ids=self.work.target.layer_ids,
            hidden_size=self.work.target.hidden_size,
            max_model_len=self.work.kind.max_tokens + 1,
            decode=self.work.kind.answer_tokens > 0,
        )

    def settings(self) -> Settings:
        """Return the service's settings for the folder; prefix caching only where prompts share a prefix."""
        return Settings(
            data_dir=self.folder,
            engine_options={
                "enable_prefix_caching": self.work.kind.shared_tokens > 0,
                "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
                **self.options,
            },
        )

    def budget(self) -> InFlight:
        """Return the service's bound on what is in the engine."""
        settings = self.settings()
        return InFlight(settings.in_flight_tokens, settings.in_flight_requests)

    def generate(self) -> Generate | None:
        """Return the answer that is asked for, if the workload asks for one: greedy, states as it decodes."""
        tokens = self.work.kind.answer_tokens
        return Generate(max_tokens=tokens, temperature=0.0, capture="one_pass") if tokens else None

    def prompts(self, row: str, turn: int) -> list[Prompt]:
        """Return `row`'s prompts of a round as requests that our connector has nothing to do with."""
        return [
            Prompt(f"{row}-{turn}-{index}", ids, None, generate=self.generate())
            for index, ids in enumerate(self.work.prompts(row, turn))
        ]

    def check_lengths(self, stored: list[int]) -> None:
        """Compare the tokens of the stored files with the prompts'. Raises RowFailed."""
        expected = self.work.stored_lengths()
        if sorted(stored) != sorted(expected):
            raise RowFailed(
                f"{len(stored)} files hold {sum(stored)} tokens, not {len(expected)} files {sum(expected)}"
            )


class Row(Protocol):
    """A round is `prepare`, `measure`, `clean`; only `measure` counts."""

    async def prepare(self, turn: int) -> None:
        """Make ready for a round; `turn` counts them, the warm-up included."""

    async def measure(self) -> float:
        """Do the work, and return once it counts as done; the time of the last answer (`perf_counter`).

        Raises RowFailed.
        """

    async def clean(self) -> Written:
        """Return what was written, and delete it. Raises RowFailed if it is not as expected."""


class Engine(Protocol):
    """One engine, kept through all rounds."""

    @property
    def rows(self) -> Mapping[str, Row]:
        """Return its rows by name."""

    async def start(self) -> None:
        """Start the engine."""

    async def stop(self) -> None:
        """Stop the engine."""


async def run_bounded(
    run: Callable[[Prompt], Awaitable[object]], prompts: list[Prompt], budget: InFlight
) -> float:
    """Run every prompt, first come first served within `budget`, the service's bound on what is in flight.

    Returns the time of the last answer (`perf_counter`).
    """

    async def one(prompt: Prompt) -> None:
        room = prompt.generate.max_tokens if prompt.generate else 0
        async with budget.hold(len(prompt.token_ids) + room):
            await run(prompt)

    async with asyncio.TaskGroup() as group:
        for prompt in prompts:
            group.create_task(one(prompt))
    return time.perf_counter()


class PromptRow:
    """What rows have in common whose requests our connector has nothing to do with."""

    def __init__(self, site: Site, name: str) -> None:
        """Run at `site` as the row `name`."""
        self.site, self.name = site, name
        self.prompts: list[Prompt] = []

    async def prepare(self, turn: int) -> None:
        """Draw the round's prompts."""
        self.prompts = self.site.prompts(self.name, turn)


MEMORY = Path("/dev/shm")


def put_in_memory(folder: Path) -> None:
    """Make `folder`, which is not there or empty, a link to one in memory."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to(tempfile.mkdtemp(prefix="quarry-bench-", dir=MEMORY))


def removed(folder: Path, pattern: str) -> Written:
    """Delete `folder`, also if it is in memory, and return what was in the files of `pattern`."""
    sizes = [path.stat().st_size for path in folder.glob(pattern)]
    shutil.rmtree(folder.resolve())
    if folder.is_symlink():
        folder.unlink()
    return Written(len(sizes), sum(sizes))
