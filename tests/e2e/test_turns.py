"""Conversations that the target answers turn by turn, on vLLM: states and supervised tokens are its own."""

from itertools import groupby
from pathlib import Path

import pytest
import torch

from schemas.job import JobState
from service.proof.verify import verify_dataset
from service.store import commits, jobs
from tests.support import templates
from tests.support.device import ON_CUDA
from tests.support.jobs import request
from tests.support.real_engine import StoredRow, assert_states, stored_rows, vllm_shop
from tests.support.tiny_model import random_target

LAYERS = (2, 4, 5, 8)
SAMPLES = [
    {
        "id": f"talk-{number}",
        "messages": [
            {"role": "system", "content": "Be brief. " * number},
            {"role": "user", "content": "Say more. " * (number * 3 + 1)},
            {"role": "assistant", "content": "The source says this."},
            {"role": "user", "content": "And then?"},
            {"role": "assistant", "content": "And this."},
            {"role": "user", "content": "And at last?"},
        ],
    }
    for number in range(8)
]
TRIMMED = templates.LLAMA3.replace("<|eot_id|>", "<|im_end|>")
"""Each turn is a row, since it changes answers."""
JOBS = {
    "one pass": {"capture": "one_pass"},
    "prefilled": {"capture": "second_prefill"},
    "mixed": {
        "mix": [
            {"name": "short", "weight": 1, "max_tokens": 5},
            {"name": "long", "weight": 1, "max_tokens": 40},
        ]
    },
    "repeats": {"repeats": {"pattern": 16, "times": 2}, "endings": {"repeats": "keep"}, "max_tokens": 60},
    "a row a turn": {},
}


if ON_CUDA:  # vLLM's CPU build cannot draw
    JOBS["drawn"] = {"mix": [{"name": str(hot), "weight": 1, "temperature": hot} for hot in (0.5, 1.0)]}


def supervised(row: StoredRow) -> list[int]:
    return [sum(run) for flag, run in ((flag, list(run)) for flag, run in groupby(row.mask)) if flag]


@pytest.mark.engine
def test_every_turn_is_the_targets_and_every_state_its_own(tmp_path: Path) -> None:
    """1. Five jobs ask the same questions. 2. Each answer is the model's after what is before it."""
    from transformers import AutoModelForCausalLM

    target = random_target(tmp_path / "models" / "qwen3", dtype="float32", max_position=512)
    shop = vllm_shop(tmp_path, target)
    job_ids = {}
    for name, told in JOBS.items():
        template = {"chat_template": TRIMMED} if name == "a row a turn" else {}
        asked = {"turns": "all", "max_tokens": 20} | told
        job_ids[name] = shop.submit(
            request(target, SAMPLES, generate=asked, max_tokens=480, **template), name
        )
    shop.plan()
    shop.capture(job_ids["a row a turn"])
    shop.publish()
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    found = {}
    for name, job_id in job_ids.items():
        job = shop.store.read(jobs.job, job_id)
        assert job.state is JobState.COMPLETED, (name, job.problem)
        found[name] = stored_rows(shop.settings.dataset_dir(job_id), job_id, LAYERS)
        assert_states(found[name], target)
        report = verify_dataset(shop.settings.dataset_dir(job_id))
        assert report.ok, str(report)
        for row in found[name].values():
            with torch.inference_mode():
                said = model(torch.tensor([row.ids])).logits[0].argmax(dim=-1).tolist()
            if name == "drawn":
                continue
            places = [place for place, flag in enumerate(row.mask) if flag]
            assert [said[place - 1] for place in places] == [row.ids[place] for place in places]
    counts = {
        name: [unit.checks.answers for unit in shop.store.read(commits.unit_commits, job_id)]
        for name, job_id in job_ids.items()
    }
    print(counts)
    rejected = [reject.reason for reject in shop.store.read(commits.rejects, job_ids["a row a turn"])]
    shop.store.close()
    assert {len(rows) for name, rows in found.items() if name != "a row a turn"} == {len(SAMPLES)}
    assert (rejected, len(found["a row a turn"])) == ([], 3 * len(SAMPLES))
    for name, row in found["prefilled"].items():
        assert len(supervised(row)) == 3
        other = found["one pass"][name]
        assert (other.ids, other.mask) == (row.ids[:-1], row.mask[:-1])
    assert {len(supervised(row)) for row in found["a row a turn"].values()} == {1}
    assert {max(supervised(row)) for row in found["mixed"].values()} <= {*range(1, 6), *range(6, 41)}
    assert any(max(supervised(row)) > 5 for row in found["mixed"].values())
    assert any("repeats itself" in answers for answers in counts["repeats"])
