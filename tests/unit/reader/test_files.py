"""Files of a dataset: what is said where they cannot be read."""

from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import HfApi, HfFileSystem

from service.reader.errors import ReaderError
from service.reader.files import HubFile, HubFiles, LocalFiles
from tests.support.fake_hub import FakeHub
from tests.support.hub_state import Fault


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReaderError, match="none cannot be opened: No such file"):
        LocalFiles(tmp_path).open("none")


FILE = "datasets/org/set@main/a.parquet"


@pytest.mark.parametrize(
    ("endpoint", "read"),
    [
        ("info", lambda _: HubFiles("org/set", None)),
        ("tree", lambda files: HubFile(files, FILE).num_bytes),
        ("resolve", lambda files: HubFile(files, FILE).read(0, 5)),
    ],
)
def test_what_the_hub_does_not_give_is_named_without_the_words_of_its_client(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, read: Callable[[HfFileSystem], object]
) -> None:
    with FakeHub() as hub:
        monkeypatch.setattr("huggingface_hub.HfApi", lambda: HfApi(endpoint=hub.url))
        hub.add_repo("org/set", {"a.parquet": b"bytes"})
        hub.fail(endpoint, Fault(status=403, message="of the client", times=1000))
        with pytest.raises(ReaderError, match=r"org/set.* cannot be read: the Hub answered 403$"):
            read(HfFileSystem(endpoint=hub.url, skip_instance_cache=True))
