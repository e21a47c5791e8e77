"""Answers by the target itself, on vLLM: both ways of capturing them hold the model's states."""

import logging
from pathlib import Path

import pytest

from schemas.job import JobState
from schemas.request import Generate
from service.proof.reference import reference_states
from service.proof.shard_reader import ShardReader
from tests.support.jobs import Shop, request
from tests.support.tiny_model import random_target

LAYERS = (2, 4, 5, 8)
TOLERANCE = 2e-5
MAX_ANSWER = 24


def stored(folder: Path, job_id: str) -> dict[str, tuple[int, list[int], list[int], dict[int, object]]]:
    """Return by source id: prompt tokens, token ids, mask, states [T, H] of every layer."""
    found = {}
    for shard in sorted((folder / "data" / job_id).glob("*.parquet")):
        with ShardReader(shard) as reader:
            for row, light in enumerate(reader.light):
                layers = {k: reader.layer(row, k) for k in LAYERS}
                about = (light.prompt_tokens, light.input_ids.tolist(), light.loss_mask.tolist(), layers)
                found[str(light.source_id)] = about
    return found


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_answers_are_captured_right_in_one_pass_and_by_a_second_prefill(tmp_path, caplog):
    """1. Two jobs ask the same questions. 2. One engine serves both. 3. Their greedy answers agree.

    4. The second prefill also holds the last sampled token. 5. Every state is the model's.
    """
    caplog.set_level(logging.INFO, "service.capture.loop")
    target = random_target(
        tmp_path / "models" / "qwen3", arch="qwen3", layers=8, hidden=128, dtype="float32", max_position=512
    )
    shop = Shop.open(
        tmp_path,
        target,
        engine="service.capture.vllm_engine:VllmEngine",
        engine_options={"enforce_eager": True, "max_num_batched_tokens": 256},
        logit_share=1.0,
    )
    samples = [
        {"id": str(number), "messages": [{"role": "user", "content": "Say more. " * (number * 9 + 1)}]}
        for number in range(10)
    ]
    jobs = {}
    for capture in ("one_pass", "second_prefill"):
        told = Generate(max_tokens=MAX_ANSWER, capture=capture, stop=("never said",)).model_dump()
        body = request(target, samples, generate=told, max_tokens=400)
        jobs[capture] = shop.submit(body, capture)
    shop.plan()
    shop.capture(jobs["second_prefill"])
    shop.publish()
    rows = {}
    for capture, job_id in jobs.items():
        job = shop.store.job(job_id)
        assert job.state is JobState.COMPLETED, job.problem
        rows[capture] = stored(shop.settings.dataset_dir(job_id), job_id)
        assert rows[capture].keys() == {str(number) for number in range(10)}
    shop.store.close()
    assert sum("starting the engine" in record.getMessage() for record in caplog.records) == 1
    for number, (prompt, ids, mask, _) in rows["one_pass"].items():
        other_prompt, other_ids, other_mask, _ = rows["second_prefill"][number]
        assert (prompt, ids) == (other_prompt, other_ids[:-1])
        assert mask == [0] * prompt + [1] * (len(ids) - prompt)
        assert other_mask == [*mask, 1]
    for found in rows.values():
        prompts = [ids for _, ids, _, _ in found.values()]
        truth = reference_states(target, prompts, "float32", max_bytes=None, timeout_s=300)
        for (_, _, _, layers), layers_of in zip(found.values(), truth, strict=True):
            for k in LAYERS:
                error = (layers[k] - layers_of[k]).norm(dim=1) / layers_of[k].norm(dim=1)
                assert float(error.max()) <= TOLERANCE
