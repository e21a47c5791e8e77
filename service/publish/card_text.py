"""The text of the dataset card: what stands in the repository, what was proven, and how a row is read."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from textwrap import fill

from schemas.dataset.jobs_table import JobEntry
from schemas.identity import LayerInfo
from schemas.names import is_local_model

INDEX_CONFIG = "index"
WIDTH = 100
SHOWN_JOBS = 30
"""In the tables of jobs: a repository that gets a job every night holds hundreds."""
BEFORE_ALL = datetime.min.replace(tzinfo=UTC)

READ_PLAIN = """\
raw = torch.frombuffer(bytearray(row["{column}"]), dtype=torch.{dtype})
hidden = raw.view(row["num_tokens"], row["hidden_size"])
supervised = torch.tensor(row["loss_mask"], dtype=torch.bool)"""

READ_PLANES = """\
hi, lo = (torch.frombuffer(bytearray(row["{column}_" + p]), dtype=torch.uint8) for p in ("hi", "lo"))
raw = torch.cat([lo.view(len(hi), -1), hi.view(-1, 1)], dim=1).view(torch.{dtype})
hidden = raw.view(row["num_tokens"], row["hidden_size"])"""

READ_FP8 = """\
codes = torch.frombuffer(bytearray(row["{column}"]), dtype=torch.float8_e4m3fn).float()
scales = torch.frombuffer(bytearray(row["{column}_scale"]), dtype=torch.float32)
hidden = (codes.view(row["num_tokens"], -1) * scales[:, None]).to(torch.{dtype})"""

READERS = {"none": READ_PLAIN, "planes": READ_PLANES, "fp8": READ_FP8}

READING = """\
## Reading a row

```python
import pyarrow.parquet as pq, torch
row = pq.ParquetFile("{shard}").read_row_group(0).to_pylist()[0]
{lines}
```

{note}

{trap}"""

STORAGE = {"none": "none", "planes": "planes (lossless)", "fp8": "fp8 (lossy: within 1/17 of each value)"}

SUMMARY = (
    "{samples:,} samples, {tokens:,} tokens, for training EAGLE-style drafters. One row a sample, one column "
    "a layer, un-shifted: row `t` of a column is the state of token `t`."
)
FILES = (
    "`manifests/<job>.json` accounts for every sample and holds the sha256 of each file; "
    "`token_freq/<job>.parquet` counts the supervised tokens; `final_norm.safetensors` is the target's final "
    "norm: with it anyone can make the post-norm state from the pre-norm one."
)
READING_ROWS = "A row group is one row; name the `columns` you need, and only those are read."
READING_NOTE = (
    f"{READING_ROWS} `layer_<k>` holds raw little-endian `[num_tokens, hidden_size]` of the dtype below, in "
    "C order."
)
READING_FP8 = (
    "**The states are lossy.** `layer_<k>` holds codes of 8 bits (E4M3, torch's `float8_e4m3fn`) "
    "`[num_tokens, hidden_size]`, `layer_<k>_scale` a float32 a token; a state is their product. Each "
    "token's largest magnitude is kept to 20 bits. Any other value is off by at most 1/17 (5.9 %) of itself, "
    "or by 1/458,752 of that largest magnitude where this is more. That bound was held against every value "
    "when it was stored."
)
READING_TRAP = (
    "**Trap:** with `datasets`, do not read the states through `with_format('torch')` or "
    "`with_format('numpy')`: both make fixed-width strings of binary values and strip their trailing zero "
    "bytes. Take the plain Python rows, or `with_format('arrow')`."
)
MORE_JOBS = "The newest {shown} of {number} jobs; `jobs.json` has all."
VOCABULARY = (
    "How often every token is supervised, over the rows that are stored, stands in "
    "`token_freq/<job>.parquet` (`token_id`, `count`): a draft vocabulary of any size follows from it."
)


def card_text(groups: Mapping[str, Sequence[JobEntry]]) -> str:
    """Return the card's body; `groups` holds the jobs of every states configuration, each at least one."""
    every = [job for group in groups.values() for job in group]
    first = every[0]
    samples = sum(job.totals.samples_written for job in every)
    tokens = sum(job.totals.tokens for job in every)
    configs = [
        f"- `{INDEX_CONFIG}` (default): ids, lengths, token ids, masks, and where the states of a sample are."
    ]
    configs += [f"- `{name}`: the states of {len(groups[name])} job(s)." for name in sorted(groups)]
    parts = [
        f"# Hidden states of {first.provenance.identity.model}",
        _paragraph(SUMMARY.format(samples=samples, tokens=tokens)),
        "\n".join(configs),
        _paragraph(FILES),
        _reading(first),
    ]
    for name in sorted(groups):
        group = groups[name]
        newest = sorted(group, key=lambda job: job.captured_at or BEFORE_ALL, reverse=True)[:SHOWN_JOBS]
        parts += [
            f"## Configuration `{name}`",
            _model(group[0]),
            _layers(group[0]),
            *([MORE_JOBS.format(shown=SHOWN_JOBS, number=len(group))] if len(group) > SHOWN_JOBS else []),
            _jobs(newest),
            _proof(newest),
        ]
        parts += _vocabulary(newest)
        parts += _rejects(group)
        parts += _left_out(newest)
    return "\n\n".join(parts)


