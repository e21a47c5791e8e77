"""Runs a diagnosis: the drafter over rows of the dataset, what was tried, what the data are like.

Legend: K drafted tokens, D draft vocabulary, V vocabulary, H hidden size.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from service.diagnose import acceptance
from service.diagnose.acceptance import Drafts, Length, Reading
from service.diagnose.drafter import FORMS, Drafter, TargetWeights
from service.diagnose.rows import Asked, Head, asked, read, said_at
from service.diagnose.tried import Tried, search, targets
from service.errors import EngineRefused, OptionRefused, SourceRefused
from service.export.options import Algorithm, ExportOptions, FormatName
from service.export.source import Source, open_source
from service.export.target import find_target
from service.plan.model_folder import TOKENIZER_FILES, files_digest
from service.proof.head_weights import read_head, text_config
from service.reader import ReaderError

SEARCH_ROWS, SEARCH_PLACES = 40, 32
"""Rows for the changes, each of which is a forward pass of its own, and places in each."""
WORST_ROWS = 8
_LENGTHS = (0, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True)
class Data:
    """What the rows are like. Shares are of supervised tokens, but `supervised`, of all."""

    rows: int
    tokens: int
    supervised: float
    own: float
    in_vocabulary: float
    frequent: float
    """How often the token that most often follows is right: what a drafter without states reaches."""
    same_tokenizer: bool
    """Whether the target's folder has the tokenizer and template files that the dataset was made with."""


@dataclass(frozen=True, slots=True)
class WorstRow:
    """A row, and how many tokens of each draft were accepted, by the place that it is of."""

    number: int
    sample: str
    length: float
    accepted: dict[int, float]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything measured. `played`: rows are the target's own answers, so `length` is what a server gets."""

    drafter: str
    dataset: str
    form: str
    layers: tuple[int, ...]
    drafted: int
    played: bool
    length: Length
    every_place: float
    first_right: float
    by_step: list[float]
    sampled_greedy_drafts: float
    sampled_drawn_drafts: float
    by_position: dict[str, Length]
    by_length: dict[str, Length]
    by_label: dict[str, dict[str, Length]]
    tried: list[Tried]
    causes: list[Tried]
    learnt: list[Tried]
    missing_layers: list[int]
    data: Data
    worst: list[WorstRow]


@dataclass(frozen=True, slots=True)
class Ground:
    """The dataset and what of its target is needed."""

    source: Source
    weights: TargetWeights
    head: Head
    embeddings: Head


def diagnose(folder: Path, dataset: str, target: str | None, num_rows: int) -> tuple[Diagnosis, Ground]:
    """Measure the drafter in `folder` over `num_rows` rows of the dataset, evenly spread.

    Raises OptionRefused (`drafter`, `target`), SourceRefused (`dataset`), UnknownModel.
    """
    try:
        ground = _ground(dataset, target)
        drafter = Drafter(folder, ground.weights)
        return _measured(folder, dataset, ground, drafter, num_rows), ground
    except ReaderError as error:
        cure = "run 'quarry verify' on it, or name the root of a dataset that Quarry made"
        raise SourceRefused(str(error), field="dataset", cure=cure) from error


def _ground(dataset: str, target: str | None) -> Ground:
    options = ExportOptions(to=FormatName.SPECULATORS, algorithm=Algorithm.MTP, target=target)
    source = open_source(dataset, options)
    found = find_target(source, with_weights=True)
    try:
        embedding_VH, head_VH = found.embedding_and_head()
        weights = read_head(found.folder, text_config(found.folder))
    except EngineRefused as error:
        cure = "give --target a folder with the target's weights: its embeddings and head are read"
        raise OptionRefused(error.detail, field="target", cure=cure) from error
    if head_VH.shape[-1] != source.rows.about.hidden_size:
        raise OptionRefused(
            f"{found.folder} has states of {head_VH.shape[-1]}, expected {source.rows.about.hidden_size}",
            field="target",
            cure="name the folder of the model that the dataset was made with",
        )
    shared = TargetWeights(found.folder, embedding_VH, head_VH, source.rows.about.num_layers)
    return Ground(source, shared, Head(weights), Head(replace(weights, weight_VH=embedding_VH, bias_V=None)))


