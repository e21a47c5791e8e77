"""The body of `POST /extract` and `POST /estimate`: what to capture, from what, how, and where it goes."""

import hashlib
from collections.abc import Iterator
from itertools import count
from pathlib import PurePath
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from schemas.base import Wire
from schemas.digest import canonical_json
from schemas.generate import MIX_LABEL, Generate, TemplateKwargs
from schemas.names import ConfigName, LabelName, RepoId, is_local_model, shown_model
from schemas.source import MAX_LABELS, MAX_SAMPLE_TOKENS, InlineSource, JsonObject, Name, Repeatable, Source
from schemas.webhook import Webhook

MAX_LAYER_ID = 1024
MAX_LAYERS = 128
MAX_TEMPLATE_CHARS = 262_144
MAX_PARTS = 10_000

LayerId = Annotated[int, Field(ge=0, le=MAX_LAYER_ID, strict=True)]


Template = Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEMPLATE_CHARS)]
LayerPreset = Literal["eagle3", "eagle", "mtp", "dflash"]
LossRule = Literal["assistant", "last_turn", "all"]
Duplicates = Literal["same_id_and_tokens", "same_tokens"]
"""Samples with equal tokens and loss mask are duplicates only if their ids are equal too, or always."""
TooLong = Literal["truncate", "reject"]
Dtype = Literal["bfloat16", "float16", "float32"]
Compression = Literal["none", "planes", "fp8"]
"""How a layer is stored: as it is, losslessly in two planes, or lossily as 8-bit codes with scales."""


class Part(Wire):
    """One of `of` shares of a source: every `of`-th row from the `index`-th on, counted from 1."""

    index: int = Field(ge=1, le=MAX_PARTS, strict=True)
    of: int = Field(ge=1, le=MAX_PARTS, strict=True)

    @model_validator(mode="after")
    def _is_one_of_them(self) -> Self:
        if self.index > self.of:
            raise ValueError(f"there is no part {self}: the last is {self.of}/{self.of}")
        return self

    def __str__(self) -> str:
        """Return `3/16` for the third of sixteen."""
        return f"{self.index}/{self.of}"


# Left out of the JSON where it is null, so that other jobs have the ids and digests that they had without it.
OptionalPart = Annotated[Part | None, Field(exclude_if=lambda part: part is None)]


class Storage(Wire):
    """How shards are stored on disk, and how long they stay there."""

    compression: Compression = "none"
    shard_bytes: int = Field(default=2**31, ge=2**16, le=2**34, description="planned size of a shard")
    keep_local: bool = Field(
        default=True,
        description="false: a job with `hub` deletes each local shard once the repository has it",
    )
    retention: Literal["keep", "consumed"] = Field(
        default="keep",
        description="consumed: a job without `hub` deletes each shard once all of its consumers have it",
    )

    @property
    def stays(self) -> bool:
        """Whether the shards stay in the data folder."""
        return self.keep_local and self.retention == "keep"


class HubTarget(Wire):
    """The dataset repository that the shards are pushed to."""

    repo_id: RepoId
    private: bool = True
    config_name: ConfigName = "default"


