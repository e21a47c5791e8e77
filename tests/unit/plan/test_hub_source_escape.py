"""A dataset repository may name its own files, and nothing else that this node can reach."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import hf_hub_url

from schemas.request import HubSource, Sample
from service.errors import SourceRefused
from service.plan.sources import SourceRow, open_source
from service.settings import Settings
from tests.support.fake_hub import FakeHub

SECRET, OWN = {"text": "of the node"}, {"text": "of the repository"}


@pytest.fixture
def hub(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """Return the Hub, where `datasets` looks for a standalone YAML at the endpoint of its environment."""
    url = partial(hf_hub_url, repo_type="dataset", endpoint=hub.url)
    monkeypatch.setattr("datasets.load.hf_dataset_url", url)
    return hub


def jsonl(*rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def card(*configs: dict[str, Any], **more: Any) -> bytes:
    named = [{"config_name": "default"} | config for config in configs]
    return f"---\n{json.dumps({'configs': named} | more)}\n---\n".encode()


def rows(hub: FakeHub, files: dict[str, bytes], **options: Any) -> list[SourceRow]:
    hub.add_repo("org/set", files)
    source = HubSource.model_validate({"kind": "hub", "repo_id": "org/set"} | options)
    return list(open_source(source, Settings(hub_endpoint=hub.url)).rows())


def refusal(hub: FakeHub, files: dict[str, bytes], **options: Any) -> SourceRefused:
    with pytest.raises(SourceRefused) as caught:
        rows(hub, {"train.jsonl": jsonl(OWN)} | files, **options)
    assert caught.value.field == "source.repo_id" and caught.value.cure
    assert "of the node" not in str(caught.value)
    return caught.value


def outside(tmp_path: Path) -> Path:
    path = tmp_path / "node" / "train.jsonl"
    path.parent.mkdir()
    path.write_bytes(jsonl(SECRET))
    return path


PATTERNS = [
    "{path}",
    "{folder}/*.jsonl",
    "file://{path}",
    "file:{path}",
    "local://{path}",
    "{url}/secret.jsonl",
    "hf://datasets/org/other/train.jsonl",
    "hf://datasets/org/set@main/train.jsonl",
    "../other@main/train.jsonl",
    "a/../../../train.jsonl",
    "train_1.jsonl::{path}",
    "zip://train.jsonl::{path}",
    "memory://train.jsonl",
    "x:train.jsonl",
]


FORMS = ["list", "split", "splits", "yaml", "second"]


@pytest.mark.parametrize(
    ("form", "pattern"), [*(("text", name) for name in PATTERNS), *((form, "{path}") for form in FORMS)]
)
def test_a_repository_may_not_name_files_outside_itself(
    hub: FakeHub, tmp_path: Path, pattern: str, form: str
) -> None:
    path = outside(tmp_path)
    named = pattern.format(path=path, folder=path.parent, url=hub.url)
    hub.add_repo("org/other", {"train.jsonl": jsonl(SECRET)})
    data_files: Any = {
        "list": ["train.jsonl", named],
        "split": [{"split": "train", "path": named}],
        "splits": [{"split": "train", "path": ["train.jsonl"]}, {"split": "test", "path": [named]}],
    }.get(form, named)
    config = {"data_files": data_files}
    if form == "yaml":
        files = {".huggingface.yaml": json.dumps({"configs": [{"config_name": "default"} | config]}).encode()}
    elif form == "second":
        files = {"README.md": card({"config_name": "first", "data_files": "train.jsonl"}, config)}
    else:
        files = {"README.md": card(config)}
    error = refusal(hub, files)
    assert named in error.detail and "outside" in error.detail


@pytest.mark.parametrize(
    "folder", ["{folder}", "..", "a/../../other@main", "file:{folder}", "hf://datasets/org/other"]
)
def test_a_repository_may_not_name_a_folder_outside_itself(hub: FakeHub, tmp_path: Path, folder: str) -> None:
    named = folder.format(folder=outside(tmp_path).parent)
    assert named in refusal(hub, {"README.md": card({"data_dir": named})}).detail


def test_nothing_is_asked_of_a_host_that_a_repository_names(hub: FakeHub) -> None:
    with FakeHub() as other:
        for pattern in ("{}/org/set/resolve/main/a.jsonl", "zip://a.jsonl::{}/org/set/resolve/main/a.zip"):
            refusal(hub, {"README.md": card({"data_files": pattern.format(other.url)})})
        assert not other.calls


def test_a_file_of_a_row_is_not_opened(hub: FakeHub, tmp_path: Path) -> None:
    """A column that the card declares to be an image names a URL and a path: the row is a reject."""
    with FakeHub() as other:
        named = [
            {"bytes": None, "path": f"{other.url}/org/set/resolve/main/a.png"},
            {"bytes": None, "path": "/etc/passwd"},
        ]
        data = jsonl(*({"text": one} for one in named))
        info = {"features": [{"name": "text", "dtype": "image"}]}
        found = rows(hub, {"README.md": card({"data_files": "a.jsonl"}, dataset_info=info), "a.jsonl": data})
        assert not other.calls
    assert len(found) == 2 and not any(isinstance(row.content, Sample) for row in found)


@pytest.mark.parametrize("name", ["a.h5", "a.lance", "a.vortex"])
def test_a_form_whose_files_name_other_files_is_refused(hub: FakeHub, name: str) -> None:
    hub.add_repo("org/set", {name: b"content"})
    source = HubSource.model_validate({"kind": "hub", "repo_id": "org/set"})
    with pytest.raises(SourceRefused, match="form") as caught:
        list(open_source(source, Settings(hub_endpoint=hub.url)).rows())
    assert caught.value.field == "source.repo_id" and caught.value.cure


@pytest.mark.parametrize(
    "content", [b"---\nconfigs: [\n---\n", b"---\nconfigs: 5\n---\n", b"---\n- 1\n---\n"]
)
def test_a_card_that_cannot_be_read_is_refused(hub: FakeHub, content: bytes) -> None:
    refusal(hub, {"README.md": content})


def test_a_card_whose_options_do_not_fit_is_refused(hub: FakeHub) -> None:
    refusal(hub, {"README.md": card({"data_files": "train.jsonl", "name": "x"})})


def test_a_standalone_yaml_that_cannot_be_read_is_refused(hub: FakeHub) -> None:
    refusal(hub, {".huggingface.yaml": b"configs: ["})


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"data_files": "*.jsonl"},
        {"data_files": ["train.jsonl"]},
        {"data_files": [{"split": "train", "path": "**/train.jsonl"}]},
        {"data_files": [{"split": "train", "path": ["train.jsonl"]}, {"split": "test", "path": "b..c/*"}]},
        {"data_dir": "b..c"},
    ],
)
def test_a_repository_may_name_its_own_files(hub: FakeHub, config: dict[str, Any]) -> None:
    files = {"README.md": card(config), "train.jsonl": jsonl(OWN), "b..c/test.jsonl": jsonl(OWN)}
    split = "test" if "data_dir" in config else "train"
    assert [row.content for row in rows(hub, files, split=split)] == [Sample(text="of the repository")]


def test_a_standalone_yaml_may_name_files_of_the_repository(hub: FakeHub) -> None:
    yaml = b"configs:\n- config_name: mine\n  data_files: mine.jsonl\n"
    files = {".huggingface.yaml": yaml, "mine.jsonl": jsonl(OWN), "train.jsonl": jsonl(SECRET)}
    assert [row.content for row in rows(hub, files, config="mine")] == [Sample(text="of the repository")]