def _measured(folder: Path, dataset: str, ground: Ground, drafter: Drafter, num_rows: int) -> Diagnosis:
    rows, head = ground.source.rows, ground.head
    about = rows.about
    missing = sorted(set(drafter.declared.layers) - set(about.layer_ids))
    if missing:
        raise SourceRefused(
            f"the dataset holds the layers {list(about.layer_ids)}; the drafter is fed {missing} as well",
            field="dataset",
            cure=f'capture a few rows with "layers": {sorted({*drafter.declared.layers, about.num_layers})} '
            "in the job, or mend the drafter's config.json if it is of other layers",
        )
    step = max(1, len(rows) // num_rows)
    numbers = range(0, len(rows), step)[:num_rows]
    given = [one for number in numbers if (one := asked(number, rows.row(number), head)) is not None]
    if not given:
        raise SourceRefused("no row has a supervised token", field="dataset", cure="name another dataset")
    readings = []
    for at, one in enumerate(given):
        said_KRV = said_at(one, drafter.steps, head)
        readings.append(read(drafter, drafter.declared, one, given[at - 1], said_KRV)[1])
    played = [reading for reading in readings if reading.own] or readings
    rates_K = acceptance.step_rates(readings)
    drafts = [acceptance.drafts_of(reading, rates_K) for reading in played]
    some = [one.thinned(SEARCH_PLACES) for one in given[:: max(1, len(given) // SEARCH_ROWS)][:SEARCH_ROWS]]
    others = targets(about.num_layers, head, ground.embeddings, about.layer_ids)
    found = search(drafter, some, others, about.layer_ids, about.num_layers)
    return Diagnosis(
        drafter=str(folder),
        dataset=dataset,
        form=FORMS[drafter.form],
        layers=drafter.declared.layers,
        drafted=drafter.steps,
        played=played[0].own and drafter.exact,
        length=acceptance.length(drafts),
        every_place=1 + acceptance.mean([acceptance.score(one.right_KR, one.known_KR) for one in readings]),
        first_right=float(rates_K[0]),
        by_step=acceptance.by_step(drafts),
        sampled_greedy_drafts=acceptance.sampled_length(readings, "chance_KR"),
        sampled_drawn_drafts=acceptance.sampled_length(readings, "overlap_KR"),
        by_position=acceptance.by_position(drafts),
        by_length=acceptance.by_group(drafts, lambda number: _length_group(rows.num_tokens[number])),
        by_label=_by_label(ground.source, drafts),
        tried=found.tried,
        causes=found.causes,
        learnt=found.learnt,
        missing_layers=sorted(found.missing_layers),
        data=_data(given, drafter, ground.source.identity.tokenizer_sha256),
        worst=_worst(ground.source, drafts, readings),
    )


def _length_group(num_tokens: int) -> str:
    begin = max(least for least in _LENGTHS if num_tokens >= least)
    return f"{begin:5d}"


def _by_label(source: Source, drafts: Sequence[Drafts]) -> dict[str, dict[str, Length]]:
    by_label = {}
    for name in source.identity.labels:
        values = source.rows.labels(name)
        by_label[name] = acceptance.by_group(drafts, lambda number, values=values: str(values[number]))  # type: ignore[misc]
    return by_label


def _data(given: Sequence[Asked], drafter: Drafter, tokenizer_sha256: str) -> Data:
    tokens = sum(one.row.num_tokens for one in given)
    places = sum(len(one.places_R) for one in given)
    in_draft_V = torch.zeros(len(drafter.target.head_VH), dtype=torch.bool).index_fill_(
        0, drafter.map_D, True
    )
    covered = sum(int(in_draft_V[one.row.input_ids[one.places_R + 1]].sum()) for one in given)
    follows: defaultdict[int, Counter[int]] = defaultdict(Counter)
    half = max(1, len(given) // 2)
    for one in given[:half]:
        for token, after in zip(one.row.input_ids[one.places_R + 1].tolist(), _next(one), strict=True):
            follows[token][after] += 1
    most = {token: counts.most_common(1)[0][0] for token, counts in follows.items()}
    rest = given[half:] or given
    right = sum(
        most.get(token) == after
        for one in rest
        for token, after in zip(one.row.input_ids[one.places_R + 1].tolist(), _next(one), strict=True)
    )
    return Data(
        rows=len(given),
        tokens=tokens,
        supervised=places / tokens,
        own=sum(one.own_share * len(one.places_R) for one in given) / places,
        in_vocabulary=covered / places,
        frequent=right / max(1, sum(len(one.places_R) for one in rest)),
        same_tokenizer=files_digest(drafter.target.folder, TOKENIZER_FILES) == tokenizer_sha256,
    )


def _next(one: Asked) -> list[int]:
    """Return what the target says after the token that is fed at each place."""
    said: list[int] = one.top_T[one.places_R + 1].tolist()
    return said


def _worst(source: Source, drafts: Sequence[Drafts], readings: Sequence[Reading]) -> list[WorstRow]:
    by_number = {reading.number: reading for reading in readings}
    ranked = sorted(drafts, key=lambda row: row.accepted_DK.sum() / max(1, len(row.positions_D)))[:WORST_ROWS]
    worst = []
    for row in ranked:
        reading = by_number[row.number]
        accepted = acceptance.prefixes(reading.right_KR & reading.known_KR).sum(axis=0)
        by_place = dict(zip(reading.places_R.tolist(), accepted.tolist(), strict=True))
        mean = 1 + float(row.accepted_DK.sum()) / max(1, len(row.positions_D))
        light = source.rows.row(row.number)
        worst.append(WorstRow(row.number, light.source_id or light.sample_id, mean, by_place))
    return worst
