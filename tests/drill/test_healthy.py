"""No false alarm on healthy rows; `python -m tests.architectures.healthy` is the long form, on vLLM."""

import pytest

from schemas.job import JobState
from service.proof.verify import verify_dataset
from service.store import commits
from tests.drill.harness import LAYERS
from tests.support import planted_connector
from tests.support.jobs import Shop, request
from tests.support.plans import random_ids
from tests.support.tiny_model import random_target

pytestmark = pytest.mark.slow

NUM_SAMPLES = 300


@pytest.mark.parametrize("compression", ["none", "fp8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_three_hundred_healthy_rows_raise_no_alarm(tmp_path, monkeypatch, dtype, compression):
    """Short and long rows, rows that begin alike, rows that say the same again; every row's logits."""
    monkeypatch.setenv(planted_connector.ORDER, str(tmp_path / "nothing.json"))
    target = random_target(
        tmp_path / "models" / "target", arch="llama", hidden=64, dtype=dtype, max_position=512
    )
    shop = Shop.open(tmp_path, target, engine="tests.drill.harness:PlantedEngine")
    rows = random_ids([1 + number * 7 % 60 for number in range(NUM_SAMPLES)], vocab_size=1500)
    rows[100:150] = [rows[0] + rows[99] + row for row in rows[100:150]]
    rows[200:220] = [row + row for row in rows[200:220]]
    rows[220:240] = [[7] * (number + 1) for number in range(20)]
    samples = [{"id": f"s{number}", "token_ids": ids} for number, ids in enumerate(rows)]
    job = shop.run(request(target, samples, layers=LAYERS[:-1], storage={"compression": compression}))
    assert job.state is JobState.COMPLETED, job.problem
    assert shop.store.read(commits.rejects, job.id) == []
    report = verify_dataset(shop.settings.dataset_dir(job.id), model_folder=target)
    assert report.ok, str(report)
    assert report.logit_rows == NUM_SAMPLES
    shop.store.close()
