"""speculators' own training command takes the rows of a dataset where they are."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from benchmarks.dataset import LAYER_IDS, Shape, write_dataset
from schemas.job import JobState
from service.export.options import Algorithm
from service.export.run import export
from tests.contract.export.conftest import files_of, wanted
from tests.contract.reader.conftest import finished
from tests.support.fake_hub import FakeHub
from tests.support.file_plants import flip_bit, page
from tests.support.jobs import Shop, conversations, request
from tests.support.trainers import environment, loaded_by

pytestmark = pytest.mark.slow

COMPARED = """
import json, pickle, sys
from argparse import Namespace
import torch
from torch.utils.data import DataLoader
from service.trainers.speculators import train
from hs_connectors import HiddenStatesBackend
from speculators.train import cli
from speculators.train.data import ArrowDataset

def bits(row):
    return {name: (t.dtype, t.shape, t.contiguous().view(torch.uint8)) for name, t in row.items()}

def equal(row, other):
    row, other = bits(row), bits(other)
    return row.keys() == other.keys() and all(
        row[name][:2] == other[name][:2] and torch.equal(row[name][2], other[name][2]) for name in row)

def compare(config):
    settled = config.flatten()
    args, ids = Namespace(**settled), settled["data_path"]
    transfer = HiddenStatesBackend.registry[args.hidden_states_backend].from_train_args(args, ids)
    mine = ArrowDataset(max_len=512, datapath=ids, transfer=transfer, on_missing=args.on_missing)
    theirs = ArrowDataset(max_len=512, datapath=exported, on_missing="raise")
    assert mine.approx_lengths == theirs.approx_lengths
    numbers = range(len(theirs))
    cached = sum(equal(transfer.get_cached(n), theirs.transfer.get_cached(n)) for n in numbers)
    loaded = sum(equal(mine[n], theirs[n]) for n in numbers)
    again = pickle.loads(pickle.dumps(transfer))
    pickled = sum(equal(again.get_cached(n), theirs.transfer.get_cached(n)) for n in numbers)
    found.append({"rows": len(theirs), "cached": cached, "loaded": loaded, "pickled": pickled, "config": {
        name: settled[name] for name in ("verifier_name_or_path", "target_layer_ids", "on_missing")}})
    if len(found) == 1:
        workers = DataLoader(mine, batch_size=None, num_workers=2, multiprocessing_context="spawn")
        found[0]["worked"] = sum(equal(row, theirs[n]) for n, row in enumerate(workers))

cases, result = json.loads(sys.argv[1]), sys.argv[2]
cli.main, found = compare, []
if __name__ == "__main__":
    for dataset, exported, options in cases:
        train(dataset, options)
    torch.save(found, result)
