"""The parts of the GPU benchmark that no GPU is needed for."""

import importlib
import json
import math
import os
import subprocess
import sys
import zipfile

import pydantic
import pytest
import torch

from benchmarks.gpu.__main__ import LEAST_S, ROOT, main, part_environment
from benchmarks.gpu.agreement import Agreement
from benchmarks.gpu.cache import NUM_SLOTS, TOKEN_BYTES, Request, random_requests
from benchmarks.gpu.carry import (
    LIMIT_BYTES,
    TooLarge,
    distribution,
    own_files,
    pack,
    report,
    requirements,
    unzipped,
)
from benchmarks.gpu.cases import BORDER_LENGTHS, CASES, OPTIONS, SHARED_PREFIX_TOKENS, prompt_units
from benchmarks.gpu.check import WrongBytes, check_sentinels, compare
from benchmarks.gpu.drain import MODEL, PINNED, QUARRY, SHARE, STEP, figures, table
from benchmarks.gpu.figures import FigureFile
from benchmarks.gpu.parts import CASES as CASES_OF, PARTS, in_order
from benchmarks.gpu.suites import OUTCOME, TESTS
from benchmarks.gpu.turns import Drain, Turn
from benchmarks.gpu.unpack import unpack
from benchmarks.gpu.ways import Flight
from connector.gather import CpuGather
from connector.sentinels import Sentinels

ABSENT = ("vllm", "transformers", "pyarrow", "pydantic", "safetensors", "xxhash")
"""What a machine may lack that measures the bytes and the drain alone."""


class RoomFor:
    """A way with room for a number of requests, whose copies are done when the test says so."""

    def __init__(self, room):
        self.room, self.flights, self.done, self.landed = room, [], set(), []

    def start(self, requests):
        started = [self.flight(request) for request in list(requests)[: self.room]]
        self.room -= len(started)
        self.flights += started
        return started

    def flight(self, request):
        return Flight(
            request, torch.empty(0), lambda: request in self.done, lambda: self.landed.append(request)
        )


def turn(num_bytes, seconds, step_s=0.0):
    return Turn(
        seconds=seconds,
        bytes=num_bytes,
        requests=2,
        start_s=1e-4,
        step_s=step_s,
    )


def test_requests_lie_in_blocks_of_their_own():
    requests = random_requests("typical", 200 * 512 * TOKEN_BYTES, 10_000, seed=0)
    blocks = [block for request in requests for block in request.block_ids]
    assert len(set(blocks)) == len(blocks)
    assert sum(request.num_bytes for request in requests) >= 200 * 512 * TOKEN_BYTES
    for request in requests:
        assert 0 <= len(request.block_ids) * NUM_SLOTS - request.num_tokens < NUM_SLOTS


def test_a_drain_starts_what_has_room_and_lands_in_order():
    requests = [Request((index,), 10) for index in range(5)]
    way = RoomFor(2)
    drain = Drain(way, requests)
    drain.start(math.inf)
    assert (drain.requests, len(way.flights)) == (2, 2)
    way.done.add(requests[1])
    drain.finish()
    assert way.landed == []
    way.done.add(requests[0])
    drain.finish()
    assert way.landed == requests[:2]
    assert drain.bytes == 20 * TOKEN_BYTES
    way.room = 9
    drain.start(0)
    assert [flight.request for flight in way.flights[2:]] == requests[2:]


def test_a_drain_admits_no_more_tokens_than_the_model_finished():
    drain = Drain(way := RoomFor(9), [Request((index,), 10) for index in range(9)])
    drain.start(15)
    assert len(way.flights) == 2
    drain.start(4)
    assert len(way.flights) == 2
    drain.start(2)
    assert len(way.flights) == 3


def test_ratios_are_taken_within_a_round():
    turns = {
        PINNED: [turn(100, 1.0, step_s=2.0), turn(100, 2.0, step_s=4.0)],
        MODEL: [turn(0, 1.0, step_s=2.0), turn(0, 1.0, step_s=4.0)],
        QUARRY: [turn(90, 1.0, step_s=3.0), turn(80, 2.0, step_s=6.0)],
    }
    of_cell = figures(turns)
    ours = of_cell[QUARRY]
    assert (ours[SHARE].low, ours[SHARE].high) == (0.8, 0.9)
    assert ours[STEP].median == 1.5
    assert " 0.85 (0.80..0.90) |" in table(of_cell)
    assert STEP not in figures({PINNED: turns[PINNED]})[PINNED]


def test_a_cache_too_small_for_the_requests_is_named():
    with pytest.raises(ValueError, match="--cache-gib"):
        random_requests("long", 2 * 8192 * TOKEN_BYTES, 600, seed=0)