class ExtractRequest(Wire):
    """The whole job. Layer ids are vLLM's.

    Id `k` is the residual stream after `k` of the `N` decoder layers; id `N` is before the final norm.
    """

    model: Name = Field(description="a Hub repository, or a folder below one of the model roots")
    revision: Name | None = Field(default=None, description="of the model's repository; null means its head")
    dtype: Literal["auto"] | Dtype = Field(
        default="auto", description="'auto' takes it from the model's config"
    )
    layers: LayerPreset | tuple[LayerId, ...] = Field(default="eagle3", description="a preset, or layer ids")
    final_layer: bool = Field(default=True, description="add layer N, the state before the final norm")
    source: Source
    part: OptionalPart = Field(default=None, description="capture only this share of the source's rows")
    loss: LossRule = Field(default="assistant", description="which turns' tokens are supervised")
    chat_template: Template | None = Field(default=None, description="replaces the tokenizer's own")
    chat_template_kwargs: TemplateKwargs = Field(
        default={}, description="variables of the template, such as {'enable_thinking': false}"
    )
    tools: tuple[JsonObject, ...] = Field(
        default=(), max_length=256, description="for samples that have none"
    )
    min_supervised_tokens: int = Field(
        default=1,
        ge=1,
        le=MAX_SAMPLE_TOKENS,
        description="samples with fewer are rejected; not with `generate`",
    )
    duplicates: Duplicates = Field(
        default="same_id_and_tokens",
        description="which samples are equal; the first is kept, across all files",
    )
    labels: tuple[LabelName, ...] = Field(
        default=(),
        max_length=MAX_LABELS,
        description="columns of the source that the index stores as `label_<name>`",
    )
    max_tokens: int = Field(
        default=4096, ge=1, le=MAX_SAMPLE_TOKENS, description="limit for a sample, answers included"
    )
    on_too_long: TooLong = Field(default="truncate", description="always 'reject' with `generate`")
    generate: Generate | None = Field(default=None, description="let the target answer each prompt")
    storage: Storage = Storage()
    canary: Literal["run", "skip"] = Field(
        default="run", description="compare the states with a reference run"
    )
    hub: HubTarget | None = Field(default=None, description="null keeps the dataset in the data folder")
    webhook: Webhook | None = Field(default=None, description="called when the job ends or is blocked")

    @field_validator("labels")
    @classmethod
    def _each_once(cls, labels: tuple[str, ...]) -> tuple[str, ...]:
        if len({name.lower() for name in labels}) < len(labels):
            raise ValueError(f"'labels' names a column twice: {sorted(labels)}")
        return labels

    @field_validator("layers")
    @classmethod
    def _layer_list(cls, layers: LayerPreset | tuple[LayerId, ...]) -> LayerPreset | tuple[LayerId, ...]:
        if isinstance(layers, tuple):
            if not 1 <= len(layers) <= MAX_LAYERS:
                raise ValueError(f"'layers' needs 1 to {MAX_LAYERS} ids; got {len(layers)}")
            if len(set(layers)) != len(layers):
                raise ValueError(f"'layers' names an id twice: {sorted(layers)}")
        return layers

    @model_validator(mode="after")
    def _fields_go_together(self) -> Self:
        if MIX_LABEL in self.labels and self.generate is not None and self.generate.mix:
            raise ValueError(f"'labels' names {MIX_LABEL!r}, which is the entry of 'generate.mix' here")
        if self.hub is None and not self.storage.keep_local:
            raise ValueError("'storage.keep_local': false goes with 'hub', where the shards are then")
        if self.hub is not None and self.storage.retention == "consumed":
            raise ValueError("'storage.retention': 'consumed' goes without 'hub', which keeps the shards")
        if self.repeat != 1 and self.storage.retention != "consumed":
            raise ValueError(
                "'source.repeat' goes with 'storage.retention': 'consumed': the rows are the same"
            )
        if self.part is not None and isinstance(self.source, Repeatable) and self.source.seed is not None:
            raise ValueError("'source.seed' goes without 'part', which would be other rows in each pass")
        if self.generate is not None and self.min_supervised_tokens > 1:
            raise ValueError("'min_supervised_tokens' cannot be asked of answers before they are generated")
        return self

    @property
    def repeat(self) -> int | Literal["forever"]:
        """How many passes over the source the job takes."""
        return self.source.repeat if isinstance(self.source, Repeatable) else 1

    @property
    def label_names(self) -> tuple[str, ...]:
        """Return the labels in the index: those of the source, and the one of `generate.mix`."""
        return (*self.labels, *((MIX_LABEL,) if self.generate is not None and self.generate.mix else ()))

    def positions(self) -> Iterator[int]:
        """Yield the positions in the source, from 0, of the rows that the job takes."""
        return count() if self.part is None else count(self.part.index - 1, self.part.of)

    def published(self) -> "PublishedRequest":
        """Return the request as a dataset shows it."""
        shown = self.model_dump(mode="json")
        shown["source"].pop("samples", None)
        shown["webhook"] = None  # its URL may be a secret
        shown["model"] = shown_model(self.model)
        for source in (shown["source"], *(part["source"] for part in shown["source"].get("sources", ()))):
            if is_local_model(source.get("path", "")):
                source["path"] = PurePath(source["path"]).name
        return PublishedRequest.model_validate(shown)

    def sha256(self) -> str:
        """Return the digest of the canonical JSON."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()

    def canonical_json(self) -> str:
        """Return the request as JSON with sorted keys: equal requests give equal text."""
        value = self.model_dump(mode="json", exclude={"source": {"samples"}})
        if isinstance(self.source, InlineSource):
            # One by one: while C code copies all of them, no other thread runs.
            value["source"]["samples"] = [sample.model_dump(mode="json") for sample in self.source.samples]
        return canonical_json(value)


class PublishedRequest(BaseModel):
    """A request as a manifest shows it: without inline samples, and with names instead of host paths."""

    model_config = ConfigDict(extra="allow", frozen=True)

    hub: HubTarget | None = None
