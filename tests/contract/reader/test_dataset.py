"""The reader gives back every state bit for bit, reads no more than it must, refuses what it cannot serve."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from service.reader import DFlash, Eagle, Eagle3, QuarryDataset, ReaderError, Row
from tests.contract.reader.conftest import NUM_SAMPLES, finished
from tests.support.fake_engine import states_TH
from tests.support.fake_hub import FakeHub

LAYERS = (2, 4, 5, 8)


def assert_right(row: Row) -> None:
    ids = row.input_ids.tolist()
    for layer_id in LAYERS:
        truth = states_TH(ids, layer_id, 64, "bfloat16")
        got = row.layer(layer_id)
        assert got.dtype is torch.bfloat16
        assert torch.equal(got.view(torch.int16), truth.view(torch.int16))


@pytest.mark.parametrize("memory_map", [False, True])
def test_every_state_is_given_back_bit_for_bit(dataset, memory_map):
    rows = QuarryDataset(dataset, memory_map=memory_map)
    assert len(rows) == NUM_SAMPLES
    assert len({row.sample_id for row in (rows[number] for number in range(len(rows)))}) == NUM_SAMPLES
    for number in range(len(rows)):
        assert_right(rows[number])
        assert rows.num_tokens[number] == rows[number].num_tokens == len(rows[number].loss_mask)
    assert torch.equal(rows[-1].input_ids, rows[NUM_SAMPLES - 1].input_ids)


def test_the_post_norm_state_is_made_with_the_targets_own_weight(dataset, target):
    row = QuarryDataset(dataset)[3]
    weight = load_file(dataset / "final_norm.safetensors")["weight"]
    last = row.last().float()
    due = (last * torch.rsqrt(last.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16() * weight
    assert torch.equal(row.last_normed(), due)


def test_a_mapped_state_is_written_to_without_touching_the_file(plain):
    shard = next(plain.glob("data/*/*.parquet"))
    before = shard.read_bytes()
    rows = QuarryDataset(plain, memory_map=True)
    rows[0].layer(2).zero_()
    assert shard.read_bytes() == before
    assert_right(rows[0])


def test_threads_and_pickles_read_the_same(plain):
    rows = QuarryDataset(plain, view=Eagle3())
    rows[0]
    copy = pickle.loads(pickle.dumps(rows))
    with ThreadPoolExecutor(4) as pool:
        many = list(pool.map(lambda number: rows[number]["hidden_states"], range(NUM_SAMPLES)))
    for number, states in enumerate(many):
        assert torch.equal(states, copy[number]["hidden_states"])


@pytest.mark.parametrize("view", [None, Eagle3()], ids=["rows", "views"])
def test_a_batch_is_its_rows_in_order(plain, view):
    rows = QuarryDataset(plain, view=view)
    numbers = [7, 0, 7, NUM_SAMPLES - 1]
    batch = rows.__getitems__(numbers)
    for got, number in zip(batch, numbers, strict=True):
        if view is None:
            assert_right(got)
            assert got.sample_id == rows[number].sample_id
        else:
            assert all(torch.equal(tensor, rows[number][name]) for name, tensor in got.items())


def test_a_dataset_that_memory_holds_is_read_through_the_page_cache_unless_told(plain, monkeypatch):
    assert [QuarryDataset(plain, direct=direct)._direct for direct in (None, True, False)] == [
        False,
        True,
        False,
    ]
    monkeypatch.setattr("service.reader.files._memory_bytes", lambda: 1000)
    assert QuarryDataset(plain)._direct
    assert_right(QuarryDataset(plain)[3])


def test_a_row_past_the_end_ends_iteration(plain):
    rows = QuarryDataset(plain)
    with pytest.raises(IndexError):
        rows[NUM_SAMPLES]
    assert sum(1 for _ in rows) == NUM_SAMPLES


READ = """
import sys
from pathlib import Path
from service.reader import QuarryDataset
rows = QuarryDataset(sys.argv[1])
total = sum(rows.num_tokens) * 64 * 2
rows[0].layer(2)
def read():
    return int(Path("/proc/self/io").read_text().split()[1])
[rows.row(number) for number in range(len(rows))]
before = read()
for number in range(len(rows)):
    rows[number].layer(8)
print((read() - before) / total)
"""


def test_one_layer_costs_one_layers_bytes(plain):
    done = subprocess.run(
        [sys.executable, "-c", READ, str(plain)], capture_output=True, text=True, check=True
    )
    share = float(done.stdout)
    assert 1.0 <= share <= 1.1


ALONE = """
import sys
from importlib.abc import MetaPathFinder

class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        ours = name.split(".")[0] == "connector" or (
            name.startswith("service.") and not name.startswith("service.reader"))
        others = {"transformers", "vllm", "datasets", "huggingface_hub", "sqlalchemy", "fastapi", "jinja2"}
        if ours or name.split(".")[0] in others:
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)

