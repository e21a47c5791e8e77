"""README and the pages of docs/ are true: their code runs, and their tables name what there is."""

import re
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import yaml

from schemas.dataset.columns import shard_schema
from schemas.identity import layer_info
from schemas.request import ExtractRequest
from schemas.source import FileSource
from service.api.app import create_app
from service.plan.layers import resolve_layers
from service.settings import Settings
from tests.support import errors_page, settings_page
from tests.support.plans import identity, provenance
from tests.support.shards import ShardRow, write_shard

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DATASET, API = ((ROOT / "docs" / name).read_text() for name in ("dataset.md", "api.md"))
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README + DATASET, flags=re.DOTALL | re.MULTILINE)
HIDDEN_SIZE = 16


def section(page: str, title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## )", page, flags=re.DOTALL | re.MULTILINE)
    assert found is not None, title
    return found[1]


def first_cells(text: str) -> str:
    return "\n".join(line.split("|")[1] for line in text.splitlines() if line.startswith("|"))


@pytest.fixture
def states() -> torch.Tensor:
    """Five tokens; the last one's state ends in zeros, which is what the trap eats."""
    hidden_TH = torch.randn(5, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    hidden_TH[-1, -3:] = 0
    return hidden_TH


@pytest.fixture
def shard(states: torch.Tensor, tmp_path: Path) -> Path:
    path = tmp_path / "train-00000.parquet"
    row = ShardRow("s-1", "a", 5, [1, 2, 3, 4, 5], [0, 0, 1, 1, 1], {2: states + 1, 4: states + 2, 8: states})
    write_shard(path, [row], provenance(identity(hidden_size=HIDDEN_SIZE)))
    return path


@pytest.mark.parametrize("code", EXAMPLES)
def test_the_reading_code_gives_the_states_back(code: str, shard: Path, states: torch.Tensor) -> None:
    names: dict[str, Any] = {"shard": shard}
    exec(compile(code, "README.md", "exec"), names)
    assert torch.equal(names["hidden"], states)


@pytest.mark.parametrize("form", ["torch", "numpy"])
def test_the_trap_is_there(form: str, shard: Path, states: torch.Tensor, tmp_path: Path) -> None:
    rows = datasets.Dataset.from_parquet(str(shard), cache_dir=str(tmp_path / "cache"))
    value = rows.with_format(form)[0]["layer_8"]
    assert len(bytes(value)) == states.numel() * 2 - 6
    assert len(rows[0]["layer_8"]) == states.numel() * 2


def test_the_reading_code_takes_five_lines() -> None:
    assert [len(code.splitlines()) for code in EXAMPLES] == [5, 3]


def test_the_table_of_columns_is_the_schema() -> None:
    told = re.findall(
        r"`(\S+)`",
        first_cells(section(DATASET, "The columns of a shard").partition("`storage.compression`")[0]),
    )
    names = shard_schema((7,), 16, "bfloat16", "none").names
    assert told == [name.replace("layer_7", "layer_<k>") for name in names]


def test_the_page_of_settings_is_current_and_describes_each_of_them() -> None:
    assert settings_page.PAGE.read_text() == settings_page.page()
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []


def test_the_page_of_errors_is_made_of_their_tree() -> None:
    assert errors_page.PAGE.read_text() == errors_page.page()


def test_readme_can_be_read_at_once() -> None:
    assert len(README.splitlines()) <= 150


def test_the_table_of_routes_names_every_route(tmp_path: Path) -> None:
    told = first_cells(section(API, "HTTP"))
    app = create_app(Settings(data_dir=tmp_path))
    paths = [path.replace("{job_id}", "{id}") for path in app.openapi()["paths"]]
    assert paths
    assert [
        path
        for path in paths
        if f"{path}`" not in told and f"`{path.removeprefix('/jobs/{id}')}`" not in told
    ] == []


def test_the_body_that_curl_sends_is_a_request() -> None:
    body = re.search(r"--data '(.*?)' ", section(README, "A job over HTTP"), flags=re.DOTALL)
    assert body is not None
    assert ExtractRequest.model_validate_json(body[1]).model == "Qwen/Qwen3-8B"


def test_the_example_job_is_a_request() -> None:
    job = ExtractRequest.model_validate(yaml.safe_load((ROOT / "examples" / "job.yaml").read_text()))
    assert isinstance(job.source, FileSource)
    assert (ROOT / "examples" / job.source.path).is_file()


@pytest.mark.parametrize("preset", ["eagle3", "eagle", "mtp", "dflash"])
def test_the_table_of_presets_gives_their_layers(preset: Any) -> None:
    row = re.search(
        rf"^\| .*`{preset}`.* \| (.*) \|$", section(DATASET, "Which layer is it"), flags=re.MULTILINE
    )
    assert row is not None
    told = [int(number) for number in re.findall(r"\d+", row[1])]
    assert resolve_layers(preset, True, 36) == (*told, 36)


def test_the_table_of_layers_says_what_the_metadata_says() -> None:
    lines = [
        line for line in section(DATASET, "Which layer is it").splitlines() if line.startswith("| `layer")
    ]
    told = [[cell.split("(")[0].strip() for cell in line.split("|")[3:6]] for line in lines]
    assert told == [layer_cells(0, "0"), layer_cells(5, "k"), layer_cells(8, "N")]


def layer_cells(layer_id: int, symbol: str) -> list[str]:
    """Return the three names of a layer of an 8-layer model, in terms of `symbol`."""
    terms = {None: "-", layer_id: symbol, layer_id - 1: f"{symbol} - 1"}
    info = layer_info(layer_id, 8)
    return [terms[info.vllm_id], terms[info.hf_index], terms[info.zero_based]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_points_to_exists(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)", page.read_text()) if not link.startswith("https:")]
    assert [link for link in links if not (page.parent / link).exists()] == []
