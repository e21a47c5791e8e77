"""vLLM's example connector: its batch use, and its use with locks by a consumer that reads and deletes."""

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from vllm.outputs import RequestOutput

from benchmarks.rows.contract import PromptRow, RowFailed, Site, Written, put_in_memory, removed, run_bounded
from benchmarks.rows.plain import VllmHost
from service.capture.engine import Prompt

FILES_TIMEOUT_S = 120.0
FILES_POLL_S = 0.005
ANSWER_TOO = {"include_output_tokens": True}
"""The option of the example that stores the states of an answer as well."""


ON_CUDA = {"kv_connector": "ExampleHiddenStatesConnector"}
ON_CPU = {"kv_connector": "ExampleOnCpu", "kv_connector_module_path": "benchmarks.example_on_cpu"}


class ExampleHost(VllmHost):
    """The example connector in place of Quarry's; its files go to a separate folder."""

    locked = False
    """Hold a lock on each file until it is written. Its authors advise batch users against it."""

    def __init__(self, site: Site) -> None:
        """Put the example in the place of our connector."""
        super().__init__(site)
        self.files = site.folder / "files"
        self.replaced = {
            "kv_transfer_config": {
                **(ON_CUDA if torch.cuda.is_available() else ON_CPU),
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


class BatchRow(PromptRow):
    """Done when every request's file opens as safetensors of all its tokens. Nobody calls fsync."""

    def __init__(self, host: ExampleHost, name: str = "example") -> None:
        """Run on `host`."""
        super().__init__(host.site, name)
        self._host = host
        self._lengths: dict[Path, int] = {}

    async def measure(self) -> float:
        """Run every prompt, and wait until there is a whole file for each."""
        self._lengths = {}
        answered = await run_bounded(self._host.run_captured, self.prompts, self.site.budget())
        deadline = time.monotonic() + FILES_TIMEOUT_S
        while len(self._lengths) < len(self.prompts):
            for path in set(self._host.files.glob("*.safetensors")) - self._lengths.keys():
                # Until it is whole it has another name: safetensors renames what it has written.
                with contextlib.suppress(SafetensorError), safe_open(path, framework="pt") as file:
                    self._lengths[path] = file.get_slice("hidden_states").get_shape()[0]
                    await self._keep(path)
            if time.monotonic() > deadline:
                raise RowFailed(f"only {len(self._lengths)} of {len(self.prompts)} files are whole")
            await asyncio.sleep(FILES_POLL_S)
        return answered

    async def _keep(self, path: Path) -> None:
        """Do nothing more for a whole file."""

    async def clean(self) -> Written:
        """Delete the files."""
        self.site.check_lengths(list(self._lengths.values()))
        return removed(self._host.files, "*.safetensors")


class SyncedRow(BatchRow):
    """Each file is durable, too, as all of Quarry's are; files are made so side by side."""

    async def measure(self) -> float:
        """Run every prompt, and wait until there is a durable file for each."""
        async with asyncio.TaskGroup() as self._syncing:
            return await super().measure()

    async def _keep(self, path: Path) -> None:
        self._syncing.create_task(asyncio.to_thread(durable, path))


class MemoryRow(BatchRow):
    """The files go into memory."""

    async def prepare(self, turn: int) -> None:
        """Put the files' folder into memory."""
        await super().prepare(turn)
        put_in_memory(self._host.files)


class ConsumedRow(PromptRow):
    """Done when a consumer has read and deleted every request's file, as its answer names it."""

    def __init__(self, host: ExampleHost) -> None:
        """Run on `host`."""
        super().__init__(host.site, "example-consumed")
        self._host = host
        self._read: list[tuple[int, int]] = []

    async def measure(self) -> float:
        """Run every prompt and read its file, while the others go on."""
        self._read = []
        async with asyncio.TaskGroup() as reading:

            async def run(prompt: Prompt) -> None:
                answer = await self._host.run_captured(prompt)
                ids = [*prompt.token_ids, *answer.outputs[0].token_ids[:-1]]
                path = (answer.kv_transfer_params or {})["hidden_states_path"]
                # Not within the bound on what is in the engine, which is done with this request.
                reading.create_task(self._consume(path, ids))

            return await run_bounded(run, self.prompts, self.site.budget())

    async def clean(self) -> Written:
        """Return what was read; nothing may be left."""
        self.site.check_lengths([tokens for tokens, _ in self._read])
        left = removed(self._host.files, "*.safetensors")
        if left.files:
            raise RowFailed(f"the consumer left {left.files} files behind")
        return Written(len(self._read), sum(size for _, size in self._read))

    async def _consume(self, path: str, ids: list[int]) -> None:
        tensors = await asyncio.to_thread(consumed, path)
        if tensors["token_ids"].tolist() != ids:
            raise RowFailed(f"{Path(path).name} holds other tokens than were asked for")
        states = tensors["hidden_states"]
        self._read.append((states.shape[0], states.nbytes))


def durable(path: Path) -> None:
    """Wait until a file's bytes are on disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def consumed(path: str) -> dict[str, Any]:
    """Wait for a file's lock, read its tensors and delete both, by vLLM's own functions."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as example

    # What is loaded is a view of the mapped file until somebody reads it.
    tensors = {name: tensor.clone() for name, tensor in example.load_hidden_states(path).items()}
    example.cleanup_hidden_states(path)
    return tensors


class ExampleEngine(ExampleHost):
    """The example as its authors advise for batch use: without locks."""

    def __init__(self, site: Site) -> None:
        """Serve the batch use."""
        super().__init__(site)
        self.rows = {
            "example": BatchRow(self),
            "example-synced": SyncedRow(self, "example-synced"),
            "example-memory": MemoryRow(self, "example-memory"),
        }


class LockedEngine(ExampleHost):
    """The example with its locks, for a consumer of its files."""

    locked = True

    def __init__(self, site: Site) -> None:
        """Serve a consumer that reads and deletes."""
        super().__init__(site)
        self.rows = {"example-consumed": ConsumedRow(self)}
