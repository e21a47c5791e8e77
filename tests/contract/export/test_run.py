"""An export goes on where it stopped to the same bytes, refuses to mix, and reads no more than it writes."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from schemas.dataset.manifest import body_sha256
from schemas.dataset.seal import sealing
from schemas.dataset.shard import Shard
from schemas.identity import Identity
from service.cli import main
from service.errors import IdentityChanged, OptionRefused, SourceRefused
from service.export import run
from service.export.formats import deepspec, nemo
from service.export.options import ALGORITHMS, Algorithm, FormatName
from service.export.run import FILES_AT_ONCE, export
from service.export.saving import save_torch
from tests.contract.export.conftest import files_of, wanted
from tests.support.fake_hub import FakeHub

EAGLE3 = {"algorithm": Algorithm.EAGLE3, "draft_vocab": 9}
DFLASH = {"algorithm": Algorithm.DFLASH}


class Stopped(BaseException):
    """The user's patience ended."""


def sealed_of(folder: Path) -> dict[str, bytes]:
    """Return the files that have their final names; others come and go while an export writes."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.suffix != ".tmp" and path.is_file()
    }


def stopping_at(number: int):
    """Return a `sealing` that ends the export at the file of this number, before it is written."""
    count = itertools.count(1)

    def stopping(path: Path):
        if next(count) == number:
            raise Stopped
        return sealing(path)

    return stopping


@pytest.mark.parametrize("to", FormatName)
def test_a_stopped_export_goes_on_to_the_same_bytes(dataset, tmp_path, monkeypatch, to):
    for module in (deepspec, nemo):
        monkeypatch.setattr(module, "SHARD_BYTES", 200_000)
    options, out = wanted(to), tmp_path / "out"
    export(str(dataset), out, options)
    whole = files_of(out)
    shutil.rmtree(out)
    with monkeypatch.context() as patched, pytest.raises(Stopped):
        patched.setattr(run, "sealing", stopping_at(3))
        export(str(dataset), out, options)
    assert set(files_of(out)) < set(whole), "and nothing is half written, nor written any more"
    assert json.loads((out / "export.json").read_text())["complete"] is False
    export(str(dataset), out, options)
    assert files_of(out) == whole
    assert json.loads(whole["export.json"])["complete"] is True


EXPORT = """
import itertools, os, signal, sys
from pathlib import Path
from service.export import saving
from service.export.options import Algorithm, ExportOptions, FormatName
from service.export.run import export

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def wait():
    print("writing", flush=True)
    sys.stdin.readline()

act, at = globals()[sys.argv[3]], int(sys.argv[4])
count, real = itertools.count(1), saving.DirectWriter.end

def end(writer):
    if next(count) == at:
        act()
    real(writer)

