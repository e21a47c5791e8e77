"""The dataset card, made from manifests."""

import re
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import DatasetCard

from schemas.dataset.jobs_table import JobEntry
from schemas.dataset.manifest import Coverage, Manifest, VocabularyStats
from schemas.generate import Generate
from schemas.request import HubTarget
from service.errors import OptionRefused
from service.publish import card as cards
from service.publish.card import assigned_configs, states_config
from tests.support.finished_job import (
    CAPTURED_AT,
    JOB,
    OTHER_JOB,
    a_dataset,
    an_identity,
    layer_bytes,
)


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return a_dataset(tmp_path / "first")


@pytest.fixture
def other(tmp_path: Path) -> Manifest:
    return a_dataset(tmp_path / "other", OTHER_JOB)


def render_card(manifests: Sequence[Manifest], *given: Any, **named: Any) -> str:
    jobs = [JobEntry.of(manifest, manifest.model_dump_json().encode()) for manifest in manifests]
    return cards.render_card(jobs, *given, **named)


def yaml_of(card: str) -> dict[str, Any]:
    return DatasetCard(card).data.to_dict()


def test_the_light_index_is_the_default_and_the_states_are_the_second(manifest: Manifest) -> None:
    configs = yaml_of(render_card([manifest]))["configs"]
    assert [config["config_name"] for config in configs] == ["index", "states"]
    assert configs[0]["default"]
    assert configs[0]["data_files"] == [{"split": "train", "path": [f"index/{JOB}/*.parquet"]}]
    assert configs[1]["data_files"] == [{"split": "train", "path": [f"data/{JOB}/*.parquet"]}]


def test_a_foreign_configuration_without_a_name_is_kept(manifest: Manifest) -> None:
    """Also one that lists a job of ours, which then is in the configuration that its request says."""
    nameless = {"data_files": f"data/{JOB}/*.parquet"}
    theirs = f"---\nconfigs:\n- data_files: {nameless['data_files']}\n---\n"
    configs = yaml_of(render_card([manifest], existing=theirs))["configs"]
    assert [config.get("config_name") for config in configs] == ["index", "states", None]
    assert configs[-1] == nameless


def test_the_licence_is_left_out_because_it_is_not_known(manifest: Manifest) -> None:
    assert "license" not in yaml_of(render_card([manifest]))


def test_the_same_manifests_give_the_same_card_in_any_order(manifest: Manifest, other: Manifest) -> None:
    card = render_card([manifest, other])
    assert render_card([other, manifest]) == card
    assert render_card([other, manifest], existing=card) == card
    assert render_card([manifest, other], existing=render_card([other])) == card


@pytest.mark.parametrize(
    ("fact"),
    [
        "[org/model](https://huggingface.co/org/model)",
        "`c0ffee`",
        "| dtype, hidden size | bfloat16, 8 |",
        "| `layer_2` | 2 | 2 | 1 | residual stream |",
        "| `layer_4` | 4 | - | 3 | pre-final-norm |",
        "rmsnorm, eps 1e-06",
        "| assistant | 64, longer: reject |",
        "`3333333333333333`",
        "6 samples, 18 tokens",
        "vllm 0.32.0 on cpu, quarry 0.1.0",
        "| empty | 1 |",
        f"| `{JOB}` | 6 | 2 | 2 | 1.25 | passed, cosine >= 0.999900 |",
        "strip their trailing zero bytes",
    ],
)
def test_the_card_tells_what_a_reader_must_know(manifest: Manifest, fact: str) -> None:
    assert fact in " ".join(render_card([manifest]).split("\n"))


def test_samples_with_generated_answers_are_never_cut(tmp_path: Path) -> None:
    about = an_identity().model_copy(update={"generate": Generate(max_tokens=8), "on_too_long": "truncate"})
    assert "64, longer: reject |" in render_card([a_dataset(tmp_path, about=about)])