"""


def compared(*cases: tuple[str, Path, list[str]], folder: Path) -> list[dict[str, Any]]:
    """Compare the rows of datasets, each with speculators' own backend on its export and with options.

    Those of the first dataset are read by spawned loader workers as well.
    """
    given = json.dumps([(dataset, str(exported), options) for dataset, exported, options in cases])
    every = loaded_by(COMPARED, given, result=folder / "result.pt")
    for found in every:
        assert found["cached"] == found["loaded"] == found["pickled"] == found["rows"]
    assert every[0]["worked"] == every[0]["rows"]
    return every


def unweighted(target: Path, folder: Path) -> str:
    """Copy a target's config alone: made-up states are no model's."""
    (folder / "config").mkdir()
    shutil.copy(target / "config.json", folder / "config")
    return str(folder / "config")


CASES = {"eagle3": None, "dflash": (2, 5), "mtp": None}
"""Kinds of drafters, and the layers to give; all of them if null."""


def test_every_row_is_the_exports_bit_by_bit(dataset, target, tmp_path):
    cases, config = [], {"verifier_name_or_path": str(target), "on_missing": "raise"}
    for algorithm, layers in CASES.items():
        options = wanted("speculators", algorithm=Algorithm(algorithm), layers=layers)
        export(str(dataset), tmp_path / algorithm, options)
        words = ["--target-layer-ids", *map(str, reversed(layers))] if layers else []
        words += ["--data-path", str(tmp_path / "ids")]
        cases.append((str(dataset), tmp_path / algorithm, ["--speculator-type", algorithm, *words]))
    for compression in ("planes", "fp8"):
        packed = finished(tmp_path / f"shop-{compression}", target, storage={"compression": compression})
        export(str(packed), tmp_path / compression, wanted("speculators"))
        cases.append((str(packed), tmp_path / compression, []))
    large = tmp_path / "large"  # enough for its layers to be mapped as one tensor
    write_dataset(large, tmp_path / "scratch", Shape(2, shortest=256, longest=300, hidden_size=2048))
    export(str(large), tmp_path / "exported", wanted("speculators"))
    cases.append(
        (str(large), tmp_path / "exported", ["--verifier-name-or-path", unweighted(target, tmp_path)])
    )
    every = compared(*cases, folder=tmp_path)
    assert [found["config"] for found in every[:5]] == [
        config | {"target_layer_ids": ids} for ids in ([2, 4, 5], [5, 2], *[[2, 4, 5]] * 3)
    ]


def test_rows_are_read_from_a_repository(dataset, tmp_path, monkeypatch):
    export(str(dataset), tmp_path / "out", wanted("speculators"))
    with FakeHub() as hub:
        hub.add_repo("org/states", files_of(dataset))
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        compared(("hf://datasets/org/states", tmp_path / "out", []), folder=tmp_path)
    kept = [path for path in (tmp_path / "hf").rglob("*") if path.is_file()]
    assert not any(path.stat().st_size > 100_000 for path in kept)


READ = """
import sys, torch
from argparse import Namespace
import service.trainers.speculators  # before speculators' own configuration
from hs_connectors import HiddenStatesBackend
from service.cli import main
from service.reader import ReaderError
from speculators.train import cli

def read(config):
    args = Namespace(**config.flatten())
    transfer = HiddenStatesBackend.registry["quarry"].from_train_args(args, args.data_path)
    faults = []
    for number in range(2):
        try:
            transfer.get_cached(number)
        except ReaderError as error:
            faults.append([number, str(error)])
    torch.save(faults, sys.argv[-1])

cli.main = read
main(["train", "speculators", *sys.argv[1:-1]])
"""


def test_layers_are_held_against_their_checksums_where_that_is_asked_for(target, tmp_path):
    """Also those of a row that is mapped otherwise."""
    write_dataset(tmp_path / "large", tmp_path, Shape(2, shortest=256, longest=300, hidden_size=2048))
    shard = min((tmp_path / "large").glob("data/*/*.parquet"))
    flip_bit(shard, page(shard, 0, f"layer_{LAYER_IDS[0]}")[1] - 2)
    words = [str(tmp_path / "large"), "--verifier-name-or-path", unweighted(target, tmp_path)]
    result = tmp_path / "result.pt"
    [(number, fault)] = loaded_by(READ, "--check", *words, result=result)
    assert number == 0 and f"{shard.name}: row 0: layer {LAYER_IDS[0]}: its bytes have" in fault
    assert loaded_by(READ, *words, result=result) == []


TRAINED = """
import os, sys, torch
os.environ["TORCHDYNAMO_DISABLE"] = "1"
import service.trainers.speculators  # before speculators' own configuration
from benchmarks.loop.trainer_on_cpu import on_cpu
from service.cli import main
from speculators.train import cli, distributed

