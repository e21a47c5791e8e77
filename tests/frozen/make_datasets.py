"""Makes the frozen target and datasets. No test runs it.

    python -m tests.frozen.make_datasets FOLDER [NAME ...]

Those in `target/` and `datasets/` were made so by vLLM's CPU build 0.32.0, with the logits of every row
checked and, for `plain`, the canary. They show that later code reads what earlier code wrote, so they are
made again only where the format gets another version. A new thing that a dataset may hold gets a new folder
beside them.

The model is named `./target`, so the tests run in the folder of this script. `repository` is what the
tests' own Hub holds after two jobs were pushed to one repository by the real client.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from schemas.job import JobState
from tests.support.desk import REPO, TOKEN
from tests.support.fake_hub import FakeHub
from tests.support.hub_state import Token
from tests.support.jobs import Shop, request
from tests.support.real_engine import vllm_shop
from tests.support.tiny_model import random_target

MODEL = Path("target")

PROMPTS: list[dict[str, Any]] = [
    {
        "id": "two turns",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What does heapq do?"},
            {"role": "assistant", "content": "It keeps a list in heap order."},
            {"role": "user", "content": "And bisect?"},
            {"role": "assistant", "content": "It finds places in sorted lists."},
        ],
    },
    {
        "id": "a tool",
        "messages": [
            {"role": "user", "content": "Two plus two?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
            },
            {"role": "tool", "content": "4"},
            {"role": "assistant", "content": "Four."},
        ],
        "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}],
    },
    {"id": "not ASCII: \u00e9\u4e2d", "text": "caf\u00e9 \u4e2d\u6587 \U0001f600 and then some"},
    {"text": "a sample without an id"},
    {"id": "masked ids", "token_ids": list(range(40, 77)), "loss_mask": [n % 3 % 2 for n in range(37)]},
    {"id": "one token", "token_ids": [77]},
    {"id": "a block and one", "token_ids": [200 - n for n in range(17)]},
    {"id": "empty", "text": ""},
    {"id": "unsupervised", "token_ids": [5, 6, 8], "loss_mask": [0, 0, 0]},
]
QUESTIONS = [
    {"id": f"question {number}", "messages": [{"role": "user", "content": "Say more. " * (number * 2 + 1)}]}
    for number in range(4)
]

JOBS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "plain": (PROMPTS, {"canary": "run"}),
    "planes": (PROMPTS, {"storage": {"shard_bytes": 65_536, "compression": "planes"}}),
    "fp8": (PROMPTS, {"storage": {"shard_bytes": 65_536, "compression": "fp8"}}),
    "answers": (QUESTIONS, {"generate": {"max_tokens": 9, "capture": "one_pass"}}),
}
"""The datasets of one job by name: samples, and what the request says beside them."""


PUSHED = {
    "first": PROMPTS[2:7],
    "second": [{"id": f"second {n}", "text": f"Sample {n} of a second job."} for n in range(3)],
}
"""The jobs of `repository`, and their samples."""


def main(out: Path, names: list[str]) -> None:
    """Make `target/`, if it is missing, and the datasets named, or all, in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    os.chdir(out)
    if not MODEL.exists():
        recipe: dict[str, Any] = {"arch": "qwen3", "layers": 4, "hidden": 64, "vocab": 320}
        random_target(MODEL, **recipe, max_position=512)
    with tempfile.TemporaryDirectory() as scratch, FakeHub(cas=Path(scratch) / "cas") as hub:
        hub.add_token(TOKEN, Token("me", orgs={"org": "write"}))
        told = {"hub_endpoint": hub.url, "hub_token": TOKEN}
        shop = vllm_shop(Path(scratch), MODEL.absolute(), unit_max_samples=4, **told)
        for name in names or (*JOBS, "repository"):
            if name in JOBS:
                shutil.copytree(made(shop, name, *JOBS[name]), Path("datasets") / name)
                continue
            for pushed, samples in PUSHED.items():
                hub.know_xet(made(shop, pushed, samples, {"hub": {"repo_id": REPO, "private": False}}))
            for path, blob in hub.repo(REPO).head.tree.items():
                if path != ".gitattributes":
                    file = Path("datasets") / name / path
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(hub._content(blob))
        shop.store.close()


def made(shop: Shop, name: str, samples: list[dict[str, Any]], changes: dict[str, Any]) -> Path:
    """Run a job to its end and return its dataset's folder."""
    body = request(
        Path(), samples, **({"model": f"./{MODEL}", "layers": [1, 2, 3], "max_tokens": 200} | changes)
    )
    job = shop.run(body, name)
    assert job.state is JobState.COMPLETED, job.problem
    return shop.settings.dataset_dir(job.id)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
