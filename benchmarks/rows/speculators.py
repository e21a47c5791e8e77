"""speculators' offline flow: its own generate-offline-data against vLLM's OpenAI server.

The server is vLLM's, over an engine that runs already. The client is a process of its own that has imported
everything before the first round.
"""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from benchmarks.rows.contract import RowFailed, Written, removed
from benchmarks.trainers import TRAINERS

if TYPE_CHECKING:
    from benchmarks.rows.plain import VllmHost

CONCURRENCY = 32
"""speculators' own default."""
CLIENT = """
import asyncio, json, sys, warnings
warnings.simplefilter("ignore")
from speculators.cli.generate_offline_data import _generate_and_save_hidden_states as generate
for line in sys.stdin:
    order = json.loads(line)
    if order:
        asyncio.run(generate(**order))
    print("done", flush=True)
"""
"""What `speculators generate-offline-data` runs, once a line; an empty order is answered at once."""


class SpeculatorsRow:
    """Done when the client has moved every request's file to the dataset's folder."""

    def __init__(self, host: "VllmHost", files: Path) -> None:
        """Serve `host`, whose connector writes to `files`; server and client start with the first round."""
        self._host, self._shared = host, files
        self._folder = host.site.folder / "speculators"
        self._address = ""
        self._serving: asyncio.Task[None] | None = None
        self._server: Any = None
        self._client: subprocess.Popen[str] | None = None

    async def prepare(self, turn: int) -> None:
        """Write the round's prompts as a prepared dataset."""
        from datasets import Dataset, disable_progress_bars

        if self._client is None:
            await self._serve()
            self._client = await asyncio.to_thread(self._started_client)
        disable_progress_bars()
        ids = [list(prompt) for prompt in self._host.site.work.prompts("speculators", turn)]
        masks = [[1] * len(prompt) for prompt in ids]
        data = Dataset.from_dict({"input_ids": ids, "loss_mask": masks}).with_format("torch")
        data.save_to_disk(self._folder / "data")

    async def measure(self) -> None:
        """Let the client run the dataset."""
        order = {
            "model": None,
            "endpoint": f"{self._address}/v1",
            "preprocessed_data": str(self._folder / "data"),
            "output": str(self._folder / "states"),
            "max_samples": None,
            "concurrency": CONCURRENCY,
            "validate_outputs": False,
            "request_timeout": 120.0,
            "max_retries": 0,
            "fail_on_error": True,
            "max_consecutive_errors": None,
            "world_size": 1,
            "rank": 0,
        }
        await asyncio.to_thread(self._ask, order)

    async def clean(self) -> Written:
        """Compare every file with its prompt, and delete them."""
        lengths = []
        for path in (self._folder / "states").glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                lengths.append(file.get_slice("hidden_states").get_shape()[0])
        self._host.site.check_lengths(lengths)
        written = removed(self._folder / "states", "*.safetensors")
        shutil.rmtree(self._folder / "data")
        shutil.rmtree(self._shared)
        return written

    async def stop(self) -> None:
        """End the client, then the server."""
        if self._client is not None and self._client.stdin is not None:
            self._client.stdin.close()
            self._client.wait()
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving

    async def _serve(self) -> None:
        """Put vLLM's OpenAI server before the engine, in this process, as `vllm serve` does."""
        import uvicorn
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app

        llm = self._host.llm
        arguments = server_arguments(str(self._host.site.weights))
        tasks = await llm.get_supported_tasks()
        app = build_app(arguments, tasks, llm.model_config)
        await init_app_state(llm, app.state, arguments, tasks)
        place = socket.create_server(("127.0.0.1", 0))
        self._address = f"http://127.0.0.1:{place.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
        self._serving = asyncio.create_task(self._server.serve(sockets=[place]))

    def _started_client(self) -> "subprocess.Popen[str]":
        environment = os.environ | {"PYTHONPATH": str(TRAINERS)}
        client = subprocess.Popen(
            [sys.executable, "-c", CLIENT],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._client = client
        self._ask({})
        return client

    def _ask(self, order: dict[str, Any]) -> None:
        client = self._client
        assert client is not None and client.stdin is not None and client.stdout is not None
        client.stdin.write(json.dumps(order) + "\n")
        client.stdin.flush()
        said = client.stdout.readline()
        if said != "done\n":
            raise RowFailed(f"speculators' client said {said!r} and ended as {client.poll()}")


def server_arguments(model: str) -> Namespace:
    """Return the server's arguments; those of the engine are not read, since it runs already."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    arguments: Namespace = parser.parse_args(["--model", model, "--disable-fastapi-docs"])
    return arguments
