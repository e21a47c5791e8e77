"""What the page says of one job: facts, tables, charts and samples, as the template takes them.

All text is plain and most of it the dataset's own: the template escapes it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from schemas.dataset.manifest import Manifest
from schemas.identity import LayerInfo
from service.proof.layer_tally import LayerTally
from service.proof.tally import JobTally, Sample
from service.report.sample_text import Decode, token_texts
from service.report.wording import count, number, rms_text, short, size
from service.visible import visible

MAX_SHARDS = 500
MAX_NARROW = 36
"""Characters of a fact that is shown beside others; longer ones take a line."""
HEAD_TOKENS, TAIL_TOKENS = 320, 80
"""What is shown of a longer row."""
_NEWLINE = "\u21b5\n"
_SHA_CHARS = 12
_QUANTILES = (*(f"RMS {share}\u00a0%" for share in (1, 5, 50, 95, 99)),)


@dataclass(frozen=True, slots=True)
class Table:
    """A table of plain text."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    alarms: frozenset[tuple[int, str]] = frozenset()
    """Cells that say what is wrong: number of the row, and the column's header."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token at its place in the row; `text` is None where only the id is known."""

    place: int
    id: int
    text: str | None
    supervised: bool


@dataclass(frozen=True, slots=True)
class SampleView:
    """One row to look at: all its tokens, or its first and last ones."""

    sample: Sample
    supervised_tokens: int
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class JobView:
    """One job's part of the page."""

    job: Manifest
    tally: JobTally
    measured: Mapping[int, LayerTally]
    facts: tuple[tuple[str, str], ...]
    layers: Table
    shards: Table
    shards_left: int
    rejects: Table
    samples: tuple[SampleView, ...]


def job_view(job: Manifest, tally: JobTally, tokenizer: tuple[Decode, int] | None) -> JobView:
    """Return the part of one job; with a `tokenizer` its samples are text, else token ids."""
    layers = dict(sorted(tally.layers.items()))
    return JobView(
        job=job,
        tally=tally,
        measured=layers,
        facts=tuple(sorted(_facts(job), key=lambda fact: len(fact[1]) > MAX_NARROW)),
        layers=_layer_table(job.provenance.layers, layers),
        shards=_shard_table(job),
        shards_left=max(0, len(job.shards) - MAX_SHARDS),
        rejects=_reject_table(job),
        samples=tuple(_sample_view(sample, tokenizer) for sample in tally.samples.items()),
    )


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
    sizes = layer.rms((0.01, 0.05, 0.5, 0.95, 0.99))
    wrong = (layer.zero, layer.constant, layer.not_finite)
    return (
        count(layer.tokens),
        *map(rms_text, sizes),
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
    light = sample.light
    if light.num_tokens <= HEAD_TOKENS + TAIL_TOKENS:
        parts = [range(light.num_tokens)]
    else:
        parts = [range(HEAD_TOKENS), range(light.num_tokens - TAIL_TOKENS, light.num_tokens)]
    tokens = tuple(token for part in parts for token in _tokens(sample, part, tokenizer))
    return SampleView(sample, int((light.loss_mask != 0).sum()), tokens)


def _tokens(sample: Sample, part: range, tokenizer: tuple[Decode, int] | None) -> Iterator[Token]:
    ids = sample.light.input_ids[part.start : part.stop].tolist()
    texts = [None] * len(ids) if tokenizer is None else token_texts(ids, *tokenizer)
    for place, token, text in zip(part, ids, texts, strict=True):
        shown = None if text is None else visible(text).replace("\n", _NEWLINE)
        yield Token(place, token, shown, bool(sample.light.loss_mask[place]))
