import base64
import hashlib

import pytest
import torch

from schemas.dataset.manifest import Manifest
from schemas.names import manifest_path, shard_path
from service.plan.model_folder import TOKENIZER_FILES, files_digest
from service.proof.tally import DatasetTally
from service.proof.verify import Finding, VerifyReport
from service.report.page import MAX_FINDINGS, render_page
from tests.support.html_page import Node, read_page
from tests.support.plans import JOB
from tests.support.reference_models import NUM_LAYERS, VOCAB_SIZE
from tests.support.shards import (
    LAYER_IDS,
    LENGTHS,
    with_states,
)
from tests.unit.report.conftest import EVIL, NOW, edit, page, pages, renamed, second_job

CANARY = "Canary: distance to the reference model"


def test_the_page_of_a_right_dataset_says_so_first(right_page):
    verdict = right_page.one("section", "verdict")
    assert verdict.text() == (
        "The dataset is right Nothing wrong was found. "
        "5 rows with 74 tokens in all were read again, every layer."
    )
    assert right_page.one("head").one("title").text() == f"Right: {right_page.one('h1').text()}"
    assert right_page.all("section", "findings") == []
    checks = right_page.one("ul", "checks").all("li")
    assert [check.attributes["class"] for check in checks] == ["passed"] * 5


def test_the_page_loads_and_runs_nothing(right_page):
    nodes = list(right_page.nodes())
    assert {node.tag for node in nodes}.isdisjoint({"script", "link", "img", "iframe", "object", "form"})
    for node in nodes:
        assert not [name for name in node.attributes if name.startswith("on") or name in {"style", "src"}]
        assert node.attributes.get("href", "#").startswith("#")


def test_the_pages_policy_allows_its_own_style_alone(right_page):
    metas = right_page.all("meta")
    (policy,) = [meta.attributes["content"] for meta in metas if "http-equiv" in meta.attributes]
    (css,) = right_page.one("style").children
    assert "url(" not in css
    assert "@import" not in css
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    rules = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert rules.pop("style-src") == f"'sha256-{digest}'"
    assert rules == dict.fromkeys(("default-src", "base-uri", "form-action"), "'none'")


def test_every_layer_is_named_in_the_three_conventions_and_measured(right_page, unit):
    header, *rows = right_page.all("table")[0].cells()
    assert header[:5] == ["column", "vLLM id", "HF index", "0\u2011based output", "state"]
    states = {k: torch.cat([row.states[k] for row in unit.rows]).double() for k in LAYER_IDS}
    assert [row[:5] for row in rows] == [
        ["layer_1", "1", "1", "0", "residual stream"],
        ["layer_2", "2", "2", "1", "residual stream"],
        [f"layer_{NUM_LAYERS}", str(NUM_LAYERS), "-", str(NUM_LAYERS - 1), "pre final norm"],
    ]
    for row, states_TH in zip(rows, states.values(), strict=True):
        assert row[5] == str(sum(LENGTHS))
        median = float(states_TH.square().mean(dim=1).sqrt().quantile(0.5))
        sizes = [float(cell) for cell in row[6:11]]
        assert sizes == sorted(sizes)
        assert sizes[2] == pytest.approx(median, rel=0.06)
        assert float(row[11]) == pytest.approx(float(states_TH.abs().max()), rel=1e-3)
        assert row[12:] == ["0", "0", "0"]


