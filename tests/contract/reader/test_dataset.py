"""The reader gives back every state bit for bit, reads no more than it must, refuses what it cannot serve."""

import errno
import os
import pickle
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader

from schemas.dataset.files import LocalFile
from service.artifacts.dataset_files import LocalFiles
from service.reader import DFlash, Eagle3, QuarryDataset, ReaderError, Row
from tests.contract.reader.conftest import NUM_SAMPLES
from tests.support.fake_engine import states_TH

LAYERS, HIDDEN = (2, 4, 5, 8), 64


def assert_right(row: Row) -> None:
    ids = row.input_ids.tolist()
    for layer_id in LAYERS:
        truth = states_TH(ids, layer_id, HIDDEN, "bfloat16")
        got = row.layer(layer_id)
        assert got.dtype is torch.bfloat16
        assert torch.equal(got.view(torch.int16), truth.view(torch.int16))


def test_every_state_is_given_back_bit_for_bit(dataset):
    rows = QuarryDataset(dataset)
    assert len(rows) == NUM_SAMPLES
    assert len({row.sample_id for row in (rows[number] for number in range(len(rows)))}) == NUM_SAMPLES
    for number in range(len(rows)):
        assert_right(rows[number])
        assert rows.num_tokens[number] == rows[number].num_tokens == len(rows[number].loss_mask)
    assert torch.equal(rows[-1].input_ids, rows[NUM_SAMPLES - 1].input_ids)


def test_the_states_of_no_layer_are_empty(plain):
    """As `Row.auxiliary` asks for where only the last layer is captured."""
    row = QuarryDataset(plain)[0]
    for either in (row, pickle.loads(pickle.dumps(row))):
        assert either.read(()).shape == (row.num_tokens, 0)