sys.meta_path.insert(0, Refuse())
from service.reader import Eagle3, Mtp, QuarryDataset, QuarryStream
view = QuarryDataset(sys.argv[1], view=Eagle3())[1]
assert QuarryDataset(sys.argv[1], view=Mtp(2))[1]["hidden_states"].shape[1] == 64
assert sum(1 for _ in QuarryStream(QuarryDataset(sys.argv[1], view=Eagle3()))) == int(sys.argv[2])
print(tuple(view["hidden_states"].shape), "pyarrow" in sys.modules)
"""


def test_it_needs_no_engine_no_database_and_no_other_part_of_the_service(dataset):
    command = [sys.executable, "-W", "ignore", "-c", ALONE, str(dataset), str(NUM_SAMPLES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tokens = QuarryDataset(dataset).num_tokens[1]
    assert done.stdout.strip() == f"({tokens - 1}, 192) True"


def test_a_folder_without_a_dataset_is_refused(tmp_path):
    with pytest.raises(ReaderError, match="is no folder"):
        QuarryDataset(tmp_path / "none")
    with pytest.raises(ReaderError, match="there are no index files"):
        QuarryDataset(tmp_path)


def test_jobs_are_chosen_by_id(plain):
    (job,) = [path.name for path in (plain / "index").iterdir()]
    assert len(QuarryDataset(plain, jobs=[job])) == NUM_SAMPLES
    with pytest.raises(ReaderError, match="j-none"):
        QuarryDataset(plain, jobs=["j-none"])


def test_a_view_that_needs_another_layer_is_refused_before_anything_is_read(plain):
    with pytest.raises(ReaderError, match=r"needs \[7\] as well"):
        QuarryDataset(plain, view=DFlash(layers=(2, 7)))
    with pytest.raises(ReaderError, match="holds layers"):
        QuarryDataset(plain)[0].layer(7)


def copied(plain: Path, folder: Path) -> Path:
    shutil.copytree(plain, folder)
    return folder


def test_a_truncated_shard_is_refused(plain, tmp_path):
    folder = copied(plain, tmp_path / "cut")
    shard = sorted(folder.glob("data/*/*.parquet"))[0]
    shard.write_bytes(shard.read_bytes()[:-200])
    with pytest.raises(ReaderError, match="cannot be opened"):
        QuarryDataset(folder)


def test_a_file_that_is_no_shard_is_refused(plain, tmp_path):
    folder = copied(plain, tmp_path / "other")
    shard = sorted(folder.glob("data/*/*.parquet"))[0]
    index = next(folder.glob("index/*/*.parquet"))
    shard.write_bytes(index.read_bytes())
    with pytest.raises(ReaderError, match="no shard of Quarry"):
        QuarryDataset(folder)


def test_shards_of_two_models_are_not_mixed(plain, target, tmp_path):
    other = finished(tmp_path / "job", target, layers=[1])
    folder = copied(plain, tmp_path / "mixed")
    for path in (*other.glob("data/*/*"), *other.glob("index/*/*")):
        renamed = folder / path.parent.relative_to(other).parent / "j-ffffffffffffffff" / path.name
        renamed.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, renamed)
    index = next(folder.glob("index/j-ffffffffffffffff/*.parquet"))
    table = pq.read_table(index)
    shards = [text.replace(text.split("/")[1], "j-ffffffffffffffff") for text in table["shard"].to_pylist()]
    place = table.schema.get_field_index("shard")
    pq.write_table(table.set_column(place, table.schema.field(place), [shards]), index)
    shutil.copy(next(other.glob("manifests/*.json")), folder / "manifests/j-ffffffffffffffff.json")
    rows = QuarryDataset(folder)
    with pytest.raises(ReaderError, match="holds other states than the first shard"):
        for number in range(len(rows)):
            rows[number]


def test_eagle_reads_the_last_layer_alone(plain):
    view = QuarryDataset(plain, view=Eagle())[0]
    assert set(view) == {
        "input_ids",
        "positions",
        "labels",
        "loss_mask",
        "hidden_states",
        "target_hidden_states",
    }


HUB = """
import json, sys, torch
from service.reader import Eagle3, QuarryDataset
rows = QuarryDataset("hf://datasets/" + sys.argv[1], view=Eagle3(layers=(4,)))
states = rows[2]["hidden_states"].view(dtype=torch.int16)
print(json.dumps({"rows": len(rows), "states": states.tolist()}))
"""


def test_a_repository_is_read_by_ranges_and_gives_the_same(plain, tmp_path):
    files = {
        path.relative_to(plain).as_posix(): path.read_bytes() for path in plain.rglob("*") if path.is_file()
    }
    with FakeHub() as hub:
        hub.add_repo("org/states", files)
        environment = os.environ | {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path),
            "HF_HUB_DISABLE_XET": "1",
        }
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", HUB, "org/states"],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    here = QuarryDataset(plain, view=Eagle3(layers=(4,)))
    assert told["rows"] == len(here)
    assert told["states"] == here[2]["hidden_states"].view(torch.int16).tolist()