def test_every_chart_says_what_a_healthy_one_looks_like_and_has_its_numbers(right_page):
    charts = right_page.all("figure")
    assert [chart.one("h4").text() for chart in charts] == [
        "Size of the states, layer by layer",
        "Growth with depth",
        "Along the row",
        "Next token: engine against stored states",
        "The difference, in units of rounding",
        CANARY,
        "Lengths",
        "Supervised share",
    ]
    for chart in charts:
        assert chart.one("svg").attributes["role"] == "img"
        label = chart.one("svg").attributes["aria-label"]
        assert label.startswith(chart.one("h4").text())
        assert "A healthy one:" in chart.one("figcaption").text()
        tables = [table.cells() for table in chart.all("table")]
        assert tables or "the numbers are in the table of layers" in label
        assert all(len(row) == len(cells[0]) for cells in tables for row in cells)
        assert all(len(cells) > 1 for cells in tables)
    assert charts[6].one("p", "fact").text() == "Half of the rows have at most 16 tokens, the longest has 33."
    assert "5 of the 5 rows drawn (100 %) agree" in charts[3].one("p", "fact").text()
    assert charts[0].all("p", "odd") == []


def test_the_page_says_what_was_not_checked_beside_the_verdict(made, unit):
    edit(made, lambda body: body["checks"].update(canary="skipped by request", canary_report=None))
    root = page(made)
    assert [check.text() for check in root.one("ul", "checks").all("li", "open")] == [
        "Logits not recomputed: it needs the model's folder: --model FOLDER",
        "Canary skipped by request at the capture of 1 job",
    ]
    assert root.one("section", "verdict").text().endswith("every layer. Not checked: logits, canary.")
    assert "Token ids, because no tokenizer was read: give --model FOLDER" in root.one("p", "key").text()
    assert root.all("bdi", "id")
    assert page(made, unit.model.folder).one("section", "verdict").text().endswith("Not checked: canary.")


def test_samples_are_shown_as_text_with_their_supervised_part_marked(right_page, unit):
    by_name = {row.source_id or row.sample_id: row for row in unit.rows}
    articles = right_page.all("article")
    assert len(articles) == 3
    for article in articles:
        row = by_name[article.one("h4").text()]
        words = {VOCAB_SIZE - 2: EVIL, VOCAB_SIZE - 1: "<U+202E>"}
        expected = [words.get(token, f"w{token}") for token in row.input_ids]
        half = len(expected) // 2
        shown = article.one("div", "tokens")
        assert shown.text().split() == " ".join(expected).split()
        supervised = [mark.text() for mark in shown.all("mark")]
        assert " ".join(supervised).split() == " ".join(expected[half:]).split()


def test_the_border_between_prompt_and_answer_is_shown(made, unit, rewrite):
    rewrite([renamed(row, prompt_tokens=max(1, len(row.input_ids) - 3)) for row in unit.rows])
    root = page(made, unit.model.folder)
    long = [node for node in root.all("article") if "the target's answer begins at token" in node.text()]
    assert long
    for article in long:
        runs = article.one("div", "tokens")
        assert len(runs.all("span", "border")) == 1
        at = runs.children.index(runs.one("span", "border"))
        after = [
            node for node in runs.children[at:] if isinstance(node, Node) and node.tag in {"bdi", "mark"}
        ]
        assert len(after) == 3


def test_text_of_a_dataset_is_never_markup(made, unit, rewrite):
    """The ways in: a source id, a token, a file's name, and what a manifest says of model and engine."""
    tokens = [VOCAB_SIZE - 2, VOCAB_SIZE - 1]
    rewrite(
        [
            renamed(row, source_id=f"{EVIL}{number}", input_ids=(tokens * 40)[: len(row.input_ids)])
            for number, row in enumerate(unit.rows)
        ]
    )
    (made / "data" / "<svg onload=alert(1)>.parquet").write_bytes(b"")
    edit(made, lambda body: body["provenance"]["identity"].update(model=EVIL, revision=EVIL))
    edit(made, lambda body: body["provenance"]["engine"].update(name=EVIL, options={EVIL: EVIL}))
    edit(made, lambda body: body["checks"]["canary_report"].update(reference=EVIL))
    edit(made, lambda body: body["extras"][0].update(sha256=EVIL))
    reject = {"position": 9, "source_id": None, "sample_id": None, "reason": EVIL, "detail": EVIL}
    edit(made, lambda body: body["rejects"].append(reject))
    report, text = pages(made, unit.model.folder)
    root = read_page(text)
    assert not report.ok
    assert not {node.tag for node in root.nodes()} & {"script", "img"}
    assert [svg for svg in root.all("svg") if "onload" in svg.attributes] == []
    assert root.text().count("document.title='owned'") > 10
    assert "\u202e" not in text
    assert "<U+202E>" in root.text()