def test_the_post_norm_state_is_made_with_the_targets_own_weight(dataset, target):
    row = QuarryDataset(dataset)[3]
    weight = load_file(dataset / "final_norm.safetensors")["weight"]
    last = row.last().float()
    expected = (last * torch.rsqrt(last.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16() * weight
    assert torch.equal(row.last_normed(), expected)


def test_another_models_norm_is_refused(plain, tmp_path):
    """As when the folders of two jobs of different models are copied into one."""
    shutil.copytree(plain, tmp_path / "both")
    file = tmp_path / "both" / "final_norm.safetensors"
    save_file({"weight": load_file(file)["weight"] * 1.5}, file)
    with pytest.raises(ReaderError, match=r"final_norm[.]safetensors is not that of job j-"):
        QuarryDataset(tmp_path / "both")


def test_threads_batches_and_pickles_read_the_same(plain):
    rows = QuarryDataset(plain, view=Eagle3())
    rows[0]
    numbers = [7, 0, 7, *range(NUM_SAMPLES)]
    alone = [rows[number] for number in numbers]
    with ThreadPoolExecutor(4) as pool:
        threaded = list(pool.map(rows.__getitem__, numbers))
    pickled = pickle.loads(pickle.dumps(rows)).__getitems__(numbers)
    for many in (threaded, rows.__getitems__(numbers), pickled):
        for row, expected in zip(many, alone, strict=True):
            assert all(torch.equal(tensor, expected[name]) for name, tensor in row.items())
    stored = QuarryDataset(plain).__getitems__(numbers)
    assert [row.sample_id for row in stored] == [rows.row(number).sample_id for number in numbers]
    assert_right(stored[1])


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_rows_without_a_view_come_out_of_a_loaders_workers_with_their_states(dataset, num_workers):
    loader = DataLoader(
        QuarryDataset(dataset), 4, collate_fn=list, num_workers=num_workers, timeout=60 if num_workers else 0
    )
    rows = [row for batch in loader for row in batch]
    assert [row.sample_id for row in rows] == QuarryDataset(dataset).sample_ids
    for row, expected in zip(rows, QuarryDataset(dataset), strict=True):
        assert_right(row)
        assert torch.equal(row.auxiliary((5, 2)), expected.auxiliary((5, 2)))
        assert torch.equal(row.last_normed(), expected.last_normed())
        assert torch.equal(row.last(), expected.last()), "a row that was normed in place holds its states"
    with pytest.raises(ReaderError, match=r"holds layers \[2, 4, 5, 8\], not \S*7"):
        rows[0].layer(7)


def test_a_row_that_a_worker_cannot_read_raises_and_does_not_hang(plain, tmp_path):
    folder = shutil.copytree(plain, tmp_path / "copy")
    rows = QuarryDataset(folder)
    for shard in folder.glob("data/*/*.parquet"):
        middle = shard.read_bytes()
        shard.write_bytes(bytes(len(middle) // 2) + middle[len(middle) // 2 :])
    for row in DataLoader(rows, batch_size=None, num_workers=1, timeout=60):
        if row.sample_id == rows.sample_ids[0]:
            with pytest.raises(ReaderError, match=r"could not be read: DatasetError: data/.*parquet: row 0"):
                row.layer(2)


def test_a_folder_has_no_revisions(plain):
    assert QuarryDataset(plain).revision is None
    with pytest.raises(ReaderError, match="revision 'v2' is of a repository"):
        QuarryDataset(plain, revision="v2")


def test_a_dataset_is_read_past_the_page_cache_if_asked_to(plain, monkeypatch):
    opened, open_file = [], LocalFiles.open
    monkeypatch.setattr(
        LocalFiles,
        "open",
        lambda self, path, *, direct=False: opened.append(direct) or open_file(self, path, direct=direct),
    )
    assert_right(QuarryDataset(plain)[3])
    assert not any(opened)
    assert_right(QuarryDataset(plain, direct=True)[3])
    assert opened[-1]


def test_a_row_past_the_end_ends_iteration(plain):
    rows = QuarryDataset(plain)
    with pytest.raises(IndexError):
        rows[NUM_SAMPLES]
    assert sum(1 for _ in rows) == NUM_SAMPLES


@pytest.mark.parametrize(("kind", "token_bytes"), [("plain", 2 * HIDDEN), ("lossy", HIDDEN + 4)])
def test_one_layer_costs_one_layers_bytes_and_one_read(request, monkeypatch, kind, token_bytes):
    """A read of codes and scales takes a little of what lies between them."""
    rows = QuarryDataset(request.getfixturevalue(kind))
    stored = [rows.row(number) for number in range(NUM_SAMPLES)]
    read, sizes = LocalFile.read, []
    monkeypatch.setattr(LocalFile, "read", lambda *args: sizes.append(args[2]) or read(*args))
    for row in stored:
        row.layer(8)
    assert len(sizes) == NUM_SAMPLES
    least = sum(rows.num_tokens) * token_bytes
    assert least <= sum(sizes) <= (1.1 * least if kind == "plain" else least + 8192 * NUM_SAMPLES)


def test_an_error_of_the_disk_names_the_shard(plain, monkeypatch):
    rows = QuarryDataset(plain)
    row = rows[3]

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(OSError, match="Input/output error") as failed:
        row.layer(2)
    assert failed.value.filename == rows.shard_of(3)


ALONE = """
import sys
from importlib.abc import MetaPathFinder

class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        ours = name.split(".")[0] == "connector" or (
            name.startswith("service.")
            and name.split(".")[1] not in {"reader", "artifacts", "errors", "client", "retry_after"})
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


@pytest.mark.slow
def test_it_needs_no_engine_no_database_no_client_of_the_hub_and_no_front(dataset):
    command = [sys.executable, "-W", "ignore", "-c", ALONE, str(dataset), str(NUM_SAMPLES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tokens = QuarryDataset(dataset).num_tokens[1]
    assert done.stdout.strip() == f"({tokens - 1}, 192) True"


def test_a_folder_without_a_dataset_is_refused(tmp_path):
    with pytest.raises(ReaderError, match="is not a folder"):
        QuarryDataset(tmp_path / "none")
    with pytest.raises(ReaderError, match="'' is not a folder"):
        QuarryDataset("")
    with pytest.raises(ReaderError, match="no job is complete"):
        QuarryDataset(tmp_path)


def test_a_view_that_needs_another_layer_is_refused_before_anything_is_read(plain):
    with pytest.raises(ReaderError, match=r"needs \[7\] as well"):
        QuarryDataset(plain, view=DFlash(layers=(2, 7)))
    with pytest.raises(ReaderError, match="holds layers"):
        QuarryDataset(plain)[0].layer(7)


@pytest.mark.parametrize(
    ("kind", "what"),
    [("truncated", r"has \d+ bytes, its manifest says"), ("another", "cannot be opened")],
)
def test_a_file_that_is_no_whole_shard_is_refused(plain, tmp_path, kind, what):
    folder = shutil.copytree(plain, tmp_path / "copy")
    shard = sorted(folder.glob("data/*/*.parquet"))[0]
    content = shard.read_bytes()
    shard.write_bytes(content[:-200] if kind == "truncated" else bytes(len(content)))
    with pytest.raises(ReaderError, match=what):
        QuarryDataset(folder)
