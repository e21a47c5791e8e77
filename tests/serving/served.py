"""Serves prompts with a drafter and records what the drafter is fed: vLLM in a process of its own.

Run as a program it does the work; imported, it starts that program.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from connector.plugin import CAPTURES

ROOT = Path(__file__).parents[2]
RECORDER = "tests.serving.recorder.Recorder"
ENVIRONMENT = {CAPTURES: "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 8,
    "skip_tokenizer_init": True,
}


class Refused(RuntimeError):
    """The engine does not run this; the message is the last of what it said."""


@dataclass(frozen=True, slots=True)
class Served:
    """What came of an order.

    `proposer` and `drafter` are classes' names; `answers` are the sampled ids by prompt; `passes` is what
    `Tap` recorded.
    """

    proposer: str
    drafter: str
    answers: list[list[int]]
    passes: list[dict[str, Any]]


def serve(
    folder: Path,
    target: Path,
    prompts: Sequence[Sequence[int]],
    speculative: Mapping[str, Any],
    *,
    max_tokens: int,
    **engine: Any,
) -> Served:
    """Serve all prompts at once, greedily. Raises Refused if the engine fails."""
    folder.mkdir(parents=True)
    order = {
        "model": str(target),
        "prompts": [list(ids) for ids in prompts],
        "max_tokens": max_tokens,
        "engine": {"worker_extension_cls": RECORDER} | ENGINE | engine,
        "speculative": dict(speculative),
        "recording": str(folder / "recording.pt"),
        "answers": str(folder / "answers.json"),
    }
    (folder / "order.json").write_text(json.dumps(order))
    done = subprocess.run(
        [sys.executable, "-m", "tests.serving.served", str(folder / "order.json")],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    if done.returncode != 0:
        (folder / "said.txt").write_text(done.stdout + done.stderr)
        raise Refused(_last_error(done.stderr))
    said = json.loads((folder / "answers.json").read_text())
    passes = torch.load(folder / "recording.pt", weights_only=True)
    return Served(*said["classes"].split(), said["answers"], passes)


def _last_error(said: str) -> str:
    errors = re.findall(r"^(?:\[rank0\]: )?([\w.]*(?:Error|Exception)\b.*)$", said, re.MULTILINE)
    return str(errors[-1]) if errors else said[-2000:]


def main(path: str) -> None:
    """Carry out an order."""
    from vllm import LLM, SamplingParams, TokensPrompt

    order = json.loads(Path(path).read_text())
    llm = LLM(model=order["model"], speculative_config=order["speculative"], **order["engine"])
    (classes,) = llm.collective_rpc("start_recording")
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=ids) for ids in order["prompts"]],
        SamplingParams(temperature=0.0, max_tokens=order["max_tokens"], detokenize=False),
        use_tqdm=False,
    )
    llm.collective_rpc("save_recording", args=(order["recording"],))
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    Path(order["answers"]).write_text(json.dumps({"classes": classes, "answers": answers}))


if __name__ == "__main__":
    main(sys.argv[1])
