"""Answers by the target itself, on vLLM: however they are asked for, their states are the model's."""

import logging
from pathlib import Path
from typing import Any

import pytest

from schemas.job import JobState
from service.store import jobs
from tests.support.device import ON_CUDA
from tests.support.jobs import request
from tests.support.real_engine import assert_states, stored_rows, vllm_shop
from tests.support.tiny_model import random_target

LAYERS = (2, 4, 5, 8)
MAX_ANSWER = 24
SAMPLES = [
    {"id": str(number), "messages": [{"role": "user", "content": "Say more. " * (number * 9 + 1)}]}
    for number in range(10)
]


def a_word_of_the_answer(target: Path, sample: dict[str, Any]) -> str:
    """Return a word that the model's greedy answer holds behind its first tokens, by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    asked = tokenizer.apply_chat_template(
        sample["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model = AutoModelForCausalLM.from_pretrained(target)
    (said,) = model.generate(**asked, max_new_tokens=MAX_ANSWER, do_sample=False)
    words = [tokenizer.decode([token]).strip() for token in said[asked["input_ids"].shape[1] + 4 : -4]]
    return next(word for word in words if word.isalpha() and len(word) > 2)


@pytest.mark.engine
def test_answers_are_captured_right_in_one_pass_and_by_a_second_prefill(tmp_path, caplog):
    """1. Four jobs ask the same questions: at a temperature, greedily in both ways, and with a stop string.

    2. One engine serves all. 3. The first fails by name where the build cannot draw: on a CPU. 4. The greedy
    answers agree. 5. The second prefill also holds the last sampled token. 6. A stop string ends an answer
    early. 7. Every state is the model's.
    """
    caplog.set_level(logging.INFO, "service.capture.loop")
    target = random_target(tmp_path / "models" / "qwen3", dtype="float32", max_position=512)
    shop = vllm_shop(tmp_path, target)
    stop = a_word_of_the_answer(target, SAMPLES[0])
    asked: dict[str, dict[str, Any]] = {
        "drawn": {"temperature": 0.8},
        "one_pass": {"capture": "one_pass"},
        "second_prefill": {"capture": "second_prefill"},
        "stopped": {"stop": [stop]},
    }
    job_ids = {
        name: shop.submit(
            request(target, SAMPLES, generate={"max_tokens": MAX_ANSWER} | told, max_tokens=400), name
        )
        for name, told in asked.items()
    }
    shop.plan()
    shop.capture(job_ids["stopped"])
    shop.publish()
    if not ON_CUDA:
        drawn = shop.store.read(jobs.job, job_ids.pop("drawn"))
        assert drawn.state is JobState.FAILED
        assert drawn.problem is not None and drawn.problem.field == "generate.temperature"
    rows = {}
    for name, job_id in job_ids.items():
        job = shop.store.read(jobs.job, job_id)
        assert job.state is JobState.COMPLETED, job.problem
        rows[name] = stored_rows(shop.settings.dataset_dir(job_id), job_id, LAYERS)
        assert rows[name].keys() == {sample["id"] for sample in SAMPLES}
        assert_states(rows[name], target)
    shop.store.close()
    assert sum("starting the engine" in record.getMessage() for record in caplog.records) == 1
    for number, row in rows["one_pass"].items():
        other, stopped = rows["second_prefill"][number], rows["stopped"][number]
        assert (row.prompt_tokens, row.ids) == (other.prompt_tokens, other.ids[:-1])
        assert row.mask == [0] * row.prompt_tokens + [1] * (len(row.ids) - row.prompt_tokens)
        assert other.mask == [*row.mask, 1]
        assert stopped.ids == other.ids[: len(stopped.ids)]
    assert len(rows["stopped"]["0"].ids) < len(rows["second_prefill"]["0"].ids)
