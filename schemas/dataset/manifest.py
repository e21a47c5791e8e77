"""The manifest: the complete record of a job. Every planned sample is in a shard or among the rejects."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

from pydantic import AwareDatetime, Field, ValidationError, model_validator
from pydantic_core import to_jsonable_python

from schemas.base import Count, Wire, first_fault
from schemas.dataset.entries import FileEntry, ShardEntry
from schemas.dataset.errors import DatasetError
from schemas.digest import canonical_sha256
from schemas.identity import Provenance, Versioned
from schemas.job import RejectView
from schemas.names import FINAL_NORM_PATH, JobId, index_path, manifest_path, shard_path, token_freq_path
from schemas.request import PublishedRequest


class UnitChecks(Wire):
    """What was proven of one unit; `CheckReport` sums these over the job."""

    rows_checked: Count = Field(description="rows covered by the always-on checks: all of them")
    logit_rows: Count = Field(description="rows whose last logits were recomputed from the sealed bytes")
    logit_argmax_agree: Count
    logit_max_error: float = Field(
        ge=0, description="largest |log-probability difference| over the logit rows"
    )
    answers: dict[str, Count] = Field(
        default={},
        exclude_if=lambda counts: not counts,
        description="counts of conversations and of how answers ended",
    )
    second_runs: Count = Field(
        default=0,
        exclude_if=lambda count: not count,
        description="rows that were computed a second time, in another batch, and had the same states",
    )
    second_run_cosine: float | None = Field(
        default=None,
        ge=-1.001,
        le=1.001,
        exclude_if=lambda cosine: cosine is None,
        description="of those rows, the median over the tokens of the worst layer and piece",
    )

    @model_validator(mode="after")
    def _parts_of_the_whole(self) -> Self:
        if not self.logit_argmax_agree <= self.logit_rows <= self.rows_checked:
            agree, checked = self.logit_argmax_agree, self.rows_checked
            raise ValueError(f"{agree} of {self.logit_rows} logit rows agree, of {checked} rows checked")
        if (self.second_run_cosine is None) != (self.second_runs == 0):
            raise ValueError(f"{self.second_runs} rows ran twice, with a cosine of {self.second_run_cosine}")
        return self


class LayerAgreement(Wire):
    """One captured layer against the reference in its dtype: cosine and relative distance of its tokens."""

    layer_id: Count
    cosine: float = Field(ge=-1.001, le=1.001, description="median over the tokens")
    max_rel_error: float = Field(ge=0, description="of the worst token; a flipped router choice shows here")
    misfits: float = Field(
        default=0,
        ge=0,
        le=1,
        exclude_if=lambda share: not share,
        description="share of tokens further off than a second run allows; flipped router choices show here",
    )
    best_match_layer: Count = Field(description="the nearest layer of the reference, which is its own")
    median_rel_error: float | None = Field(
        default=None, ge=0, description="against float32, if rounding errors are large"
    )
    own_median_rel_error: float | None = Field(default=None, ge=0, description="of the reference itself")

    @model_validator(mode="after")
    def _nearest_to_its_own(self) -> Self:
        if self.best_match_layer != self.layer_id:
            raise ValueError(f"layer {self.layer_id} is nearest to layer {self.best_match_layer}")
        return self


class CanaryReport(Wire):
    """A passed canary: how close the engine's states are to a forward pass by another library."""

    job_id: JobId = Field(description="the job that it ran for; others may rely on it")
    prompts: Count
    tokens: Count
    layers: tuple[LayerAgreement, ...] = Field(min_length=1)
    reference: str = Field(description="the library of the reference, with its version")
    seconds: float = Field(ge=0, description="run time of the reference")
    peak_bytes: Count = Field(description="peak memory of the reference's process")

    @property
    def min_cosine(self) -> float:
        """The worst layer's cosine."""
        return min(layer.cosine for layer in self.layers)

    @property
    def noise(self) -> str | None:
        """Describe the rounding noise of the model's dtype; None if the reference in that dtype matched."""
        layers = [one for one in self.layers if one.own_median_rel_error is not None]
        if not layers:
            return None
        worst = max(layers, key=lambda one: one.own_median_rel_error or 0.0)
        return (
            "against float32, since rounding takes this model far: "
            f"at layer {worst.layer_id} the median token is {worst.median_rel_error:.2e} off, "
            f"the reference's own in the job's dtype {worst.own_median_rel_error:.2e}"
        )


CanaryState = Literal["passed", "cached", "skipped by request"]


class CheckReport(UnitChecks):
    """What was proven, in numbers."""

    canary: CanaryState
    canary_report: CanaryReport | None = Field(default=None, description="null if it was skipped")

    @model_validator(mode="after")
    def _reported_unless_skipped(self) -> Self:
        if (self.canary_report is None) != (self.canary == "skipped by request"):
            raise ValueError(f"the canary is {self.canary!r}, and its report is {self.canary_report!r}")
        return self


class Totals(Wire):
    """Sums over the job."""

    samples_planned: Count
    samples_written: Count
    samples_rejected: Count
    samples_known: Count = 0
    """Of a schedule's job: rows of its source that an earlier run has written."""
    samples_given_up: Count = 0
    """Of a schedule's job that did not end by itself: left to the next run."""
    tokens: Count
    supervised_tokens: Count
    bytes: Count


