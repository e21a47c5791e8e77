"""Trainers follow a job while they, their loaders, the service and its workers are killed: each row once."""

import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from schemas.job import JobState
from service.reader import Eagle3, QuarryDataset
from service.store import Store, jobs, migration
from tests.crash.conftest import MODE
from tests.crash.oracle import make_target, service
from tests.crash.processes import PATIENCE_S, disturb, services
from tests.crash.trainer import Trainer
from tests.support.jobs import conversations, request
from tests.support.waiting import wait_until

RANKS, NUM_SAMPLES = 2, 201


@pytest.mark.crash
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_kills_of_trainers_and_workers_lose_and_double_no_row(tmp_path: Path, tally: Counter[str]) -> None:
    """Two ranks with two loader workers each. Of an odd number of rows the last is left out."""
    target = make_target(tmp_path)
    settings = service(tmp_path / "data", target, unit_attempts=100)
    body = request(
        target, conversations(NUM_SAMPLES, longest=20), layers=(1, 2), storage={"shard_bytes": 98_304}
    )
    posted = body.model_dump(mode="json")
    settings.data_dir.mkdir()
    store = Store(settings.database())
    store.write(migration.migrate)
    with ExitStack() as stack:
        stack.callback(store.close)
        made = stack.enter_context(services(settings, 1))
        made[0].start_if_dead()
        ids: list[str | None] = [None]

        def is_posted() -> bool:
            ids[0] = made[0].post(posted)
            return ids[0] is not None

        wait_until(is_posted, patience_s=PATIENCE_S)
        job_id = str(ids[0])
        trainers = [Trainer(tmp_path, made[0].url, job_id, rank, RANKS) for rank in range(RANKS)]
        over = threading.Event()

        def keep_up() -> None:
            while not over.wait(0.1) and not all([trainer.ended() for trainer in trainers]):
                pass

        keeping = threading.Thread(target=keep_up)
        keeping.start()
        for trainer in trainers:
            stack.callback(trainer.kill)
        stack.callback(keeping.join)
        stack.callback(over.set)
        disturbances = {f"trainer {rank}": one.kill for rank, one in enumerate(trainers)}
        disturbances |= {f"loader {rank}": one.kill_worker for rank, one in enumerate(trainers)}
        disturb(made, store, posted, disturbances, 20 if MODE == "all" else 10, None, tally)
        assert store.read(jobs.state, job_id) is JobState.COMPLETED
        tally["rows taken before the end"] += sum(len(trainer.taken()) for trainer in trainers)

        def caught_up() -> bool:
            made[0].start_if_dead()
            return not keeping.is_alive()

        wait_until(caught_up, patience_s=PATIENCE_S)
    shares = [trainer.taken() for trainer in trainers]
    every = [view["input_ids"].tolist() for view in QuarryDataset(settings.dataset_dir(job_id), Eagle3())]
    assert [len(share) for share in shares] == [NUM_SAMPLES // RANKS] * RANKS
    taken = Counter(map(tuple, [*shares[0], *shares[1]]))
    assert taken <= Counter(map(tuple, every))