def _reading(job: JobEntry) -> str:
    identity = job.provenance.identity
    note = _paragraph(READING_NOTE)
    if identity.compression == "fp8":
        note = f"{_paragraph(READING_ROWS)}\n\n{_paragraph(READING_FP8)}"
    return READING.format(
        shard=job.first_shard,
        lines=READERS[identity.compression].format(
            column=f"layer_{identity.layer_ids[-1]}", dtype=identity.dtype
        ),
        note=note,
        trap=_paragraph(READING_TRAP),
    )


def _model(job: JobEntry) -> str:
    identity, norm = job.provenance.identity, job.provenance.final_norm
    local = is_local_model(identity.model)
    model = f"`{identity.model}`" if local else f"[{identity.model}](https://huggingface.co/{identity.model})"
    return _table(
        ("target", model),
        [
            ("revision", f"`{identity.revision}`"),
            ("dtype, hidden size", f"{identity.dtype}, {identity.hidden_size}"),
            ("decoder layers", str(identity.num_layers)),
            ("final norm", f"{norm.kind}, eps {norm.eps:g}"),
            (
                "storage",
                f"{STORAGE[identity.compression]}, "
                f"{identity.state_bytes_per_token:,} bytes a token uncompressed",
            ),
        ],
    )


def _layers(job: JobEntry) -> str:
    def told(layer: LayerInfo) -> tuple[str, ...]:
        state = "pre-final-norm" if layer.norm_state == "pre_final_norm" else "residual stream"
        ids = (layer.vllm_id, layer.hf_index, layer.zero_based)
        return (
            f"`layer_{layer.vllm_id}`",
            *("-" if number is None else str(number) for number in ids),
            state,
        )

    header = ("column", "vLLM id", "HF `hidden_states` index", "0-based layer output", "state")
    return _table(header, [told(layer) for layer in job.provenance.layers])


def _jobs(group: Sequence[JobEntry]) -> str:
    rows = []
    for job in group:
        made, totals = job.provenance, job.totals
        template = made.identity.template_sha256
        counts = (totals.samples_written, totals.samples_rejected, totals.tokens, totals.supervised_tokens)
        engine = f"{made.engine.name} {made.engine.version} on {made.engine.device}"
        rows.append(
            (
                f"`{made.job_id}`",
                f"{job.captured_at:%Y-%m-%d %H:%M} UTC" if job.captured_at else "-",
                *(f"{count:,}" for count in (*counts, totals.bytes)),
                made.identity.recipe(),
                f"`{template[:16]}`" if template else "-",
                f"{engine}, quarry {made.service_version}",
            )
        )
    counted = ("samples", "rejected", "tokens", "supervised", "shard bytes")
    return _table(("job", "captured", *counted, "recipe", "template sha256", "made by"), rows)


def _proof(group: Sequence[JobEntry]) -> str:
    rows = []
    for job in group:
        checks, cosine = job.checks, job.checks.canary_min_cosine
        canary = checks.canary if cosine is None else f"{checks.canary}, cosine >= {cosine:.6f}"
        numbers = (checks.rows_checked, checks.logit_rows, checks.logit_argmax_agree)
        told = (*(f"{number:,}" for number in numbers), f"{checks.logit_max_error:.3g}", canary)
        rows.append((f"`{job.job_id}`", *told))
    return _table(
        ("job", "rows checked", "against logits", "same argmax", "max logprob error", "canary"), rows
    )


def _vocabulary(group: Sequence[JobEntry]) -> list[str]:
    """Tell which share of the supervised tokens drafters with smaller vocabularies could draft."""
    told = [(job.job_id, job.totals.supervised_tokens, job.vocabulary) for job in group if job.vocabulary]
    if not told:
        return []
    sizes = sorted({part.draft_vocab for *_, stats in told for part in stats.coverage})
    rows = []
    for job_id, supervised, stats in told:
        covered = {part.draft_vocab: f"{part.tokens / supervised:.3%}" for part in stats.coverage}
        rows.append((f"`{job_id}`", f"{stats.token_ids:,}", *(covered.get(size, "all") for size in sizes)))
    header = ("job", "supervised token ids", *(f"in the {size:,} most frequent" for size in sizes))
    return [_paragraph(VOCABULARY), _table(header, rows)]


def _rejects(group: Sequence[JobEntry]) -> list[str]:
    reasons: Counter[str] = Counter()
    for job in group:
        reasons.update(job.rejects)
    rows = [(why, f"{count:,}") for why, count in sorted(reasons.items())]
    return [_table(("rejected because", "samples"), rows)] if rows else []


def _left_out(group: Sequence[JobEntry]) -> list[str]:
    """Say which samples of their sources the jobs of a schedule did not take."""
    rows = [
        (f"`{job.job_id}`", f"{job.totals.samples_known:,}", f"{job.totals.samples_given_up:,}")
        for job in group
        if job.totals.samples_known or job.totals.samples_given_up
    ]
    return [_table(("job", "written by earlier runs", "left to the next run"), rows)] if rows else []


def _paragraph(text: str) -> str:
    return fill(text, WIDTH, break_on_hyphens=False, break_long_words=False)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
