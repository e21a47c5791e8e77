"""A drafter that is trained on rows while they are captured, over a disk of a tenth of them."""

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

from benchmarks.loop.datasets import QUARRY
from benchmarks.loop.recipe import LAYERS, LoopRecipe
from benchmarks.loop.stage import LOG, QUARRY_ENVIRONMENT, TRAINER_ENVIRONMENT, failed, run
from service.client import Quarry
from service.reader import QuarryDataset

DISK = "disk.json"
"""Of a stage: bytes of one pass, of the budget, and the most that shards took at a time."""
SHARD_BYTES = 2**20
TRAINED_SHARE = 0.9
"""Of the rows: the trainer validates on the others, and so does it of a finished dataset."""
BUDGET_SHARE = 10
CHECKPOINTS = 200
"""Of a training: what is read between two of them must fit in the budget."""
CONSUMER = "loop"
START_TIMEOUT_S, LOOK_S = 60.0, 0.1


def train_live(
    folder: Path, command: Sequence[str | Path], target: Path, dataset: Path, recipe: LoopRecipe, seed: int
) -> None:
    """Train as `command` says on the rows of `dataset`, captured anew for each epoch. Raises LoopFailed."""
    rows = QuarryDataset(dataset)
    trained_on = range(int(len(rows) * TRAINED_SHARE))
    samples = [
        {"id": row.source_id, "token_ids": row.input_ids.tolist(), "loss_mask": row.loss_mask.tolist()}
        for row in map(rows.row, trained_on)
    ]
    num_bytes = sum(manifest.totals.bytes for manifest in rows.manifests.values())
    source = {"kind": "inline", "samples": samples, "repeat": recipe.epochs, "seed": seed}
    job = {
        "model": str(target),
        "dtype": "float32",
        "layers": LAYERS,
        "source": source,
        "on_too_long": "reject",
        "storage": {"retention": "consumed", "shard_bytes": SHARD_BYTES},
    }
    disk = {"pass_bytes": num_bytes, "budget_bytes": num_bytes // BUDGET_SHARE, "peak_bytes": 0}
    data = folder / "service"
    with serving(folder, target, disk["budget_bytes"]) as url, Quarry(url) as quarry, watched(data, disk):
        made = quarry.submit(job)
        live = ["--live", f"{url}/jobs/{made.id}", "--consumer", CONSUMER]
        place = command.index("speculators") + 1
        run([*command[:place], *live, *command[place:]], folder / LOG, TRAINER_ENVIRONMENT)
    (folder / DISK).write_text(json.dumps(disk))


@contextmanager
def serving(folder: Path, target: Path, scratch_bytes: int) -> Iterator[str]:
    """Run `quarry serve` with its worker; yield its address. Raises LoopFailed."""
    environment = {
        "QUARRY_MODEL_ROOTS": json.dumps([str(target.parent)]),
        "QUARRY_SCRATCH_BYTES": str(scratch_bytes),
        "QUARRY_UNITS_IN_FLIGHT": "2",
        "QUARRY_UNITS_IN_PROOF": "1",
    }
    command = [QUARRY, "serve", "--data-dir", folder / "service", "--port", "0"]
    log = folder / "service.log"
    with (
        log.open("wb") as sink,
        subprocess.Popen(
            list(map(str, command)),
            env=os.environ | QUARRY_ENVIRONMENT | environment,
            stdout=sink,
            stderr=sink,
        ) as child,
    ):
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while "startup complete" not in (said := log.read_text()):
                if child.poll() is not None or time.monotonic() > deadline:
                    raise failed("quarry serve", child.poll(), log)
                time.sleep(LOOK_S)
            yield re.findall(r"Uvicorn running on (\S+)", said)[0]
        finally:
            child.terminate()


@contextmanager
def watched(data: Path, disk: dict[str, int]) -> Iterator[None]:
    """Note the most bytes that shards take meanwhile."""
    ended = Event()

    def watch() -> None:
        while not ended.wait(LOOK_S):
            taken = 0
            for folder, _, names in os.walk(data):  # which bears folders that go meanwhile
                for name in names:
                    if name.startswith("train-") and "/index/" not in folder:
                        with suppress(FileNotFoundError):
                            taken += Path(folder, name).stat().st_size
            disk["peak_bytes"] = max(disk["peak_bytes"], taken)

    thread = Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