def test_a_copy_is_compared_as_bytes_and_by_its_sums():
    cache = torch.zeros(4, 3, NUM_SLOTS, 8, dtype=torch.bfloat16)
    out = torch.empty(3, 20, 8, dtype=torch.bfloat16)
    (copy,) = CpuGather(cache).start([((2, 1), out)])
    wanted = torch.zeros_like(out)
    flight = Flight(Request((2, 1), 20), out, copy.done, lambda: None, copy.sums)
    compare(flight, wanted, "equal")
    with pytest.raises(WrongBytes, match="sums on the device"):
        copy.sums()[1, 19] += 1
        compare(flight, wanted, "another sum")
    out[2, 19, 7] = -0.0
    with pytest.raises(WrongBytes, match="differs from the cache"):
        compare(flight, wanted, "an equal number of other bits")


def test_a_sentinel_in_another_block_than_asked_for_is_told(monkeypatch):
    cache = torch.randn(12, 3, NUM_SLOTS, 8).bfloat16()
    before = cache.clone()
    assert check_sentinels(cache) == cache.nbytes
    assert torch.equal(cache, before)
    place = Sentinels.place
    monkeypatch.setattr(Sentinels, "place", lambda self, blocks: place(self, [*blocks, 1]))
    with pytest.raises(WrongBytes, match="sentinels"):
        check_sentinels(cache)


def test_the_part_without_an_engine_needs_torch_numpy_and_psutil_alone(monkeypatch):
    ours = [name for name in sys.modules if name.startswith(("benchmarks", "connector", "schemas", "tests"))]
    for name in ours:
        monkeypatch.delitem(sys.modules, name)
    for name in ABSENT:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError):
        importlib.import_module("connector.wire")
    for name in ("__main__", "check", "drain", "unpack"):
        importlib.import_module(f"benchmarks.gpu.{name}")


@pytest.mark.parametrize(("captured", "nearer_elsewhere"), [((0, 2, 3), 0), ((0, 1, 3), 1)])
def test_the_layer_before_is_told_from_the_layer_asked_for(captured, nearer_elsewhere):
    generator = torch.Generator().manual_seed(0)
    truth = {layer: torch.randn((5, 16), generator=generator) for layer in range(4)}
    agreement = Agreement((0, 2, 3))
    stored = {asked: truth[got] for asked, got in zip((0, 2, 3), captured, strict=True)}
    agreement.add(stored, truth, truth)
    figures = agreement.figures()
    assert figures["2"]["rows_nearer_to_another_layer"] == nearer_elsewhere
    assert figures["2"]["rows_bit_equal"] == 1 - nearer_elsewhere
    assert (figures["2"]["relative_error_max"] > 0.5) == bool(nearer_elsewhere)
    assert figures["0"]["relative_error_max"] == figures["3"]["relative_error_max"] == 0


def test_the_prompts_cross_blocks_and_steps_and_come_again_with_tails_on_a_shared_prefix():
    first, second = prompt_units(CASES["llama-bfloat16"], vocab_size=100)
    assert set(BORDER_LENGTHS) <= {len(ids) for ids in first}
    assert max(map(len, first)) > 2 * OPTIONS["max_num_batched_tokens"]
    assert second[: len(first)] == first
    prefix = max(first, key=len)[:SHARED_PREFIX_TOKENS]
    assert all(ids[: len(prefix)] == prefix for ids in second[len(first) :])


def test_parts_run_once_each_in_their_own_order():
    assert in_order(["job", "bytes", "job"]) == ["bytes", "job"]
    assert list(PARTS)[:3] == ["bytes", "exact", "job"]
    assert sorted(case for cases in CASES_OF.values() for case in cases) == sorted(CASES)


def test_every_file_of_the_suites_is_there():
    assert [name for name in TESTS if not (ROOT / name).is_file()] == []


def test_a_figure_is_in_the_file_as_soon_as_it_is_saved_beside_those_of_other_parts(tmp_path):
    path = tmp_path / "gpu.json"
    FigureFile(path).put({"gpu": "one"}, "machine")
    save = FigureFile(path).save("exact")
    save("rows", 1)
    assert json.loads(path.read_text())["parts"] == {"exact": {"figures": {"rows": 1}}}
    FigureFile(path).save("job")("alarms", 0)
    save("rows", 2)
    found = json.loads(path.read_text())
    assert found["machine"] == {"gpu": "one"}
    assert found["parts"] == {"exact": {"figures": {"rows": 2}}, "job": {"figures": {"alarms": 0}}}
    assert [file.name for file in tmp_path.iterdir()] == ["gpu.json"]


