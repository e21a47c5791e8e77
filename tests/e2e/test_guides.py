"""The guides are run: every command of a page, word for word, with a small target on this machine."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.loop.recipe import TARGET, question, split
from benchmarks.loop.stage import QUARRY_ENVIRONMENT, TRAINER_ENVIRONMENT, VLLM_ENVIRONMENT
from examples.tiny_target import cached_target

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 1200
ON_CPU = "--draft-attn-impl sdpa --loss-implementation eager --hidden-states-dtype float32 --num-workers 0"
SMALL = "--draft-vocab-size 768 --total-seq-len 512 --lr 3e-3"
"""The trainer's options beside the page's: this machine has no accelerator, and the target is small."""


def commands(page: str) -> str:
    """Return what a page has a reader type, in its order."""
    text = (ROOT / "docs" / page).read_text()
    return "\n".join(re.findall(r"^```bash\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE))


def script(path: Path, line: str, environment: dict[str, str]) -> None:
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())
    path.write_text(f"#!/bin/bash\n{exports}{line}\n")
    path.chmod(0o755)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_a_drafter_from_nothing_to_its_acceptance(tmp_path: Path) -> None:
    """1. The page's commands are run in a folder with a model and prompts, each in its environment.

    2. The diagnosis finds nothing wrong, and the server drafts and accepts.
    """
    shutil.copytree(cached_target(TARGET), tmp_path / "model")
    asked, held_out = split(200, 200)
    lines = [json.dumps({"messages": question(text)}) for text in (*asked, *held_out)]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{line}\n" for line in lines))
    python, port = sys.executable, free_port()
    tools = tmp_path / "bin"
    tools.mkdir()
    trainers = (
        f'case "$1" in train) exec {python} -m benchmarks.loop.trainer_on_cpu quarry "$@" {ON_CPU} {SMALL};; '
    )
    trainers += f'diagnose) exec {python} -m service.cli "$@";; esac\n'
    script(tools / "of-trainer", trainers, TRAINER_ENVIRONMENT)
    script(
        tools / "quarry",
        f'case "$1" in train|diagnose) exec of-trainer "$@";; *) exec {python} -m service.cli "$@";; esac',
        {"PYTHONPATH": str(ROOT), **QUARRY_ENVIRONMENT},
    )
    # The CPU build has no metadata of the name that the command `vllm serve` asks for; this is what it runs.
    serve = f'shift; exec {python} -m vllm.entrypoints.openai.api_server --model "$@" '
    serve += "--enforce-eager --max-model-len 512"
    script(tools / "vllm", serve, {"PYTHONPATH": str(ROOT), **VLLM_ENVIRONMENT})
    page = (
        commands("first-drafter.md").replace("8000", str(port)).replace("max_tokens: 512", "max_tokens: 64")
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QUARRY_")}
    done = subprocess.run(
        ["bash", "-eu", "-c", f"trap 'kill $(jobs -p) || true' EXIT\n{page}"],
        cwd=tmp_path,
        env=environment | {"PATH": f"{tools}:{environment['PATH']}", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-8000:]
    length = re.search(r"expected accepted length ([0-9.]+)", said)
    assert length is not None and float(length[1]) > 1.2, said[-8000:]
    assert "nothing wrong was found" in said
    accepted = re.search(
        r"^vllm:spec_decode_num_accepted_tokens_total\S* ([0-9.]+)", done.stdout, re.MULTILINE
    )
    assert accepted is not None and float(accepted[1]) > 0, said[-8000:]
    assert (tmp_path / "drafter.html").stat().st_size > 10_000


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port
