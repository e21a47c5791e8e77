"""The power fails during a job: what a disk may then hold, and what the service makes of it.

A life of the service is written down call by call, database included. Before a call of it the folder is built
anew as a disk may hold it that keeps nothing but what was synced: bytes by an fsync of their file, a name by
an fsync of its folder. What was not synced is lost, or there in part. The service is started on that folder:
no committed unit may point to a shard that is broken or gone, so the job must complete with the same bytes.
"""

import random
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.crash.conftest import SEED, chosen
from tests.crash.faults import Call
from tests.crash.house import House
from tests.crash.oracle import service

SECTOR_BYTES = 512
WAYS = ("lost", "names", "bytes", "torn")
"""What of the rest is there: nothing, names without their bytes, bytes without their names, some of it."""


@dataclass
class File:
    """Bytes as they were synced, and the writes since, an offset and its bytes, or a length to cut to."""

    synced: bytearray = field(default_factory=bytearray)
    waiting: list[tuple[int, bytes | None]] = field(default_factory=list)

    def content(self, num_writes: int, torn: bool = False) -> bytes:
        """Return the bytes with the first waiting writes made, the last of them half if `torn`."""
        content = bytearray(self.synced)
        for number, (at, data) in enumerate(self.waiting[:num_writes], 1):
            if data is None:
                content = content[:at].ljust(at, b"\0")
                continue
            if torn and number == num_writes:
                data = data[: len(data) // 2 // SECTOR_BYTES * SECTOR_BYTES]
            content = content.ljust(at, b"\0")
            content[at : at + len(data)] = data
        return bytes(content)


Names = dict[Path, File | None]
"""What stands where; a folder is None."""


class Disk:
    """A folder as its processes see it (`names`), and as it is on the disk (`synced` and what waits)."""

    def __init__(self, folder: Path) -> None:
        """Begin with what lies in `folder`, all of it synced."""
        self.names: Names = {
            path.relative_to(folder): File(bytearray(path.read_bytes())) if path.is_file() else None
            for path in folder.rglob("*")
        }
        self.synced = dict(self.names)
        self.waiting: list[tuple[Path, Path, Path | None, File | None]] = []
        """Changes of names: the folder, the name, the name before, and what gets it (a removal: no name)."""

    def apply(self, call: Call, root: Path) -> None:
        path = Path(call.path).relative_to(root)
        if call.operation == "fsync":
            file = self.names.get(path)
            if file is None:
                for change in [one for one in self.waiting if one[0] == path]:
                    self._change(self.synced, change)
                    self.waiting.remove(change)
            else:
                file.synced[:], file.waiting = file.content(len(file.waiting)), []
        elif call.operation in ("write", "truncate"):
            if (file := self.names.get(path)) is not None:
                cut = call.operation == "truncate"
                file.waiting.append((call.length, None) if cut else (call.offset, call.data))
        elif call.operation == "rename":
            new = Path(call.other).relative_to(root)
            self._wait(new, path, self.names[path])
        elif call.operation == "link":
            self._wait(Path(call.other).relative_to(root), None, self.names[path])
        elif call.operation in ("create", "mkdir"):
            self._wait(path, None, File() if call.operation == "create" else None)
        elif call.operation in ("unlink", "rmdir"):
            self._wait(path, path, None)

    def _wait(self, name: Path, before: Path | None, file: File | None) -> None:
        change = (name.parent, name, before, file)
        self._change(self.names, change)
        self.waiting.append(change)

    @staticmethod
    def _change(names: Names, change: tuple[Path, Path, Path | None, File | None]) -> None:
        _, name, before, file = change
        if before is not None:
            names.pop(before, None)
        if before != name:
            names[name] = file

    def lie_down(self, folder: Path, way: str, draw: random.Random) -> None:
        """Write to `folder` what a power cut may leave."""
        folder.mkdir(parents=True)
        names = dict(self.synced)
        kept = {"names": len(self.waiting), "torn": draw.randint(0, len(self.waiting))}.get(way, 0)
        for change in self.waiting[:kept]:
            self._change(names, change)
        for path, file in sorted(names.items()):
            if not all(parent in names for parent in path.parents[:-1]):
                continue  # its folder's name is lost, and all that is in it
            if file is None:
                (folder / path).mkdir(parents=True, exist_ok=True)
            elif not path.name.endswith("-shm"):  # memory that processes share, made anew
                writes = {"bytes": len(file.waiting), "torn": draw.randint(0, len(file.waiting))}.get(way, 0)
                (folder / path).write_bytes(file.content(writes, torn=way == "torn"))


@pytest.mark.crash
@pytest.mark.long
def test_a_trace_without_a_cut_is_the_folder(house: House, tmp_path: Path) -> None:
    """Else calls were made that the shim does not see, and every other test here would prove less."""
    disk = Disk(house.first.data_dir)
    for call in house.trace:
        disk.apply(call, house.undisturbed.data_dir)
    seen = {
        str(path): file.content(len(file.waiting)) for path, file in disk.names.items() if file is not None
    }
    there = {
        str(path.relative_to(house.undisturbed.data_dir)): path.read_bytes()
        for path in house.undisturbed.data_dir.rglob("*")
        if path.is_file()
    }
    shared = {path for path in (*seen, *there) if path.endswith("-shm")}
    wrong = {path for path in seen.keys() | there.keys() if seen.get(path) != there.get(path)}
    assert wrong <= shared


@pytest.mark.crash
@pytest.mark.long
@pytest.mark.timeout(36_000)
@pytest.mark.parametrize("way", WAYS)
def test_a_power_cut_leaves_no_committed_unit_without_its_shard(
    house: House, tally: Counter[str], way: str
) -> None:
    disk = Disk(house.first.data_dir)
    cuts = chosen(f"cut {way}", range(len(house.trace)), sample=20)
    for n, call in enumerate(house.trace):
        if n in cuts:
            folder = house.folder / f"{way}{n}"
            disk.lie_down(folder / "data", way, random.Random(f"{SEED}:{way}:{n}"))
            print(f"{way} before call {n}: {call.operation} {call.path} {call.other}")
            house.assert_finishes(service(folder / "data", house.target))
            shutil.rmtree(folder)
            tally["power cuts"] += 1
        disk.apply(call, house.undisturbed.data_dir)
