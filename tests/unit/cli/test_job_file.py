"""A field that a job file gives twice is refused, in both languages."""

from pathlib import Path

import pytest

from service.cli.job_file import read_document
from service.errors import RequestError


@pytest.mark.parametrize(
    ("name", "text", "field"),
    [
        ("job.json", '{"storage": {"retention": "keep", "retention": "consumed"}}', "storage.retention"),
        ("job.yaml", "model: a\nstorage:\n  retention: keep\n  'retention': consumed\n", "retention"),
    ],
)
def test_a_field_that_a_job_file_gives_twice_is_refused(tmp_path: Path, name: str, text: str, field: str):
    (tmp_path / name).write_text(text)
    with pytest.raises(RequestError) as caught:
        read_document(tmp_path / name)
    assert caught.value.field == field


def test_a_field_of_yaml_may_replace_one_that_is_merged(tmp_path: Path):
    inner = "a: {b: &b {<<: {x: 1}, x: 2}}"  # `c` takes it in before it is made itself
    (tmp_path / "job.yaml").write_text(f"{inner}\nc: {{<<: *b, x: 3}}\n")
    assert read_document(tmp_path / "job.yaml") == {"a": {"b": {"x": 2}}, "c": {"x": 3}}


def test_what_is_not_yaml_is_told_on_one_line(tmp_path: Path):
    (tmp_path / "job.yaml").write_text("model: a\n\tlayers: [1]\n")
    with pytest.raises(RequestError, match=r"is not YAML: .* line 2") as caught:
        read_document(tmp_path / "job.yaml")
    assert "\n" not in caught.value.detail
