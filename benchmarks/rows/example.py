"""vLLM's example connector: its batch use, and its use with locks by a consumer that reads and deletes."""

import asyncio
import contextlib
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from vllm.outputs import RequestOutput

from benchmarks.rows.contract import RowFailed, Site, Written, removed, run_bounded
from benchmarks.rows.plain import VllmHost
from benchmarks.rows.speculators import SpeculatorsRow
from schemas.dataset.seal import fsync
from service.capture.engine import Prompt

FILES_TIMEOUT_S = 120.0
FILES_POLL_S = 0.005
WRITERS = 8
"""Files at once, as many as the connector writes by default."""
ANSWER_TOO = {"include_output_tokens": True}
"""What the example needs to be told to store the states of an answer as well."""


class ExampleHost(VllmHost):
    """The example connector in the place of ours; its files go to a folder of its own."""

    locked = False
    """Hold a lock on each file until it is written. Its authors advise batch users against it."""

    def __init__(self, site: Site) -> None:
        """Put the example in the place of our connector."""
        super().__init__(site)
        self.files = site.folder / "files"
        self.replaced = {
            "kv_transfer_config": {
                "kv_connector": "ExampleOnCpu",
                "kv_connector_module_path": "benchmarks.example_on_cpu",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {
                    "shared_storage_path": str(self.files.resolve()),
                    "use_synchronization_lock": self.locked,
                },
            }
        }

    async def run_captured(self, prompt: Prompt) -> RequestOutput:
        """Run one request whose states are stored, those of its answer included. Raises RowFailed."""
        return await self.run(prompt, ANSWER_TOO if prompt.generate else None)


class BatchRow:
    """Done when every request's file opens as safetensors of all its tokens; `durable`: and is on the disk.

    The connector never calls fsync. A durable row does, beside the engine, for each file as it is whole, and
    for the folder in the end.
    """

    def __init__(self, host: ExampleHost, name: str, *, durable: bool) -> None:
        """Run on `host` as the row `name`."""
        self._host, self._name, self._durable = host, name, durable
        self._prompts: list[Prompt] = []

    async def prepare(self, turn: int) -> None:
        """Draw the round's prompts."""
        self._prompts = self._host.site.prompts(self._name, turn)

    async def measure(self) -> float:
        """Run every prompt, and wait for the files."""
        begin = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(
                run_bounded(self._host.run_captured, self._prompts, self._host.site.settings())
            )
            if not self._durable:
                await running
            lengths = await self._lengths_in_files(running)
        seconds = time.perf_counter() - begin
        self._host.site.check_lengths(lengths)
        return seconds

    async def clean(self) -> Written:
        """Delete the files."""
        return removed(self._host.files, "*.safetensors")

    async def _lengths_in_files(self, running: asyncio.Task[None]) -> list[int]:
        """Wait until there is a whole file for every prompt; return the tokens that each holds."""
        tokens: dict[Path, int] = {}
        deadline = time.monotonic() + FILES_TIMEOUT_S
        with ThreadPoolExecutor(WRITERS) as threads:
            syncing: list[Future[None]] = []
            while len(tokens) < len(self._prompts):
                if not running.done():
                    deadline = time.monotonic() + FILES_TIMEOUT_S
                for path in set(self._host.files.glob("*.safetensors")) - tokens.keys():
                    # Until it is whole it has another name: safetensors renames what it has written.
                    with contextlib.suppress(SafetensorError), safe_open(path, framework="pt") as file:
                        tokens[path] = file.get_slice("hidden_states").get_shape()[0]
                    if self._durable and path in tokens:
                        syncing.append(threads.submit(_fsync, path))
                if time.monotonic() > deadline:
                    raise RowFailed(f"only {len(tokens)} of {len(self._prompts)} files could be read in time")
                await asyncio.sleep(FILES_POLL_S)
            await asyncio.gather(*map(asyncio.wrap_future, syncing))
        if self._durable:
            await asyncio.to_thread(fsync, self._host.files)
        return list(tokens.values())


def _fsync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


class ConsumedRow:
    """Done when a consumer has read and deleted every request's file, as its answer names it."""

    def __init__(self, host: ExampleHost) -> None:
        """Run on `host`."""
        self._host = host
        self._prompts: list[Prompt] = []
        self._read: list[tuple[int, int]] = []

    async def prepare(self, turn: int) -> None:
        """Draw the round's prompts."""
        self._prompts = self._host.site.prompts("example-consumed", turn)
        self._read = []

    async def measure(self) -> float:
        """Run every prompt and read what it left, while the others go on."""
        begin = time.perf_counter()
        async with asyncio.TaskGroup() as reading:

            async def run(prompt: Prompt) -> None:
                answer = await self._host.run_captured(prompt)
                ids = [*prompt.token_ids, *answer.outputs[0].token_ids[:-1]]
                path = (answer.kv_transfer_params or {})["hidden_states_path"]
                # Not within the bound on what is in the engine, which is done with this request.
                reading.create_task(self._consume(path, ids))

            await run_bounded(run, self._prompts, self._host.site.settings())
        seconds = time.perf_counter() - begin
        self._host.site.check_lengths([tokens for tokens, _ in self._read])
        return seconds

    async def clean(self) -> Written:
        """Say what was read; nothing may be left."""
        left = removed(self._host.files, "*.safetensors")
        if left.files:
            raise RowFailed(f"the consumer left {left.files} files behind")
        return Written(len(self._read), sum(size for _, size in self._read))

    async def _consume(self, path: str, ids: list[int]) -> None:
        found = await asyncio.to_thread(consumed, path)
        if found["token_ids"].tolist() != ids:
            raise RowFailed(f"{Path(path).name} holds other tokens than were asked for")
        states = found["hidden_states"]
        self._read.append((states.shape[0], states.nbytes))


def consumed(path: str) -> dict[str, Any]:
    """Wait for a file's lock, read its tensors and delete both, by vLLM's own functions."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as example

    found: dict[str, Any] = example.load_hidden_states(path)
    # What was loaded is a view of the mapped file until somebody reads it.
    found = {name: tensor.clone() for name, tensor in found.items()}
    example.cleanup_hidden_states(path)
    return found


class ExampleEngine(ExampleHost):
    """The example as its authors advise for batch use: without locks."""

    def __init__(self, site: Site) -> None:
        """Serve the batch use."""
        super().__init__(site)
        self.rows = {
            "example": BatchRow(self, "example", durable=False),
            "example-durable": BatchRow(self, "example-durable", durable=True),
        }


class LockedEngine(ExampleHost):
    """The example with its locks, by whom its files are consumed or moved."""

    locked = True

    def __init__(self, site: Site) -> None:
        """Serve a consumer here, and speculators' over HTTP."""
        super().__init__(site)
        # An OpenAI server will not do without a tokenizer.
        self.replaced = {**self.replaced, "skip_tokenizer_init": False}
        self._speculators = SpeculatorsRow(self, self.files)
        self.rows = {"example-consumed": ConsumedRow(self), "speculators": self._speculators}

    async def stop(self) -> None:
        """Stop the server and its client as well."""
        await self._speculators.stop()
        await super().stop()
