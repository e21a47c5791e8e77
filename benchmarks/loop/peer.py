"""The peer's way to the same rows: vLLM's server with its example connector, asked by speculators' client.

The token ids and masks are those of our export, so that only the states and how they came are compared; token
counts and vocabulary maps are the peer's own again. vLLM's connector needs CUDA: `benchmarks.example_on_cpu`.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.loop.recipe import AUX, LAST
from benchmarks.loop.serve import ENVIRONMENT as VLLM
from benchmarks.loop.stage import LOG, Cache, failed, python, run
from benchmarks.loop.states import STATES
from benchmarks.loop.train import ENVIRONMENT as TRAINER, ROOT

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.5
DUMP = "dump"


def dumped(cache: Cache, target: Path, export: Path) -> Path:
    """Return a dataset of the rows of `export` whose states speculators dumped. Raises LoopFailed."""

    def make(folder: Path) -> None:
        data = folder / DUMP
        left_out = shutil.ignore_patterns(STATES, "*.npy", "token_freq.pt", "export.json", "TRAIN.md")
        shutil.copytree(export, data, ignore=left_out)
        with server(target, folder) as endpoint:
            told = ["--validate-outputs", "--fail-on-error", "--concurrency", "8"]
            where = ["--endpoint", f"{endpoint}/v1", "--preprocessed-data", str(data)]
            run(python("speculators", "generate-offline-data", *where, *told), folder / LOG, TRAINER)
        run([sys.executable, "-W", "ignore", "-c", COUNT, data], folder / LOG, TRAINER)

    decides = {"target": target.name, "rows": export.parent.name, "aux": AUX}
    return cache.stage("speculators", decides, make) / DUMP


COUNT = """
import sys
from datasets import load_from_disk
from speculators.train.vocab_mapping import save_token_frequency_distribution
save_token_frequency_distribution(load_from_disk(sys.argv[1]), sys.argv[1] + "/token_freq.pt")
"""
"""What `speculators prepare-data` does last."""


@contextmanager
def server(target: Path, folder: Path) -> Iterator[str]:
    """Yield the address of vLLM's server, set up as speculators' guide says, and stop it."""
    with socket.create_server(("127.0.0.1", 0)) as place:
        port = place.getsockname()[1]
    connector = {
        "kv_connector": "ExampleOnCpu",
        "kv_connector_module_path": "benchmarks.example_on_cpu",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "shared")},
    }
    layers = {"eagle_aux_hidden_state_layer_ids": [*AUX, LAST]}
    proposer = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": layers},
    }
    options: dict[str, object] = {
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": "float32",
        "--max-model-len": 1024,
        "--speculative-config": json.dumps(proposer),
        "--kv-transfer-config": json.dumps(connector),
    }
    told = [str(word) for option in options.items() for word in option]
    command = python("vllm.entrypoints.openai.api_server", "--model", target, "--enforce-eager", *told)
    log = folder / "server.log"
    environment = os.environ | VLLM | {"PYTHONPATH": str(ROOT)}
    with (
        log.open("wb") as sink,
        subprocess.Popen(list(map(str, command)), env=environment, stdout=sink, stderr=sink) as child,
    ):
        try:
            address = f"http://127.0.0.1:{port}"
            wait_until_up(address, child, log)
            yield address
        finally:
            child.terminate()
            try:
                child.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()


def wait_until_up(address: str, child: subprocess.Popen[bytes], log: Path) -> None:
    """Return when the server answers. Raises LoopFailed."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while child.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_S)
    raise failed("vLLM's server", child.poll(), log)