@pytest.mark.parametrize("compression", ["none", "planes", "fp8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_lines_that_the_card_gives_read_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str, dtype: str
) -> None:
    manifest = a_dataset(tmp_path, about=an_identity(compression, dtype=dtype))
    code = re.search(r"```python\n(.*?)```", render_card([manifest]), re.DOTALL)
    assert code is not None
    assert code[1].count("\n") == 5
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(code[1], found)
    hidden = found["hidden"]
    assert hidden.dtype is getattr(torch, dtype)
    assert list(hidden.shape) == [2, 8]
    due = torch.frombuffer(bytearray(layer_bytes(0, 0, 4, dtype)), dtype=getattr(torch, dtype)).view(2, 8)
    if compression == "fp8":
        near = due.float().abs() / 17 + due.float().abs().amax(dim=1, keepdim=True) * 2.0**-18
        assert bool(((hidden.float() - due.float()).abs() <= near + hidden.float().abs() * 2.0**-9).all())
    else:
        assert torch.equal(hidden.contiguous().view(torch.uint8), due.view(torch.uint8))


@pytest.mark.parametrize(("compression", "lossy"), [("none", False), ("planes", False), ("fp8", True)])
def test_the_card_says_whether_states_are_lossy_and_by_how_much(
    tmp_path: Path, compression: str, lossy: bool
) -> None:
    card = " ".join(render_card([a_dataset(tmp_path, about=an_identity(compression))]).split())
    assert ("The states are lossy" in card) is lossy
    assert ("at most 1/17 (5.9 %) of itself" in card) is lossy
    assert ("fp8 (lossy: within 1/17 of each value)" in card) is lossy


def test_jobs_of_one_configuration_are_listed_under_it(manifest: Manifest, other: Manifest) -> None:
    card = render_card([manifest, other], {OTHER_JOB: "late"})
    assert assigned_configs(card) == {JOB: "states", OTHER_JOB: "late"}
    assert [config["config_name"] for config in yaml_of(card)["configs"]] == ["index", "late", "states"]


def test_a_job_keeps_the_configuration_that_the_present_card_gives_it(
    manifest: Manifest, other: Manifest
) -> None:
    before = render_card([manifest], {JOB: "early"})
    assert assigned_configs(render_card([manifest, other], existing=before)) == {
        JOB: "early",
        OTHER_JOB: "states",
    }


def test_a_job_gets_the_configuration_of_its_request(tmp_path: Path) -> None:
    hub = HubTarget(repo_id="org/states", config_name="mine")
    assert assigned_configs(render_card([a_dataset(tmp_path, hub=hub)])) == {JOB: "mine"}


@pytest.mark.parametrize("change", [{"layer_ids": (1, 4)}, {"dtype": "float16"}, {"revision": "other"}])
def test_jobs_of_different_columns_are_refused_in_one_configuration(
    manifest: Manifest, tmp_path: Path, change: dict[str, Any]
) -> None:
    other = a_dataset(tmp_path / "other", OTHER_JOB, about=an_identity(**change))
    with pytest.raises(OptionRefused) as refused:
        render_card([manifest, other])
    assert refused.value.field == "hub.config_name"
    assert refused.value.cure
    render_card([manifest, other], {OTHER_JOB: "its-own"})


def test_jobs_of_other_labels_are_refused_in_one_repository(manifest: Manifest, tmp_path: Path) -> None:
    """Whatever their configurations: the indexes of all jobs are one."""
    other = a_dataset(tmp_path / "other", OTHER_JOB, about=an_identity(labels=("lang",)))
    with pytest.raises(OptionRefused) as refused:
        render_card([manifest, other], {OTHER_JOB: "its-own"})
    assert refused.value.field == "labels" and refused.value.cure
    render_card([other])


def test_two_trainings_of_a_local_model_are_refused_in_one_configuration(tmp_path: Path) -> None:
    first, again, second = (
        a_dataset(
            tmp_path / str(number),
            f"j-{number:016x}",
            about=an_identity(model="./mine", weights_sha256=weights),
        )
        for number, weights in enumerate("aab")
    )
    render_card([first, again])
    with pytest.raises(OptionRefused):
        render_card([first, second])


def test_text_and_yaml_of_a_person_survive_and_ours_is_not_doubled(
    manifest: Manifest, other: Manifest
) -> None:
    card = render_card([manifest])
    edited = card.replace("pretty_name: ", "license: mit\npretty_name: Mine or ").replace(
        "tags:\n", "tags:\n- mine\n"
    )
    edited = edited.replace("<!-- quarry:begin", "Before.\n\n<!-- quarry:begin") + "\nAfter.\n"
    again = render_card([manifest, other], existing=edited)
    metadata = yaml_of(again)
    assert metadata["license"] == "mit"
    assert metadata["pretty_name"].startswith("Mine")
    assert metadata["tags"][0] == "mine"
    assert len(metadata["tags"]) == len(set(metadata["tags"]))
    assert (
        again.index("Before.")
        < again.index("quarry:begin")
        < again.index("quarry:end")
        < again.index("After.")
    )
    assert again.count("# Hidden states of") == 1
    assert render_card([manifest, other], existing=again) == again


@pytest.mark.parametrize("marker", [cards.BEGIN, cards.END])
def test_text_of_a_person_survives_where_a_marker_was_removed(manifest: Manifest, marker: str) -> None:
    edited = render_card([manifest]).replace(marker, "") + "\nAfter.\n"
    once = render_card([manifest], existing=edited)
    assert "After." in once and once.count(cards.BEGIN) == 1
    assert render_card([manifest], existing=once) == once


def test_a_configuration_of_somebody_else_stays(manifest: Manifest) -> None:
    theirs = "---\nconfigs:\n- config_name: raw\n  data_files: raw/*.jsonl\n---\nhello\n"
    configs = yaml_of(render_card([manifest], existing=theirs))["configs"]
    assert configs[-1] == {"config_name": "raw", "data_files": "raw/*.jsonl"}


def test_a_card_that_an_editor_began_with_a_byte_order_mark_keeps_its_yaml(manifest: Manifest) -> None:
    before = render_card([manifest], {JOB: "mine"})
    assert render_card([manifest], existing=f"\ufeff{before}") == before


@pytest.mark.parametrize("place", [0, 2])
def test_a_job_that_somebody_elses_configuration_lists_too_stays_in_its_own(
    manifest: Manifest, other: Manifest, place: int
) -> None:
    before = DatasetCard(render_card([manifest]))
    theirs = {"config_name": "best", "data_files": f"data/{JOB}/*.parquet"}
    before.data["configs"].insert(place, theirs)
    card = render_card([manifest, other], existing=str(before))
    index, states, best = yaml_of(card)["configs"]
    assert (index["config_name"], states["config_name"], best) == ("index", "states", theirs)
    assert states["data_files"][0]["path"] == [f"data/{job}/*.parquet" for job in sorted((JOB, OTHER_JOB))]


def test_a_card_without_yaml_keeps_its_text(manifest: Manifest) -> None:
    assert "just text" in render_card([manifest], existing="just text")


POWERS = ("a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join(9 * [f'*a{n - 1}'])}]" for n in range(1, 10)))
BROKEN = {
    "no end of a list": "a: [",
    "aliases of a gigabyte": "\n".join((*POWERS, "configs: [{config_name: x, data_files: *a9}]")),
    "an alias of itself": "configs: &a [{data_files: *a}]",
    "depth": "[" * 5000 + "]" * 5000,
    "no header": "[1, 2]",
    "a number without digits": "a: !!int ''",
    "a date that is none": "a: !!timestamp x",
    "a key that is a list": "? [a]\n: b",
}


