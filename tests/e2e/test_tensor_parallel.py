"""Two tensor-parallel ranks on vLLM's CPU build share the rows of a unit, and every row is right."""

import pytest

from schemas.job import JobState
from service.proof.reference import reference_states
from service.proof.shard_reader import ShardReader
from service.proof.verify import verify_dataset
from tests.support.jobs import Shop, request
from tests.support.plans import random_ids
from tests.support.tiny_model import random_target

LAYERS = (2, 4, 8)
TOLERANCE = 2e-5


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_two_ranks_share_the_rows_and_every_row_is_right(tmp_path, monkeypatch):
    # Two ranks need a core each; the build's own choice leaves one core to something else.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    target = random_target(
        tmp_path / "models" / "llama", arch="llama", layers=8, hidden=128, dtype="float32", max_position=512
    )
    shop = Shop.open(
        tmp_path,
        target,
        engine="service.capture.vllm_engine:VllmEngine",
        engine_options={"enforce_eager": True, "max_num_batched_tokens": 256},
        tensor_parallel_size=2,
        logit_share=1.0,
    )
    samples = random_ids([1, 15, 16, 17, 127, 128, 129, 300, 511], vocab_size=1500)
    body = request(
        target,
        [{"id": str(row), "token_ids": ids} for row, ids in enumerate(samples)],
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
    shards = sorted((folder / "data" / job.id).glob("*.parquet"))
    assert [shard.name[-11:] for shard in shards] == ["-r0.parquet", "-r1.parquet"]
    truth = reference_states(target, samples, "float32", max_bytes=None, timeout_s=300)
    rows_of = []
    for shard in shards:
        with ShardReader(shard) as reader:
            rows = [int(str(light.source_id)) for light in reader.light]
            rows_of.append(sorted(rows))
            for place, row in enumerate(rows):
                for k in LAYERS:
                    error = (reader.layer(place, k) - truth[row][k]).norm(dim=1) / truth[row][k].norm(dim=1)
                    assert float(error.max()) <= TOLERANCE
    assert rows_of == [[0, 2, 4, 6, 8], [1, 3, 5, 7]]
