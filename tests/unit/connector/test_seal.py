import hashlib

import pytest

from connector.seal import move_durably, seal, sealing, temporary


def test_a_file_has_its_final_name_only_when_it_is_whole(tmp_path):
    final = tmp_path / "folder" / "shard.parquet"
    with sealing(final) as temp:
        temp.write_bytes(b"states")
        assert not final.exists()
        assert temp.parent == final.parent
    assert final.read_bytes() == b"states"
    assert list(final.parent.iterdir()) == [final]


def test_an_error_leaves_nothing_behind(tmp_path):
    final = tmp_path / "shard.parquet"

    def write_and_fail():
        with sealing(final) as temp:
            temp.write_bytes(b"half")
            raise OSError(28, "no space")

    with pytest.raises(OSError, match="no space"):
        write_and_fail()
    assert list(tmp_path.iterdir()) == []


def test_the_seal_says_what_is_on_disk(tmp_path):
    final = tmp_path / "a"
    temporary(final).write_bytes(b"x" * 10_000_000)
    sealed = seal(final)
    assert sealed.num_bytes == 10_000_000
    assert sealed.sha256 == hashlib.sha256(b"x" * 10_000_000).hexdigest()


def test_moving_again_is_harmless_and_a_lost_file_is_an_error(tmp_path):
    (tmp_path / "attempt").mkdir()
    source, final = tmp_path / "attempt" / "a", tmp_path / "data" / "a"
    source.write_bytes(b"1")
    move_durably(source, final)
    move_durably(source, final)
    assert final.read_bytes() == b"1"
    final.unlink()
    with pytest.raises(FileNotFoundError):
        move_durably(source, final)