@pytest.mark.slow
def test_a_part_that_dies_or_finds_no_time_left_is_recorded_and_the_next_one_goes_on(tmp_path):
    out = tmp_path / "out"
    common = ["--out", str(out), "--folder", str(tmp_path / "work")]
    assert main(["bytes", *common, "--limit-s", str(LEAST_S / 2)]) == 1
    FigureFile(out / "gpu.json").save("bytes")("of an earlier run", 1)
    assert main(["bytes", "--together", *common, "--cache-gib", "1", "--limit-s", "120"]) == 1
    parts = json.loads((out / "gpu.json").read_text())["parts"]
    assert "figures" not in parts["bytes"]
    assert parts["bytes"]["failed"][0] == "exit status 1"
    assert parts["bytes"]["failed"][-1] in (out / "gpu.log").read_text()
    assert sorted(file.name for file in out.iterdir()) == ["gpu.json", "gpu.log"]


def test_an_outcome_is_known_by_its_test_however_its_process_prints_it():
    said = [
        "[gw1] [ 33%] PASSED tests/a/b.py::c[d-0] ",
        "tests/a/b.py::e ",
        "[gw0] [ 9%] FAILED tests/a/b.py::f",
    ]
    found = [OUTCOME.search(line) for line in said]
    assert [match and match.groups() for match in found] == [
        ("PASSED", "tests/a/b.py::c[d-0]"),
        None,
        ("FAILED", "tests/a/b.py::f"),
    ]


def test_what_was_carried_comes_first_on_the_path_of_a_part(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.__main__.SITE", tmp_path)
    paths = part_environment({"PYTHONPATH": "own", "HF_HUB_OFFLINE": "0"})["PYTHONPATH"].split(":")
    assert (paths[0], paths[-1], len(paths)) == (str(tmp_path), "own", 3)


def test_a_transfer_that_does_not_fit_names_the_file():
    sizes = {"small": 10**6, "kernels": LIMIT_BYTES - 2 * 10**6}
    assert report("first", sizes, 10**6).startswith("transfer first: 67.1 MB of 67.1")
    with pytest.raises(TooLarge, match=r"transfer first: kernels has 65\.1 MB and does not fit"):
        report("first", sizes, 10**6 + 1)


def test_wheels_are_asked_for_at_the_pinned_version():
    pins = "a-b==1.2 \\\n    --hash=sha256:0\nc==3\n"
    assert requirements(pins, ["c", "a-b"]) == ["c==3", "a-b==1.2"]
    with pytest.raises(KeyError, match="d"):
        requirements(pins, ["d"])


@pytest.mark.parametrize(
    ("wheel", "wanted"),
    [
        ("a_b-1.2.0.post7-py3-none-any.whl", "a-b==1.2.0.post7"),
        ("SQLAlchemy-2.1.9-cp312-cp312-manylinux_2_28_x86_64.whl", "sqlalchemy==2.1.9"),
    ],
)
def test_a_wheel_is_known_by_its_name_and_version(tmp_path, wheel, wanted):
    assert distribution(tmp_path / wheel) == wanted


def test_what_was_carried_is_unpacked_once_also_when_the_second_transfer_comes_later(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    pack(tmp_path / "first" / "kernels.tar.xz", [("vllm/kernels.so", b"code")])
    assert unpack(tmp_path, tmp_path / "site") == ["kernels.tar.xz"]
    with zipfile.ZipFile(tmp_path / "one.whl", "w") as wheel:
        wheel.writestr("one/__init__.py", "")
    pack(tmp_path / "second" / "packages.tar.xz", unzipped([tmp_path / "one.whl"]))
    assert unpack(tmp_path, tmp_path / "site") == ["packages.tar.xz"]
    assert (tmp_path / "site" / "vllm" / "kernels.so").read_bytes() == b"code"
    assert (tmp_path / "site" / "one" / "__init__.py").exists()


def test_a_store_on_sqlite_opens_where_the_driver_of_postgresql_is_a_stub(tmp_path):
    for name, content in own_files():
        if name.startswith("psycopg") or name == "carried_stub.py":
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
    opens = (
        "import sys; from service.store import Store, migration; Store(sys.argv[1]).write(migration.migrate)"
    )
    here = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", opens, f"sqlite:///{tmp_path / 'quarry.db'}"]
    subprocess.run(command, env=os.environ | here, check=True)


def test_a_stub_has_every_name_for_imports_annotations_bases_and_constants(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name, content in own_files():
        if name.startswith("xgrammar") or name == "carried_stub.py":
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
    before = set(sys.modules)
    for name in [name for name in sys.modules if name.split(".")[0] == "xgrammar"]:
        monkeypatch.delitem(sys.modules, name)
    finders = list(sys.meta_path)
    try:
        module = importlib.import_module("xgrammar.any.module")

        class Child(module.Base):
            field: module.Other | None = None

        assert Child().field is None
        assert isinstance(module.Other.CONSTANT, type)
        assert pydantic.TypeAdapter(module.Other | int).validate_python("any") == "any"
    finally:
        sys.meta_path[:] = finders
        for name in set(sys.modules) - before | {"xgrammar", "carried_stub"}:
            sys.modules.pop(name, None)
