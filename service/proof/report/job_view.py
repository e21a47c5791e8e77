"""What the page says of one job: facts, tables, charts and samples, as the template takes them.

All text is plain and most of it the dataset's own: the template escapes it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from schemas.dataset.manifest import Manifest
from schemas.identity import LayerInfo
from service.proof.report import model_charts, row_charts, state_charts
from service.proof.report.figure import Figure
from service.proof.report.layer_tally import LayerTally
from service.proof.report.sample_text import Decode, token_texts
from service.proof.report.tally import JobTally, Sample, SamplePart
from service.proof.report.wording import count, number, percent, short, size
from service.visible import visible

MAX_SHARDS = 500
MAX_NARROW = 36
"""Characters of a fact that stands beside others; longer ones take a line."""
_NEWLINE = "\u21b5\n"
_SHA_CHARS = 12
_QUANTILES = ("RMS 1\u00a0%", "RMS 50\u00a0%", "RMS 99\u00a0%")


@dataclass(frozen=True, slots=True)
class Table:
    """A table of plain text."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    alarms: frozenset[tuple[int, str]] = frozenset()
    """Cells that say what is wrong: number of the row, and the column's header."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token at its place in the row; `text` is none where only the id is known."""

    place: int
    id: int
    text: str | None


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens in a row that are supervised or not alike.

    `skipped` counts tokens left out before it; `border` says that the target's own answer begins with it.
    """

    tokens: tuple[Token, ...]
    supervised: bool
    skipped: int = 0
    border: bool = False


@dataclass(frozen=True, slots=True)
class SampleView:
    """One row to look at."""

    sample_id: str
    source_id: str | None
    shard: str
    row: int
    num_tokens: int
    supervised_tokens: int
    share: str
    answer_from: int | None
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class JobView:
    """One job's part of the page."""

    job_id: str
    model: str
    rows: str
    hidden_size: int
    facts: tuple[tuple[str, str], ...]
    layers: Table
    shards: Table
    shards_left: int
    rejects: Table
    states: list[Figure] = field(default_factory=list)
    model_charts: list[Figure] = field(default_factory=list)
    row_charts: list[Figure] = field(default_factory=list)
    samples: list[SampleView] = field(default_factory=list)

    @property
    def anchor(self) -> str:
        """The section's id on the page."""
        return f"job-{self.job_id}"


def job_view(job: Manifest, tally: JobTally, tokenizer: tuple[Decode, int] | None) -> JobView:
    """Return the part of one job; with a `tokenizer` its samples are text, else token ids."""
    made = job.provenance
    layers = dict(sorted(tally.layers.items()))
    view = JobView(
        job_id=made.job_id,
        model=made.identity.model,
        rows=count(tally.lengths.total()),
        hidden_size=made.identity.hidden_size,
        facts=tuple(sorted(_facts(job), key=lambda fact: len(fact[1]) > MAX_NARROW)),
        layers=_layer_table(made.layers, layers),
        shards=_shard_table(job),
        shards_left=max(0, len(job.shards) - MAX_SHARDS),
        rejects=_reject_table(job),
    )
    if layers:
        view.states.extend(
            (state_charts.ridge(layers), state_charts.growth(layers), state_charts.places(layers))
        )
    if tally.points.items() or tally.faulty_points.items():
        view.model_charts.extend((model_charts.agreement(tally), model_charts.residuals(tally)))
    if job.checks.canary_report is not None and job.checks.canary_report.layers:
        view.model_charts.append(model_charts.canary(job.checks.canary_report))
    if tally.lengths:
        view.row_charts.extend((row_charts.lengths(tally), row_charts.shares(tally)))
    view.samples.extend(_sample_view(sample, tokenizer) for sample in tally.samples.items())
    return view