def on_gloo():
    # Its own set-up asks for an accelerator.
    torch.distributed.init_process_group("gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    vars(distributed).update(_is_distributed=True, _rank=rank, _world_size=ranks)
    distributed._init_sp_process_groups(rank, ranks, 1)

if __name__ == "__main__":
    on_cpu()
    if "LOCAL_RANK" in os.environ:
        cli.maybe_setup_distributed = on_gloo
    if sys.argv[1] == "quarry":
        main(sys.argv[2:])
    from speculators.cli import app
    app(sys.argv[2:])
"""

ON_CPU = [
    *("--draft-attn-impl", "sdpa", "--loss-implementation", "eager", "--hidden-states-dtype", "float32"),
    *("--draft-vocab-size", "60", "--total-seq-len", "256", "--lr", "3e-3", "--log-freq", "1"),
]


@pytest.fixture(scope="module")
def with_rejects(tmp_path_factory, real) -> Path:
    """Return a dataset of 12 rows, of a job of 14: two are too long."""
    shop = Shop.open(
        tmp_path_factory.mktemp("rejects"), real, engine="tests.support.model_engine:ModelEngine"
    )
    try:
        long = [{"id": f"long{number}", "text": f"{number} things. " * 200} for number in range(2)]
        source = [long[0], *conversations(12, longest=5), long[1]]
        job = shop.run(request(real, source, loss="all", max_tokens=200, on_too_long="reject"))
        assert job.state is JobState.COMPLETED, job.problem
        assert job.progress.samples_rejected == 2
        return shop.settings.dataset_dir(job.id)
    finally:
        shop.store.close()


def trained(folder: Path, *words: str, ranks: int) -> Path:
    """Run a command on a CPU, by torchrun if there are several ranks; return the last drafter's folder."""
    script = folder / "train_on_cpu.py"
    script.write_text(TRAINED)
    out = folder / words[0]
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launch, str(script), *words, *ON_CPU, "--save-path", str(out)]
    quiet = environment() | {"PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=folder, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out / "1"


@pytest.mark.parametrize(("ranks", "workers"), [pytest.param(1, "1", marks=pytest.mark.long), (2, "0")])
def test_its_command_makes_the_drafter_that_it_makes_of_an_export(
    with_rejects, real, tmp_path, ranks, workers
):
    """By its own file backend; on one rank in a spawned loader worker, on two under torchrun.

    1. Of 14 samples 12 were written.
    2. The ids and the export hold these 12.
    3. Both drafters have the same weights.
    """
    export(str(with_rejects), tmp_path / "exported", wanted("speculators"))
    ids, options = tmp_path / "ids", ["--num-workers", workers, "--epochs", "2"]
    ours = trained(
        *(tmp_path, "quarry", "train", "speculators", str(with_rejects), *options, "--data-path", str(ids)),
        ranks=ranks,
    )
    words = ["--verifier-name-or-path", str(real), "--data-path", str(tmp_path / "exported")]
    words += ["--target-layer-ids", "2", "4", "5", "--on-missing", "raise"]
    theirs = trained(tmp_path, "speculators", "train", *words, *options, ranks=ranks)
    assert json.loads((ids / "export.json").read_text())["rows"] == 12
    assert not (ids / "hidden_states").exists()
    weights, expected = (load_file(folder / "model.safetensors") for folder in (ours, theirs))
    assert weights.keys() == expected.keys()
    assert [name for name, tensor in weights.items() if not torch.equal(tensor, expected[name])] == []


KEPT = """
import json, os, sys, torch
os.environ["TORCHDYNAMO_DISABLE"] = "1"
from service.errors import OptionRefused
from service.trainers.speculators import train
from benchmarks.loop.trainer_on_cpu import on_cpu
from speculators.train.trainer import Trainer

def look(trainer):
    model = trainer.model
    # Checkpoints are in bfloat16.
    own, targets = (head.weight.bfloat16() for head in (model.lm_head, model.verifier_lm_head))
    heads.append([model.t2d, torch.equal(own, targets)])
    if len(heads) == 1:
        run(trainer)

run, heads = Trainer.run_training, []
Trainer.run_training = look
on_cpu()
*runs, last = json.loads(sys.argv[1])
for dataset, *options in runs:
    train(dataset, options)
try:
    train(last[0], last[1:])
except OptionRefused as refused:
    torch.save((heads, refused.field), sys.argv[2])
"""


def test_a_drafter_that_goes_on_with_other_rows_keeps_its_vocabulary(with_rejects, modelled, tmp_path):
    """1. A training. 2. It goes on after a night's job, 3. and once more, with the same options. 4. Another
    continues from its drafter. 5. With another vocabulary it would not be the drafter's: it is refused.

    The head that the drafter learns from has the tokens of its own head, whatever the rows' counts are.
    """
    out, options = tmp_path / "out", [*ON_CPU, "--num-workers", "0"]
    np.save(tmp_path / "t2d.npy", np.ones(7, np.bool_))
    others = ["--d2t-path", str(out / "kept-d2t.npy"), "--t2d-path", str(tmp_path / "t2d.npy")]
    runs = [
        (str(with_rejects), *options, "--epochs", "1", "--save-path", str(out)),
        (str(modelled), *options, "--epochs", "2", "--save-path", str(out)),
        (str(modelled), "--config", str(out / "run.yaml"), "--epochs", "3"),
        (str(modelled), *options, "--epochs", "1", "--from-pretrained", str(out / "0")),
        (str(modelled), *options, "--from-pretrained", str(out / "0"), *others),
    ]
    heads, refused = loaded_by(KEPT, json.dumps(runs), result=tmp_path / "result.pt")
    (kept_V, _), *_ = heads
    assert [torch.equal(t2d_V, kept_V) and same for t2d_V, same in heads] == [True] * 4
    assert refused == "t2d_path"
    named = yaml.safe_load((out / "run.yaml").read_text())["train"]
    assert np.load(named["draft"]["t2d_path"]).tolist() == kept_V.tolist()
    assert not Path(named["data"]["data_path"]).exists()


def test_ranks_with_other_jobs_are_refused(with_rejects, modelled, tmp_path):
    """Each node has a folder of its own, and one was copied before the last night's job."""
    for rank, dataset in enumerate((with_rejects, modelled)):
        (tmp_path / f"dataset-{rank}").symlink_to(dataset)
    script = tmp_path / "train_on_cpu.py"
    script.write_text(TRAINED.replace("sys.argv[2:]", "[w.format(**os.environ) for w in sys.argv[2:]]"))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    command += ["quarry", "train", "speculators", str(tmp_path / "dataset-{RANK}"), *ON_CPU]
    done = subprocess.run(
        [*command, "--save-path", str(tmp_path / "out"), "--num-workers", "0", "--epochs", "1"],
        env=environment() | {"PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "this rank reads other jobs than the first one" in done.stderr


REFUSED = """
import json, sys
import torch
from service.errors import QuarryError
from service.trainers.speculators import train

refusals = []
for live, dataset, *options in json.loads(sys.argv[1]):
    try:
        train(dataset, options, live=live)
    except QuarryError as error:
        refusals.append([type(error).__name__, error.field, error.detail, error.cure])
torch.save(refusals, sys.argv[2])
"""


def test_what_does_not_fit_is_refused_with_its_field_and_a_cure(dataset, tmp_path):
    unfinished, other = tmp_path / "unfinished", tmp_path / "other"
    shutil.copytree(dataset, unfinished, ignore=shutil.ignore_patterns("manifests"))
    other.mkdir()
    (other / "file").touch()
    cases = [
        (None, str(unfinished)),
        (None, str(dataset), "--target-layer-ids", "2", "7"),
        (None, str(dataset), "--speculator-type", "eagle9"),
        (None, str(dataset), "--data-path", str(other)),
    ]
    refusals = loaded_by(REFUSED, json.dumps(cases), result=tmp_path / "result.pt")
    assert [(kind, field) for kind, field, _, _ in refusals] == [
        ("SourceRefused", "dataset"),
        ("OptionRefused", "layers"),
        ("OptionRefused", "algorithm"),
        ("OptionRefused", "data_path"),
    ]
    details = [detail for _, _, detail, _ in refusals]
    assert "no job is complete" in details[0]
    assert "holds layers [2, 4, 5, 8], not [7]" in details[1]
    assert all(cure for *_, cure in refusals)


ENDED = """
import os, signal, sys
from service.trainers.speculators import train
from speculators.train import cli

def end(config):
    print(config.data.data_path, os.path.isdir(config.data.data_path))
    os.kill(os.getpid(), signal.SIGTERM)

cli.main = end
train(sys.argv[1], [])
"""


def test_a_rank_that_is_ended_leaves_no_ids_behind(dataset):
    command = [sys.executable, "-W", "ignore", "-c", ENDED, str(dataset)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    folder, was_there = done.stdout.split()
    assert was_there == "True"
    assert not Path(folder).exists()


def test_a_missing_trainer_is_named_with_the_command_that_installs_it(dataset):
    command = [sys.executable, "-m", "service.cli", "train", "speculators", str(dataset), "--epochs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "'quarry train' needs" in done.stderr
    assert "pip install 'eagle-quarry[speculators]'" in done.stderr
