"""Runs a diagnosis: the drafter over rows of the dataset, the changes tried, and statistics of the data."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from service.diagnose import acceptance
from service.diagnose.acceptance import Drafts, Length, RowPredictions
from service.diagnose.drafter import FORMS, Drafter
from service.diagnose.rows import OWN_SHARE, Asked, asked, fed, spread
from service.diagnose.target import TargetWeights, objectives, read_target
from service.diagnose.tried import Search, search
from service.errors import SourceRefused
from service.export.options import Algorithm, ExportOptions, FormatName
from service.export.source import Source, open_dataset, refusing_datasets

SEARCH_ROWS, SEARCH_PLACES = 40, 32
"""How many rows are used to try changes, each of which is a separate forward pass, and places in each row."""
WORST_ROWS = 8
LITTLE = 0.25
"""A drafter that accepts less than this share of the most-frequent-token baseline has learnt next to
nothing.
"""
BEGINS = (0, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Lower bounds of the groups by number of tokens."""


@dataclass(frozen=True, slots=True)
class Data:
    """Statistics of the rows. Shares are of supervised tokens, but `supervised` is of all tokens."""

    rows: int
    tokens: int
    supervised: float
    own: float
    in_vocabulary: float
    frequent: float
    """How often the most frequent next token is right: the baseline of a drafter without states."""
    same_tokenizer: bool


@dataclass(frozen=True, slots=True)
class WorstRow:
    """A row, and the number of accepted tokens of each draft, by place."""

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
    untrained: bool
    """Whether no training changed its norms and it has learnt next to nothing: then no change was tried."""
    first_right: float
    first_odds: float
    """Mean probability that it gives its first draft; a trained drafter is right about at least as often."""
    by_step: list[float]
    groups: dict[str, dict[str, Length]]
    search: Search
    data: Data
    worst: list[WorstRow]


def diagnose(
    folder: Path, dataset: str, target: str | None, num_rows: int
) -> tuple[Diagnosis, Source, TargetWeights]:
    """Measure the drafter in `folder` over `num_rows` evenly spaced rows of the dataset.

    Raises OptionRefused (`drafter`, `target`), SourceRefused (`dataset`), UnknownModel.
    """
    with refusing_datasets():
        options = ExportOptions(to=FormatName.SPECULATORS, algorithm=Algorithm.MTP, target=target)
        source = open_dataset(dataset, options)
        model = read_target(source)
        return _measured(folder, dataset, source, Drafter(folder, model), num_rows), source, model


def _measured(folder: Path, dataset: str, source: Source, drafter: Drafter, num_rows: int) -> Diagnosis:
    rows, layer_ids = source.rows, source.rows.about.layer_ids
    missing = sorted(set(drafter.declared.layers) - set(layer_ids))
    if missing:
        raise SourceRefused(
            f"the dataset holds the layers {list(layer_ids)}; the drafter is fed {missing} as well",
            field="dataset",
            cure=f'capture a few rows with "layers": {sorted({*drafter.declared.layers, *layer_ids})} '
            "in the job, or fix the drafter's config.json if it is of other layers",
        )
    given = [
        one
        for number in spread(len(rows), num_rows)
        if (one := asked(number, rows.row(number), drafter.target))
    ]
    if len(given) < 2:  # the drafter is tried on the states of another row
        what = f"two rows with a supervised token are needed, got {len(given)}"
        raise SourceRefused(what, field="dataset", cure="name another dataset")
    predictions = [_read(drafter, one) for one in given]
    rates_K = acceptance.step_rates(predictions)
    played = [predicted for predicted in predictions if predicted.own] or predictions
    drafts = acceptance.drafts_of(played, rates_K)
    data = _data(given, drafter)
    untrained = drafter.is_untouched and float(rates_K[0]) < LITTLE * data.frequent
    some = [given[place].thinned(SEARCH_PLACES) for place in spread(len(given), SEARCH_ROWS)]
    return Diagnosis(
        drafter=str(folder),
        dataset=dataset,
        form=FORMS[drafter.form],
        layers=drafter.declared.layers,
        drafted=drafter.steps,
        played=played[0].own and drafter.exact,
        length=acceptance.length(drafts),
        untrained=untrained,
        first_right=float(rates_K[0]),
        first_odds=float(np.mean([predicted.odds for predicted in predictions])),
        by_step=drafts.accepted_DK.mean(axis=0).tolist(),
        groups=_groups(source, drafts),
        search=search(drafter, some, objectives(drafter.target, layer_ids), layer_ids, changed=not untrained),
        data=data,
        worst=_worst(source, drafts, predictions),
    )


