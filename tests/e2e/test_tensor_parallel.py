"""Two tensor-parallel ranks on vLLM's CPU build share the rows of a unit, and every row is right."""

from pathlib import Path

import pytest

from schemas.job import JobState
from service.proof.verify import verify_dataset
from tests.support.jobs import request
from tests.support.plans import random_ids
from tests.support.real_engine import assert_states, by_id, meter, stored_rows, vllm_shop
from tests.support.tiny_model import random_target

LAYERS = (2, 4, 8)
pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def a_core_for_each_rank(monkeypatch):
    """The build's own choice leaves one core to something else."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def target_in(folder: Path) -> Path:
    return random_target(folder / "llama", arch="llama", dtype="float32", max_position=512)


def test_two_ranks_share_the_rows_and_every_row_is_right(tmp_path):
    target = target_in(tmp_path / "models")
    shop = vllm_shop(tmp_path, target, tensor_parallel_size=2)
    samples = random_ids([1, 15, 16, 17, 127, 128, 129, 300, 511], vocab_size=1500)
    body = request(
        target,
        by_id(samples),
        layers=LAYERS[:-1],
        canary="run",
        storage={"shard_bytes": 4_194_304},
    )
    job = shop.run(body)
    shop.store.close()
    assert job.state is JobState.COMPLETED, job.problem
    folder = shop.settings.dataset_dir(job.id)
    report = verify_dataset(folder, model_folder=target)
    assert report.ok, report.findings
    rows = stored_rows(folder, job.id, LAYERS)
    assert {name: row.ids for name, row in rows.items()} == {str(n): ids for n, ids in enumerate(samples)}
    assert_states(rows, target)
    shards = {name: row.shard[-11:] for name, row in rows.items()}
    assert shards == {str(n): f"-r{n % 2}.parquet" for n in range(len(samples))}


@pytest.mark.long
def test_rows_of_preempted_requests_are_right_on_both_ranks(tmp_path):
    target = target_in(tmp_path / "models")
    tiny = {"block_size": 32, "num_gpu_blocks_override": 26, "max_num_seqs": 8, "disable_log_stats": False}
    shop = vllm_shop(tmp_path, target, engine_options=tiny, tensor_parallel_size=2)
    told = {"max_tokens": 120, "capture": "one_pass"}
    body = request(
        target,
        by_id(random_ids([60] * 12, vocab_size=1500)),
        generate=told,
        layers=LAYERS[:-1],
        storage={"shard_bytes": 8_388_608},
    )
    job = shop.run(body)
    shop.store.close()
    assert job.state is JobState.COMPLETED, job.problem
    assert meter("num_preemptions") > 0
    rows = stored_rows(shop.settings.dataset_dir(job.id), job.id, LAYERS)
    assert len(rows) == 12
    assert_states(rows, target)