saving.DirectWriter.end = end
options = ExportOptions(FormatName.SPECFORGE, Algorithm.EAGLE3)
export(sys.argv[1], Path(sys.argv[2]), options)
"""


@pytest.mark.slow
def test_a_file_half_written_when_the_process_was_killed_is_written_again(dataset, tmp_path):
    """1. Export. 2. Export again, killed in the ninth file. 3. Go on: same bytes, no temporary file."""
    out, options = tmp_path / "out", wanted("specforge")
    export(str(dataset), out, options)
    whole = files_of(out)
    shutil.rmtree(out)
    command = [sys.executable, "-c", EXPORT, str(dataset), str(out), "kill", "9"]
    done = subprocess.run(command, check=False)
    assert done.returncode == -signal.SIGKILL
    cut = files_of(out)
    half = {name for name in cut if name.endswith(".tmp")}
    assert half
    assert half.isdisjoint(whole)
    there = {name for name in cut if name.endswith(".ckpt")}
    assert len(there) >= 9 - FILES_AT_ONCE
    assert all(cut[name] == whole[name] for name in there)
    export(str(dataset), out, options)
    assert files_of(out) == whole


@pytest.mark.parametrize("record", [b"", b"{", b"\xff", b"5", b"[]"])
def test_a_folder_whose_record_is_damaged_is_refused(dataset, tmp_path, record):
    (tmp_path / "export.json").write_bytes(record)
    with pytest.raises((OptionRefused, IdentityChanged), match=r"export[.]json|record_version null"):
        export(str(dataset), tmp_path, wanted("eagle"))


def test_a_finished_export_is_left_as_it_is(dataset, tmp_path):
    out = tmp_path / "out"
    first = export(str(dataset), out, wanted("eagle"))
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    again = export(str(dataset), out, wanted("eagle"))
    assert again == first
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == times


@pytest.mark.parametrize("to", FormatName)
def test_what_is_missing_of_a_finished_export_is_made_again(dataset, tmp_path, to):
    """1. Export. 2. All files beside the rows go, and one of rows. 3. Again: the rest is not written."""
    out, has_map = tmp_path / "out", to not in ("eagle", "deepspec", "nemo")
    options = wanted(to, draft_vocab=50 if has_map else None)
    export(str(dataset), out, options)
    whole = files_of(out)
    for name in whole.keys() - {".export.lock", "export.json"}:
        if "/" not in name or name.endswith(("_3.ckpt", "3.pt", "_3.safetensors")):
            (out / name).unlink()
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    export(str(dataset), out, options)
    assert files_of(out) == whole
    del times[out / "export.json"]
    assert {path: path.stat().st_mtime_ns for path in times} == times


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "field", "cure"),
    [
        ({"layers": (2, 4, 5, 8)}, "layers", "--layers"),
        ({"draft_vocab": 30}, "draft_vocab", "--draft-vocab"),
        ({"to": FormatName.MODELOPT}, "format", "--to"),
        ({"algorithm": Algorithm.DFLASH}, "algorithm", "--algorithm"),
    ],
)
def test_other_settings_are_refused_by_name(dataset, tmp_path, changes, field, cure):
    export(str(dataset), tmp_path / "out", wanted("torchspec"))
    before = files_of(tmp_path / "out")
    with pytest.raises(IdentityChanged, match=f"was begun with {field}") as refused:
        export(str(dataset), tmp_path / "out", wanted("torchspec", **changes))
    assert refused.value.field == field
    assert f"give the same {cure} to go on" in str(refused.value.cure)
    assert files_of(tmp_path / "out") == before


def with_manifest(dataset: Path, copy: Path, change: Callable[[dict], None], *, sealed: bool) -> Path:
    """Return a copy of a dataset with a changed manifest, which names its new sha256 if `sealed`."""
    shutil.copytree(dataset, copy)
    (file,) = (copy / "manifests").iterdir()
    body = json.loads(file.read_text())
    change(body)
    if sealed:
        body["identity_sha256"] = Identity.model_validate(body["provenance"]["identity"]).sha256()
        body["sha256"] = body_sha256(body)
    file.write_text(json.dumps(body))
    return copy


def of_mimo(body: dict) -> None:
    body["provenance"]["engine"]["options"]["model_class"] = "MiMoForCausalLM"


def test_another_dataset_is_refused(dataset, tmp_path):
    other = with_manifest(dataset, tmp_path / "other", of_mimo, sealed=True)
    export(str(dataset), tmp_path / "out", wanted("modelopt"))
    with pytest.raises(IdentityChanged) as refused:
        export(str(other), tmp_path / "out", wanted("modelopt"))
    assert refused.value.field == "jobs"


def test_a_folder_with_something_else_in_it_is_refused(dataset, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OptionRefused, match=r"holds files and no export\.json") as refused:
        export(str(dataset), tmp_path, wanted("modelopt"))
    assert refused.value.field == "out"


@pytest.mark.parametrize(
    ("to", "changes", "field", "told"),
    [
        ("modelopt", {"layers": (3,)}, "layers", r"holds layers \[2, 4, 5, 8\], not \[3\]"),
        ("specforge", {"layers": (2, 4)}, "layers", "three decoder layers, not on 2, 4"),
        ("angelslim", {"layers": (4,)}, "layers", "three decoder layers, not on 4"),
        ("angelslim", {"draft_vocab": None}, "draft_vocab", "does not start without the vocabulary map"),
        ("eagle", {"layers": (4,)}, "layers", "eagle is fed the last layer alone"),
        ("modelopt", {"max_tokens": 9}, "max_tokens", "takes rows of any length"),
        ("nemo", {"target": "/nowhere"}, "target", "holds no config.json"),
        ("nemo", {"algorithm": Algorithm.EAGLE3}, "draft_vocab", "the probability of every token of the"),
        ("nemo", EAGLE3 | {"layers": (2, 4)}, "layers", "three decoder layers"),
        ("speculators", {"draft_vocab": 10**6}, "draft_vocab", "does not fit a target vocabulary"),
        ("specforge", {"draft_vocab": 9, "target": "/nowhere"}, "target", "holds no config.json"),
    ],
)
def test_what_a_trainer_cannot_use_is_refused_before_anything_is_written(
    dataset, tmp_path, to, changes, field, told
):
    with pytest.raises(OptionRefused, match=told) as refused:
        export(str(dataset), tmp_path / "out", wanted(to, **changes))
    assert refused.value.field == field
    assert refused.value.cure
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("to", "algorithm"), [("speculators", Algorithm.MTP), ("eagle", Algorithm.EAGLE)])
def test_drafters_that_are_fed_the_state_before_the_norm_are_not_trained_behind_it(
    dataset, tmp_path, to, algorithm
):
    """vLLM hands MiMo's drafters the other state than DeepSeek's; these trainers know only the latter."""
    other = with_manifest(dataset, tmp_path / "other", of_mimo, sealed=True)
    options = wanted(to, algorithm=algorithm)
    with pytest.raises(OptionRefused, match="MiMoForCausalLM are fed the state before") as refused:
        export(str(other), tmp_path / "out", options)
    assert refused.value.field == "algorithm"
    assert export(str(dataset), tmp_path / "out", options).rows


def test_a_dataset_without_a_whole_job_is_refused(dataset, tmp_path):
    shutil.copytree(dataset, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy/manifests")
    with pytest.raises(SourceRefused, match="no job is complete") as refused:
        export(str(tmp_path / "copy"), tmp_path / "out", wanted("modelopt"))
    assert refused.value.field == "dataset"
    with pytest.raises(SourceRefused, match="not complete: j-0") as refused:
        export(str(dataset), tmp_path / "out", wanted("modelopt", jobs=("j-0",)))
    assert refused.value.field == "dataset"
    with pytest.raises(SourceRefused, match="is not a folder") as refused:
        export(str(tmp_path / "nothing"), tmp_path / "out", wanted("modelopt"))
    assert refused.value.cure is not None and refused.value.cure.startswith("name the root of a dataset")


def test_a_changed_manifest_is_found(dataset, tmp_path):
    copy = with_manifest(dataset, tmp_path / "copy", of_mimo, sealed=False)
    with pytest.raises(SourceRefused, match="was changed after it was made"):
        export(str(copy), tmp_path / "out", wanted("modelopt"))


def test_files_that_no_manifest_names_are_not_exported(dataset, tmp_path):
    copy = shutil.copytree(dataset, tmp_path / "copy")
    for kind in ("data", "index"):
        file = next(copy.glob(f"{kind}/*/*"))
        shutil.copy(file, file.with_name("train-00099.parquet"))
    exported = export(str(copy), tmp_path / "out", wanted("modelopt"))
    assert exported.rows_in_dataset == export(str(dataset), tmp_path / "right", wanted("modelopt")).rows


@pytest.mark.slow
def test_a_second_export_into_the_same_folder_is_refused_while_the_first_writes(dataset, tmp_path):
    """1. Export. 2. Export again, and a second time in its middle: refused. 3. The first ends as ever."""
    out, options = tmp_path / "out", wanted("specforge")
    export(str(dataset), out, options)
    whole = files_of(out)
    shutil.rmtree(out)
    command = [sys.executable, "-c", EXPORT, str(dataset), str(out), "wait", "3"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "writing\n"
        half = sealed_of(out)
        for second in (options, wanted("modelopt")):
            with pytest.raises(OptionRefused, match=f"another export is writing to {out}") as refused:
                export(str(dataset), out, second)
            assert refused.value.field == "out"
            assert "another folder in --out" in str(refused.value.cure)
        now = sealed_of(out)
        assert half.items() <= now.items()
        assert set(now) <= set(whole)
        first.communicate("\n")
    assert first.returncode == 0
    assert files_of(out) == whole


def test_a_file_that_cannot_be_written_ends_the_export_in_its_place(dataset, tmp_path):
    """1. Export. 2. A folder is where row 7 is written: no more than a few rows behind it are. 3. Go on."""
    out, options = tmp_path / "out", wanted("specforge")
    export(str(dataset), out, options)
    whole = files_of(out)
    for path in out.glob("data/*/*"):
        path.unlink()
    temporary = out / "data/rows_0-2000/.data_7.ckpt.tmp"
    temporary.mkdir()
    with pytest.raises(IsADirectoryError):
        export(str(dataset), out, options)
    there = {int(path.stem.removeprefix("data_")) for path in out.glob("data/*/data_*.ckpt")}
    assert set(range(7)) <= there <= set(range(8 + FILES_AT_ONCE)) - {7}
    temporary.rmdir()
    assert export(str(dataset), out, options).rows == 40
    assert files_of(out) == whole


def test_every_format_can_be_written_for_something():
    assert set(ALGORITHMS) == set(FormatName)


@pytest.mark.parametrize(("to", "layers", "read"), [("eagle", None, {8}), ("modelopt", (4,), {4, 8})])
def test_layers_that_are_not_written_are_not_read(dataset, tmp_path, monkeypatch, to, layers, read):
    real, asked = Shard.layer_bytes, set()

    def layer_bytes(shard, row, layer_id, num_tokens):
        asked.add(layer_id)
        return real(shard, row, layer_id, num_tokens)

    monkeypatch.setattr(Shard, "layer_bytes", layer_bytes)
    export(str(dataset), tmp_path / "out", wanted(to, layers=layers))
    assert asked == read


@pytest.mark.slow
def test_a_repository_on_the_hub_gives_the_same_files(dataset, tmp_path):
    out = tmp_path / "out"
    export(str(dataset), out, wanted("specforge"))
    whole = files_of(out)
    shutil.rmtree(out)
    with FakeHub() as hub:
        hub.add_repo("org/states", files_of(dataset))
        environment = os.environ | {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_XET": "1",
        }
        command = [sys.executable, "-m", "service.cli", "export", "hf://datasets/org/states/"]
        done = subprocess.run(
            [*command, "--to", "specforge", "--out", str(out)],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )
    assert done.returncode == 0, done.stderr
    assert files_of(out) == whole
    assert not any(path.stat().st_size > 100_000 for path in (tmp_path / "hf").rglob("*") if path.is_file())


def test_no_tensor_drags_the_storage_of_a_larger_one_along(tmp_path):
    save_torch(tmp_path / "row", {"part": torch.zeros(1_000_000)[:4]})
    assert (tmp_path / "row").stat().st_size < 5_000


@pytest.mark.slow
@pytest.mark.parametrize("to", FormatName)
def test_a_name_in_the_trainers_command_runs_no_other(dataset, target, tmp_path, to):
    """The name of the target is the dataset's: of whoever made it."""
    named, out = tmp_path / "a; touch owned; #", tmp_path / "$(touch owned)\n$(touch owned)"
    named.symlink_to(target)
    done = export(str(dataset), out, wanted(to, target=str(named)))
    _, command, *_ = done.notes.split("```")
    subprocess.run(["/bin/sh", "-c", command.removeprefix("sh\n")], cwd=tmp_path, check=False)
    assert "owned" in command
    assert not (tmp_path / "owned").exists()


def test_the_command_line_names_what_it_wrote(dataset, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["export", str(dataset), "--out", str(out), "--to", "modelopt"]
    with pytest.raises(SystemExit) as done:
        main([*command, "--layers", "2,5"])
    printed = capsys.readouterr().out
    assert done.value.code == 0
    assert "data.offline_data_path=" in printed
    assert printed.endswith(f"{out}: 40 rows\n")
    assert (out / "TRAIN.md").read_text() in printed
    with pytest.raises(SystemExit) as again:
        main(command)
    assert again.value.code == 3
    assert "field: layers" in capsys.readouterr().err