class Coverage(Wire):
    """How many of the supervised tokens are among the `draft_vocab` most frequent ones."""

    draft_vocab: Count
    tokens: Count


class VocabularyStats(Wire):
    """How the supervised tokens spread over the vocabulary. The count of each is in `token_freq/`."""

    token_ids: Count = Field(description="distinct token ids that are supervised at least once")
    coverage: tuple[Coverage, ...] = Field(description="for common draft vocabulary sizes below that")


def body_sha256(body: Mapping[str, Any]) -> str:
    """Return the digest of a manifest's canonical JSON without its own `sha256`."""
    rest = {name: value for name, value in body.items() if name != "sha256"}
    return canonical_sha256(to_jsonable_python(rest, inf_nan_mode="constants"))


class Manifest(Versioned):
    """The content of `manifests/<job>.json`, which is only written for a whole job."""

    provenance: Provenance
    identity_sha256: str
    request: PublishedRequest
    request_sha256: str = Field(description="of the whole request as canonical JSON")
    shards: tuple[ShardEntry, ...] = Field(min_length=1)
    indexes: tuple[FileEntry, ...]
    extras: tuple[FileEntry, ...] = Field(description="final_norm.safetensors and the token counts")
    rejects: tuple[RejectView, ...]
    totals: Totals
    checks: CheckReport
    vocabulary: VocabularyStats
    captured_at: AwareDatetime = Field(description="when capture was complete, before the push")
    sha256: str = Field(default_factory=body_sha256, description="of everything else as canonical JSON")

    @property
    def entries(self) -> tuple[FileEntry, ...]:
        """Every file that the manifest names."""
        return (*self.shards, *self.indexes, *self.extras)

    @property
    def is_consumed(self) -> bool:
        """Whether the job's shards were removed once its consumers had read them."""
        storage = (self.request.model_extra or {}).get("storage")
        return isinstance(storage, dict) and storage.get("retention") == "consumed"


def read_manifest(content: bytes, path: str) -> tuple[Manifest, tuple[str, ...]]:
    """Return the manifest in the file that a dataset has at `path`, and how it contradicts itself.

    It is not to be trusted unless the second is empty: the file was changed, or is another job's. Raises
    DatasetError.
    """
    try:
        manifest = Manifest.model_validate_json(content)
    except ValidationError as error:
        raise DatasetError(f"{path} is not a manifest of this version: {first_fault(error)}") from error
    return manifest, tuple(_contradictions(manifest, json.loads(content), path))


def _contradictions(job: Manifest, body: Mapping[str, Any], path: str) -> Iterator[str]:
    totals, identity = job.totals, job.provenance.identity
    job_id = job.provenance.job_id
    units = {entry.unit for entry in job.shards}
    rows = sum(entry.rows for entry in job.shards)
    report, layer_ids = job.checks.canary_report, list(identity.layer_ids)
    pairs = {
        "sha256": (body.get("sha256"), body_sha256(body)),
        "file name": (path, manifest_path(job_id)),
        "identity_sha256": (job.identity_sha256, identity.sha256()),
        "layers": ([layer.vllm_id for layer in job.provenance.layers], layer_ids),
        "totals.samples_written": (totals.samples_written, rows),
        "totals.samples_rejected": (totals.samples_rejected, len(job.rejects)),
        "totals.samples_planned": (totals.samples_planned, rows + len(job.rejects)),
        "totals.tokens": (totals.tokens, sum(entry.tokens for entry in job.shards)),
        "totals.bytes": (totals.bytes, sum(entry.bytes for entry in job.shards)),
        "checks.canary_report.layers": (
            layer_ids if report is None else [layer.layer_id for layer in report.layers],
            layer_ids,
        ),
        "checks.rows_checked": (job.checks.rows_checked, rows),
    }
    # Each is cut: of a stranger's manifest any of them may be long.
    for name, (stated, expected) in pairs.items():
        if stated != expected:
            yield f"{name} is {stated!r:.300}, expected {expected!r:.300}"
    for name, entries, paths in (
        ("indexes", job.indexes, {index_path(job_id, unit) for unit in units}),
        ("extras", job.extras, {FINAL_NORM_PATH, token_freq_path(job_id)}),
    ):
        named = {entry.path for entry in entries}
        for fault, differing in (("lacks", paths - named), ("has", named - paths)):
            if differing:  # of 100,000 units they may be as many
                more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
                yield f"list of {name} {fault} {min(differing)!r:.300}{more}"
    for shard in job.shards:
        # Where several ranks write, each has a shard of the unit.
        if re.sub(r"-r\d+\.parquet$", ".parquet", shard.path) != shard_path(job_id, shard.unit):
            yield f"{shard.path!r:.300} is not the path of a shard of unit {shard.unit}"
        if (measured := [layer.layer_id for layer in shard.layers]) != layer_ids:
            yield f"layers of {shard.path!r:.300} are {measured!r:.300}, expected {layer_ids!r:.300}"
    for entry, count in Counter(entry.path for entry in job.entries).items():
        if count > 1:
            yield f"list of files has {entry!r:.300} {count} times"