def test_a_time_in_a_card_is_text_and_no_number_of_base_60(manifest: Manifest) -> None:
    """With 300,000 digits PyYAML would take a minute for one, and fail beyond the largest float."""
    theirs = f"---\nstart: 1:30\nlong: 1{100_000 * ':59'}\nfar: 1{200 * ':59'}.5\n---\nhello\n"
    kept = yaml_of(render_card([manifest], existing=theirs))
    assert (kept["start"], len(kept["long"]), kept["far"][-2:]) == ("1:30", 300_001, ".5")


@pytest.mark.parametrize("name", BROKEN)
def test_a_card_with_broken_yaml_is_refused(manifest: Manifest, name: str) -> None:
    with pytest.raises(OptionRefused) as refused:
        render_card([manifest], existing=f"---\n{BROKEN[name]}\n---\ntext")
    assert refused.value.field == "hub.repo_id" and len(refused.value.detail) < 300


def test_a_card_with_too_long_a_header_is_refused(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cards, "MAX_HEADER_CHARS", 100)
    with pytest.raises(OptionRefused, match="more than 100 characters"):
        render_card([manifest], existing=f"---\na: {'x' * 100}\n---\ntext")


@pytest.mark.parametrize("odd", ["configs: 5", "configs: [1]", "configs: {a: 1}", "tags: 5", "5: x", "tags:"])
def test_what_is_odd_in_a_card_is_left_out(manifest: Manifest, odd: str) -> None:
    kept = render_card([manifest], existing=f"---\n{odd}\n---\n")
    assert yaml_of(kept) == yaml_of(render_card([manifest]))