def test_a_broken_dataset_has_its_findings_before_all_else(made, unit, rewrite):
    rows = list(unit.rows)
    states = rows[4].states[2].clone()
    states[16:] = 0
    rows[4] = with_states(rows[4], 2, states)
    rewrite(rows)
    root = page(made)
    assert root.one("section", "verdict").text().startswith("The dataset is BROKEN 1 error found.")
    fault = f"row 4 ({rows[4].sample_id}): layer 2: all zero in 17 of 33 tokens, the first at 16"
    assert root.one("section", "findings").one("dl").text() == f"{shard_path(JOB, 0)} {fault}"
    sections = [node.attributes.get("class") for node in root.one("main").children if isinstance(node, Node)]
    assert sections[:3] == ["verdict broken", "card findings", "tiles"]
    assert [cell.text() for cell in root.all("td", "alarm")] == ["17"]
    assert [odd.text() for odd in root.all("p", "odd")] == ["layer 2: 17 tokens all zero"]
    assert [node.attributes["class"] for node in root.one("ul", "checks").all("li")][1] == "failed"


def test_a_row_that_the_engine_did_not_see_is_red(made, unit, rewrite):
    says = unit.model.run(unit.rows[4].input_ids)
    rows = [*unit.rows[:4], with_states(unit.rows[4], NUM_LAYERS, says.layers[NUM_LAYERS - 1])]
    rewrite(rows)
    root = page(made, unit.model.folder)
    assert len(root.all("circle", "bad")) == 2
    assert [odd.text() for odd in root.all("p", "odd")] == ["Rows drawn that are not what the engine saw: 1"]
    logits = root.one("ul", "checks").all("li")[3]
    assert logits.attributes["class"] == "failed"
    assert logits.text().startswith("Logits ")


def test_rows_without_a_supervised_token_are_pointed_out(made, unit, rewrite):
    rewrite([renamed(row, loss_mask=[0] * len(row.input_ids)) for row in unit.rows])
    odd = page(made).all("p", "odd")
    assert [line.text() for line in odd] == ["5 rows hold no supervised token: nothing is learnt from them."]


def test_what_the_canary_was_run_on_is_told(made):
    fact = "4 prompts with 276 tokens in all, against a forward pass by transformers 5.19.0."
    assert page(made).all("figure")[3].one("p", "fact").text() == fact


@pytest.mark.parametrize("cut", [0, 1000])
def test_a_shard_that_cannot_be_read_leaves_a_page_without_charts_of_its_rows(made, cut):
    path = made / shard_path(JOB, 0)
    path.write_bytes(path.read_bytes()[:-1000] if cut else b"")
    root = page(made)
    assert [chart.one("h4").text() for chart in root.all("figure")] == [CANARY]
    assert root.all("article") == []
    assert [row[5] for row in root.all("table")[0].cells()[1:]] == ["-"] * len(LAYER_IDS)
    assert (
        root.one("dl", "tiles")
        .text()
        .startswith("samples 0 of 5 0 rejected, with a reason tokens 0 - layers 3")
    )


def test_a_dataset_without_a_manifest_has_a_page(made):
    (made / manifest_path(JOB)).unlink()
    root = page(made)
    assert root.all("section", "job") == []
    verdict = root.one("section", "verdict")
    assert verdict.text().startswith("The dataset is not complete yet Nothing wrong was found.")
    assert verdict.attributes["class"] == "verdict broken", "never as a right one"
    assert root.one("title").text().startswith("not complete yet: ")


