"""What Quarry makes of a target: rows of prompts with the target's own answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.job import JobState
from service.reader import QuarryDataset
from service.reader.row import Row
from tests.architectures.recipe import MAX_POSITION
from tests.support.jobs import request
from tests.support.plans import random_ids
from tests.support.real_engine import by_id, vllm_shop

CHUNK, BLOCK = 256, 128
LENGTHS = [1, 2, 17, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK + 1, CHUNK + BLOCK]
"""Around a block of the cache; served at once, so they are chunked and mixed."""
STORED_ANSWER = 12
PROMPTS = random_ids(LENGTHS, vocab_size=500, seed=5)


@dataclass(frozen=True, slots=True)
class Stored:
    """A target and its dataset's rows by prompt."""

    target: Path
    rows: Mapping[int, Row]


def stored(folder: Path, target: Path, layers: tuple[int, ...], **engine_options: Any) -> Stored:
    """Run a job on vLLM in which the target answers every prompt greedily, and read its rows."""
    shop = vllm_shop(folder, target, engine_options={"max_num_batched_tokens": CHUNK} | engine_options)
    body = request(
        target,
        by_id(PROMPTS),
        layers=layers,
        max_tokens=MAX_POSITION - 1,
        generate={"max_tokens": STORED_ANSWER},
    )
    try:
        job = shop.run(body)
    finally:
        shop.store.close()
    assert job.state is JobState.COMPLETED, job.problem
    dataset = QuarryDataset(shop.settings.dataset_dir(job.id))
    rows = [dataset.row(number) for number in range(len(dataset))]
    return Stored(target, {int(str(row.source_id)): row for row in rows})