def _facts(job: Manifest) -> Iterator[tuple[str, str]]:
    made, identity = job.provenance, job.provenance.identity
    norm = made.final_norm
    yield "model", identity.model
    yield "revision", identity.revision
    yield "dtype", identity.dtype
    yield "hidden size, decoder layers", f"{count(identity.hidden_size)}, {count(identity.num_layers)}"
    yield "final norm", f"{norm.kind}, eps {norm.eps:g}"
    yield "engine", f"{made.engine.name} {made.engine.version} on {made.engine.device}"
    for name, value in made.engine.model_dump(exclude={"name", "version", "device", "options"}).items():
        yield f"engine {name}".replace("_", " "), str(value)
    yield "engine options", _options(made.engine.options)
    yield "loss rule", identity.loss
    yield "longest sample", f"{count(identity.max_tokens)} tokens, else {identity.on_too_long}"
    yield (
        "storage",
        f"{identity.compression}, {size(identity.state_bytes_per_token)} a token before compression",
    )
    yield "answers", "by the target" if identity.generate else "as in the source"
    yield "source", identity.source_fingerprint
    yield "made by", f"Quarry {made.service_version}"


def _options(options: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(options.items())) or "none"


def _layer_table(names: Sequence[LayerInfo], layers: Mapping[int, LayerTally]) -> Table:
    header = ("column", "vLLM id", "HF index", "0\u2011based output", "state", "tokens measured")
    measured = (*_QUANTILES, "largest |value|", "all zero", "constant", "not finite")
    rows, alarms = [], set()
    for row, name in enumerate(names):
        ids = (name.vllm_id, name.hf_index, name.zero_based)
        about = ("-" if known is None else str(known) for known in ids)
        layer = layers.get(name.vllm_id)
        found = ("-",) * (len(measured) + 1) if layer is None else _measured(layer)
        rows.append((f"layer_{name.vllm_id}", *about, name.norm_state.replace("_", " "), *found))
        alarms |= {(row, what) for what in (layer.faults(name.vllm_id) if layer is not None else ())}
    return Table((*header, *measured), tuple(rows), frozenset(alarms))


def _measured(layer: LayerTally) -> tuple[str, ...]:
    sizes = layer.rms((0.01, 0.5, 0.99))
    wrong = (layer.zero, layer.constant, layer.not_finite)
    return (
        count(layer.tokens),
        *map(state_charts.rms_text, sizes),
        number(layer.max_abs),
        *map(count, wrong),
    )


def _shard_table(job: Manifest) -> Table:
    header = ("file", "unit", "rows", "tokens", "bytes", "sha256")
    rows = tuple(
        (
            short(entry.path),
            *map(count, (entry.unit, entry.rows, entry.tokens)),
            size(entry.bytes),
            short(entry.sha256[:_SHA_CHARS]),
        )
        for entry in job.shards[:MAX_SHARDS]
    )
    return Table(header, rows)


def _reject_table(job: Manifest) -> Table:
    reasons = Counter(reject.reason for reject in job.rejects)
    example = {reject.reason: reject.detail for reject in reversed(job.rejects)}
    rows = tuple(
        (short(why), count(samples), short(example[why])) for why, samples in reasons.most_common(50)
    )
    return Table(("because", "samples", "for example"), rows)


def _sample_view(sample: Sample, tokenizer: tuple[Decode, int] | None) -> SampleView:
    answered = sample.prompt_tokens < sample.num_tokens
    return SampleView(
        sample_id=sample.sample_id,
        source_id=sample.source_id,
        shard=sample.shard,
        row=sample.row,
        num_tokens=sample.num_tokens,
        supervised_tokens=sample.supervised_tokens,
        share=percent(sample.supervised_tokens / sample.num_tokens),
        answer_from=sample.prompt_tokens if answered else None,
        runs=tuple(_runs(sample, tokenizer)),
    )


def _runs(sample: Sample, tokenizer: tuple[Decode, int] | None) -> Iterator[Run]:
    told = 0
    for part in sample.parts:
        skipped = part.start - told
        told = part.start + len(part.ids)
        tokens = zip(_tokens(part, tokenizer), part.supervised, strict=True)
        key = lambda pair: (pair[0].place >= sample.prompt_tokens, pair[1])  # noqa: E731
        for (answer, supervised), run in groupby(tokens, key):
            members = tuple(token for token, _ in run)
            border = answer and members[0].place == sample.prompt_tokens
            yield Run(members, supervised, skipped, border)
            skipped = 0


def _tokens(part: SamplePart, tokenizer: tuple[Decode, int] | None) -> Iterator[Token]:
    texts = [None] * len(part.ids) if tokenizer is None else token_texts(part.ids, *tokenizer)
    for place, (token, text) in enumerate(zip(part.ids, texts, strict=True), part.start):
        yield Token(place, token, None if text is None else visible(text).replace("\n", _NEWLINE))