def test_jobs_that_are_not_complete_are_counted_beside_the_verdict(made):
    assert "Not complete" not in page(made).one("section", "verdict").text()
    stored = made / shard_path("j-0000000000000000", 0)
    stored.parent.mkdir()
    stored.write_bytes(b"x")
    verdict = page(made).one("section", "verdict").text()
    assert verdict.startswith("The dataset is right")
    assert "Not complete, and so not read: 1 job without a manifest." in verdict


def test_several_jobs_have_a_section_each_and_a_list(made, unit, tmp_path):
    other = second_job(made, tmp_path)
    root = page(made)
    sections = [node.attributes["id"] for node in root.all("section", "job")]
    assert sections == [f"job-{other}", f"job-{JOB}"]
    assert [link.attributes["href"] for link in root.one("nav").all("a")] == [f"#{name}" for name in sections]
    for section in root.all("section", "job"):
        assert len(section.all("figure")) == 6
    assert root.one("dl", "tiles").text().startswith("samples 10 ")


def test_the_shards_and_the_rejects_are_told(made, unit):
    reject = {"position": 5, "source_id": None, "sample_id": None, "reason": "empty", "detail": "no tokens"}

    def change(body: dict) -> None:
        body["rejects"].append(reject)
        body["totals"].update(samples_planned=6, samples_rejected=1)

    edit(made, change)
    report, text = pages(made)
    assert report.ok, report.findings
    *_, rejects, shards = read_page(text).all("table")
    assert rejects.cells()[1] == ["empty", "1", "no tokens"]
    manifest = Manifest.model_validate_json((made / manifest_path(JOB)).read_text())
    (entry,) = manifest.shards
    file, number, rows, tokens, _, digest = shards.cells()[1]
    assert (file, number, rows, tokens, digest) == (entry.path, "0", "5", "74", entry.sha256[:12])


def test_numbers_of_a_manifest_that_are_no_numbers_make_a_page(made):
    def change(body: dict) -> None:
        body["checks"]["canary_report"]["layers"][0].update(max_rel_error=float("inf"))
        body["checks"].update(logit_max_error=float("inf"))
        body["provenance"]["final_norm"].update(eps=float("nan"))

    edit(made, change)
    assert page(made).all("figure")[3].all("table")[0].cells()[1][2] == "infinite"


def test_of_very_many_findings_the_first_are_listed_and_the_rest_counted():
    errors = MAX_FINDINGS + 5
    findings = tuple(Finding(path=f"data/{number % 100}", what="x" * 10_000) for number in range(errors))
    report = VerifyReport(
        **dict.fromkeys(("jobs", "shards", "rows", "tokens", "bytes", "logit_rows", "logit_argmax_agree"), 0),
        where="w" * 10_000,
        logit_max_error=0.0,
        findings=findings,
    )
    text = render_page(report, DatasetTally(), None, NOW)
    section = read_page(text).one("section", "findings")
    assert len(section.all("dd")) == MAX_FINDINGS
    assert len(section.all("dt")) == 100
    assert "and 5 more" in section.text()
    assert len(text) < 300_000


def test_another_models_tokenizer_is_told(made, unit):
    """The support's manifests name a tokenizer that no folder holds; then one that this folder holds."""
    warning = "The tokenizer files of this folder are not those of the job"
    assert warning in page(made, unit.model.folder).one("p", "key").text()
    digest = files_digest(unit.model.folder, TOKENIZER_FILES)
    edit(made, lambda body: body["provenance"]["identity"].update(tokenizer_sha256=digest))
    assert page(made, unit.model.folder).one("p", "key").all("span", "muted") == []


def test_the_page_says_when_it_was_made(made):
    assert page(made).one("time").text() == "2025-03-01 12:30 UTC"


def test_the_same_dataset_makes_the_same_page(made, unit):
    assert pages(made, unit.model.folder)[1] == pages(made, unit.model.folder)[1]