def _read(drafter: Drafter, one: Asked) -> RowPredictions:
    """Return where the drafter, fed according to its config, agrees with the target."""
    ids_T, states_TF = fed(drafter.declared, one.row, one.row)
    logits_KRD = drafter.logits(ids_T, states_TF, one.places_R, drafter.declared)
    odds_KR, drafted_KR = logits_KRD.softmax(-1).max(-1)
    of_KR, known_KR = one.drafted_at(drafter.steps)
    right_KR = drafter.map_D[drafted_KR] == one.top_T[of_KR.clamp(max=one.row.num_tokens - 1)]
    arrays = [array.numpy() for array in (one.places_R, one.begins_R, right_KR, known_KR)]
    return RowPredictions(one.number, one.own_share >= OWN_SHARE, float(odds_KR[0].mean()), *arrays)


def _groups(source: Source, drafts: Drafts) -> dict[str, dict[str, Length]]:
    num_tokens = np.array(source.rows.num_tokens)[drafts.row_D]
    names = {
        "by position in the answer, from": acceptance.begin_of(drafts.position_D, BEGINS),
        "by tokens of the row, from": acceptance.begin_of(num_tokens, BEGINS),
    }
    jobs = [manifest.provenance.identity.labels for manifest in source.rows.manifests.values()]
    for label in source.identity.labels:
        if not all(label in labels for labels in jobs):
            continue
        names[f"by {label}"] = np.array([str(value) for value in source.rows.labels(label)])[drafts.row_D]
    return {name: acceptance.by_group(drafts, names_D) for name, names_D in names.items()}


def _data(given: Sequence[Asked], drafter: Drafter) -> Data:
    tokens = sum(one.row.num_tokens for one in given)
    supervised = torch.cat([one.fed_R for one in given])
    own = sum(one.own_share * len(one.places_R) for one in given) / len(supervised)
    # The token fed at each place, and the target's prediction after it.
    pairs = [
        list(zip(one.fed_R.tolist(), one.top_T[one.places_R + 1].tolist(), strict=True)) for one in given
    ]
    half = len(given) // 2
    counts = Counter(pair for row in pairs[:half] for pair in row)
    most = dict(pair for pair, _ in reversed(counts.most_common()))
    return Data(
        rows=len(given),
        tokens=tokens,
        supervised=len(supervised) / tokens,
        own=own,
        in_vocabulary=float(torch.isin(supervised, drafter.map_D).float().mean()),
        frequent=float(np.mean([most.get(token) == after for row in pairs[half:] for token, after in row])),
        same_tokenizer=drafter.target.same_tokenizer,
    )


def _worst(source: Source, drafts: Drafts, predictions: Sequence[RowPredictions]) -> list[WorstRow]:
    by_number = {predicted.number: predicted for predicted in predictions}
    lengths = acceptance.by_group(drafts, drafts.row_D)
    worst = []
    for number in sorted(map(int, lengths), key=lambda number: lengths[str(number)].mean)[:WORST_ROWS]:
        predicted, row = by_number[number], source.rows.row(number)
        accepted = acceptance.accepted(predicted.right_KR & predicted.known_KR).sum(axis=0)
        by_place = dict(zip(predicted.places_R.tolist(), accepted.tolist(), strict=True))
        worst.append(WorstRow(number, row.source_id or row.sample_id, lengths[str(number)].mean, by_place))
    return worst
