"""Keys of samples' contents: what a sample is known by, and the file that a planning process asks."""

import os
from pathlib import Path

import numpy as np
import pytest

from schemas.dataset.columns import CONTENT_HASH_BYTES, plan_schema
from schemas.names import known_hashes_path
from schemas.source import Sample
from service.plan import content_hashes
from service.plan.content_hashes import KnownHashes, SeenHashes, content_hash, write_hashes
from tests.unit.plan.house import JOB, House, chat

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"default": None}}}
SAMPLES = {
    "c63cacb1afa3d4c7fe78402ddd0a4856": {"text": "Gr\u00fc\u00dfe"},
    "a04ae0a686503aaa0c92478e86df3eb5": {"token_ids": [1, 2, 3]},
    "9e64f3a48790850fffc80d67735e3b5f": {"token_ids": [1, 2, 3], "loss_mask": [0, 1, 1]},
    "f058182e74227ac65d403968930f524f": {"messages": chat("why")},
    "8872820633ea9c145323cfcd4094a438": {"messages": chat("why"), "tools": [TOOL]},
}


@pytest.mark.parametrize(("key", "sample"), SAMPLES.items(), ids=lambda value: str(value)[:20])
def test_the_key_of_a_content_is_what_it_was_in_every_version(key: str, sample: dict[str, object]) -> None:
    """A key that changes would let every sample of every schedule come again."""
    assert content_hash(Sample.model_validate(sample)).hex() == key


def test_a_name_is_not_of_the_content_and_the_order_of_a_tools_keys_is_not() -> None:
    one = Sample.model_validate({"id": "a", "messages": chat("why"), "tools": [TOOL]})
    other = Sample.model_validate({"messages": chat("why"), "tools": [dict(reversed(TOOL.items()))]})
    assert content_hash(one) == content_hash(other)


def test_every_key_of_a_file_is_found_and_no_other(tmp_path: Path) -> None:
    """Keys that end in zero bytes are shorter for numpy, and those of a value of a byte less are none."""
    draw = np.random.default_rng(3)
    keys = [draw.bytes(CONTENT_HASH_BYTES) for _ in range(500)]
    keys += [
        bytes(CONTENT_HASH_BYTES),
        b"\xff" * CONTENT_HASH_BYTES,
        *(draw.bytes(12) + bytes(4) for _ in range(20)),
    ]
    others = [
        *(draw.bytes(CONTENT_HASH_BYTES) for _ in range(500)),
        *(key[:12] + b"\0\0\0\1" for key in keys[-20:]),
    ]
    write_hashes(tmp_path / "keys", [b"".join(keys[:300]), b"", b"".join(keys[300:])], "1")
    known = KnownHashes(tmp_path / "keys")
    assert all(key in known for key in keys)
    assert not any(key in known for key in others)
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]


@pytest.mark.parametrize("newest", [1, 3, 1000])
def test_a_key_is_new_once_however_its_like_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newest: int
) -> None:
    monkeypatch.setattr(content_hashes, "NEWEST_HASHES", newest)
    draw = np.random.default_rng(4)
    some = [draw.bytes(13) for _ in range(40)]
    keys = [
        bytes(CONTENT_HASH_BYTES),
        *(start + end for start in some for end in (b"\0\0\0", b"\0\0\1", b"\1\0\0")),
    ]
    seen, expected = SeenHashes(tmp_path / "work"), set[bytes]()
    for number in draw.integers(0, len(keys), 600):
        assert seen.add(keys[number]) is (keys[number] not in expected)
        expected.add(keys[number])
    assert not list(tmp_path.glob("work/*"))


def test_a_file_without_keys_knows_nothing(tmp_path: Path) -> None:
    write_hashes(tmp_path / "keys", [], "1")
    assert bytes(CONTENT_HASH_BYTES) not in KnownHashes(tmp_path / "keys")


def test_a_file_larger_than_the_memory_of_the_planning_process_is_mapped(house: House) -> None:
    house.submit()
    path = house.settings.work_root / known_hashes_path(JOB)
    path.parent.mkdir(parents=True)
    path.touch()
    os.truncate(path, 4 * house.settings.plan_memory_bytes)
    house.plan()
    progress = house.job().progress
    assert (progress.plan_done, progress.samples_planned, progress.samples_known) == (True, 12, 0)
    schema = house.plan_table(0).schema
    assert schema.equals(plan_schema(hashed=True, in_dialogues=False))