def test_a_local_model_is_no_link(tmp_path: Path) -> None:
    card = render_card([a_dataset(tmp_path, about=an_identity(model="/models/mine"))])
    assert "| target | `/models/mine` |" in card


@pytest.mark.parametrize("odd", ["<b>x", "a\n# b", "a`b", "a|b", "[a](b)", "<!-- quarry:end -->"])
def test_the_name_of_a_models_folder_is_text_whatever_it_holds(tmp_path: Path, odd: str) -> None:
    """The end of our part was taken for that, so that at each push the rest was kept as a person's text."""
    manifest = a_dataset(tmp_path, about=an_identity(model=f"./{odd}"))
    card = render_card([manifest])
    text = card.split("---\n", 2)[2]
    assert text.count(odd) == (odd == cards.END)
    assert card == render_card([manifest], existing=card)


def test_the_options_of_a_template_do_not_end_our_part(tmp_path: Path) -> None:
    manifest = a_dataset(tmp_path, about=an_identity(chat_template_kwargs={"date": f"<b>{cards.END}"}))
    card = render_card([manifest])
    assert (card.count(cards.END), "<b>" in card) == (1, False)
    assert card == render_card([manifest], existing=card)


def test_a_reason_with_a_bar_does_not_break_the_table(manifest: Manifest) -> None:
    odd = manifest.rejects[0].model_copy(update={"reason": "a|b"})
    assert r"| a\|b | 1 |" in render_card([manifest.model_copy(update={"rejects": (odd,)})])


@pytest.mark.parametrize(("given", "config"), [("default", "states"), ("mine", "mine")])
def test_default_means_the_states_configuration(given: str, config: str) -> None:
    assert states_config(given) == config


def test_the_name_of_the_light_configuration_is_taken() -> None:
    with pytest.raises(OptionRefused) as refused:
        states_config("index")
    assert refused.value.field == "hub.config_name"


def test_the_vocabulary_is_told_job_by_job(manifest: Manifest, other: Manifest) -> None:
    stats = VocabularyStats(token_ids=9_000, coverage=(Coverage(draft_vocab=8_000, tokens=3),))
    totals = manifest.totals.model_copy(update={"supervised_tokens": 4})
    large = manifest.model_copy(update={"vocabulary": stats, "totals": totals})
    card = render_card([large, other])
    assert "| job | supervised token ids | in the 8,000 most frequent |" in card
    assert f"| `{JOB}` | 9,000 | 75.000% |" in card
    assert f"| `{OTHER_JOB}` | {other.vocabulary.token_ids} | all |" in card


def test_what_a_schedules_jobs_left_out_is_told_where_they_did(manifest: Manifest, other: Manifest) -> None:
    assert "earlier runs" not in render_card([manifest, other])
    totals = other.totals.model_copy(update={"samples_known": 12345, "samples_given_up": 6})
    card = render_card([manifest, other.model_copy(update={"totals": totals})])
    assert f"| `{OTHER_JOB}` | 12,345 | 6 |" in card and f"| `{JOB}` | 0 | 0 |" not in card


def test_the_table_of_jobs_has_the_newest_first_and_no_more_than_thirty(manifest: Manifest) -> None:
    """One job more than the table has room for."""
    night, jobs = timedelta(days=1), []
    for number in range(31):
        job_id = f"j-{number:016x}"
        provenance = manifest.provenance.model_copy(update={"job_id": job_id})
        at = CAPTURED_AT + number * night
        jobs.append(manifest.model_copy(update={"provenance": provenance, "captured_at": at}))
    assert "jobs.json" not in render_card(jobs[:30])
    card = render_card(jobs)
    assert "The newest 30 of 31 jobs; `jobs.json` has all." in card
    assert re.findall(r"^\| `(j-\S+)` \| (.*?) \| 6 \| 1 \| 18 \|", card, re.MULTILINE) == [
        (f"j-{number:016x}", f"{CAPTURED_AT + number * night:%Y-%m-%d %H:%M} UTC")
        for number in range(30, 0, -1)
    ]
