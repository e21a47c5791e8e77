"""The guides are run: every command of a page, word for word, with a small target on this machine."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.loop.recipe import TARGET, question, split
from benchmarks.loop.stage import QUARRY_ENVIRONMENT, TRAINER_ENVIRONMENT, VLLM_ENVIRONMENT
from examples.tiny_target import cached_target
from tests.support.desk import TOKEN, writable_hub
from tests.support.jobs import FAKE_ENGINE
from tests.support.ports import free_port
from tests.support.templates import CHATML
from tests.support.tiny_model import random_target

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


def run(folder: Path, tools: Path, page: str, **settings: str) -> str:
    """Run a page's commands in a folder, those of `tools` before all others; return what they print."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QUARRY_")}
    path = f"{tools}:{environment['PATH']}"
    done = subprocess.run(
        ["bash", "-eu", "-o", "pipefail", "-c", f"trap 'kill $(jobs -p) || true; wait' EXIT\n{page}"],
        cwd=folder,
        env=environment | {"PATH": path, "HF_HUB_OFFLINE": "1"} | settings,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-8000:]
    return said


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder of commands, of which `quarry` is the one of this checkout, with the tests' engine."""
    folder = tmp_path / "bin"
    folder.mkdir()
    settings = {"PYTHONPATH": str(ROOT), "QUARRY_ENGINE": FAKE_ENGINE, "QUARRY_POLL_S": "0.05"}
    script(folder / "quarry", f'exec {sys.executable} -m service.cli "$@"', settings)
    return folder


SMI = """case $1 in
*memory*) for n in 0 1; do echo "$n, 580.159.04, 9.0, 81559, 81008, Disabled, NVIDIA H100 80GB HBM3"; done;;
*) for n in 0 1; do echo "$n, GPU-$n, 00000000:3B:00.0, NVIDIA H100 80GB HBM3"; done;;
esac"""


@pytest.mark.slow
def test_a_worker_on_each_gpu_shares_a_job(tmp_path: Path, tools: Path) -> None:
    """The machine has two GPUs as far as nvidia-smi says."""
    random_target(tmp_path / "model")
    script(tools / "nvidia-smi", SMI, {})
    lines = [json.dumps({"id": str(n), "token_ids": [1, 2, 3, n]}) for n in range(200)]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{line}\n" for line in lines))
    port, metrics = str(free_port()), str(free_port())
    page = commands("eight-gpus.md").replace("9100", metrics).replace("8642", port)
    page = page.replace("layers: eagle3", "layers: [1, 2]\ncanary: skip\nloss: all")
    said = run(
        tmp_path,
        tools,
        page,
        QUARRY_PORT=port,
        QUARRY_SERVER=f"http://127.0.0.1:{port}",
        QUARRY_UNIT_MAX_SAMPLES="10",
        CUDA_DEVICE_ORDER="PCI_BUS_ID",
    )
    assert re.search(r"^not seen +driver +torch for the CPU", said, re.MULTILINE)
    assert "completed: 200/200 samples" in said
    assert len(re.findall(r"^[0-9a-f]{32}\t.*data folder\t.*capture@", said, re.MULTILINE)) == 2
    assert re.search(r"^quarry_worker_committed_units_total [0-9.]+$", said, re.MULTILINE)


@pytest.mark.slow
def test_a_dataset_grows_each_night(tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. The page's commands, on a Hub of this machine. 2. The night's samples are in the repository."""
    random_target(tmp_path / "model")
    (tmp_path / "conversations").mkdir()
    night = tmp_path / "conversations" / "night.jsonl"
    turns = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]
    night.write_text("".join(json.dumps({"id": str(n), "messages": turns}) + "\n" for n in range(8)))
    os.utime(night, (0, 0))
    port = str(free_port())
    text = (ROOT / "docs" / "nightly.md").read_text()
    (file,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    replaced = {
        "/srv": str(tmp_path),
        "Qwen/Qwen3-8B": str(tmp_path / "model"),
        "my-org": "org",
        "8642": port,
    }
    replaced["layers: eagle3"] = f"layers: [1, 2]\n  canary: skip\n  chat_template: {json.dumps(CHATML)}"
    page = commands("nightly.md").replace(
        "export QUARRY_SOURCE", f"echo {TOKEN} > hub_token\nexport QUARRY_SOURCE"
    )
    for old, new in replaced.items():
        file, page = file.replace(old, new), page.replace(old, new)
    (tmp_path / "nightly.yaml").write_text(file)
    with writable_hub(tmp_path, monkeypatch) as hub:
        said = run(
            tmp_path,
            tools,
            page,
            QUARRY_PORT=port,
            QUARRY_SERVER=f"http://127.0.0.1:{port}",
            QUARRY_MODEL_ROOTS=json.dumps([str(tmp_path)]),
            QUARRY_HUB_ENDPOINT=hub.url,
            HF_HUB_OFFLINE="0",
            HF_HUB_DISABLE_XET="1",
        )
        tree = hub.repo("org/qwen3-8b-states").head.tree
    assert "completed: 8/8 samples" in said
    assert any(path.endswith(".parquet") for path in tree) and "README.md" in tree


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.usefixtures("worker_apart")
def test_a_drafter_from_nothing_to_its_acceptance(tmp_path: Path, tools: Path) -> None:
    """1. The page's commands are run in a folder with a model and prompts, each in its environment.

    2. The diagnosis finds nothing wrong, and the server drafts and accepts.
    """
    shutil.copytree(cached_target(TARGET), tmp_path / "model")
    asked, held_out = split(200, 200)
    lines = [json.dumps({"messages": question(text)}) for text in (*asked, *held_out)]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{line}\n" for line in lines))
    python, port = sys.executable, free_port()
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
    said = run(tmp_path, tools, page)
    length = re.search(r"expected accepted length ([0-9.]+)", said)
    assert length is not None and float(length[1]) > 1.2, said[-8000:]
    assert "nothing wrong was found" in said
    accepted = re.search(r"^vllm:spec_decode_num_accepted_tokens_total\S* ([0-9.]+)", said, re.MULTILINE)
    assert accepted is not None and float(accepted[1]) > 0, said[-8000:]
    assert (tmp_path / "drafter.html").stat().st_size > 10_000
