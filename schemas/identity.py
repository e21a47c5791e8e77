"""What must match for two runs to be the same dataset, and how each convention names the layers."""

from typing import Any, Literal

from pydantic import Field, JsonValue, model_validator

from schemas.base import Count, Wire
from schemas.digest import canonical_json, canonical_sha256
from schemas.generate import CapturePasses, Generate
from schemas.names import JobId
from schemas.request import Compression, Dtype, Duplicates, LossRule, OptionalPart, TooLong

SCHEMA_VERSION = 2
"""Version of the dataset format. Version 1 was written before Quarry 0.2.0."""

DTYPE_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}

NormKind = Literal["rmsnorm", "gemma_rmsnorm", "layernorm"]
"""`gemma_rmsnorm` multiplies by (1 + weight)."""


class FinalNorm(Wire):
    """The target's final norm.

    Apply it with its weight (`final_norm.safetensors`) to get the post-norm state.
    """

    kind: NormKind
    eps: float


class LayerInfo(Wire):
    """One captured layer in the three conventions in use.

    vLLM id `k` is the residual stream after `k` decoder layers. Hugging Face's `hidden_states[k]` is the same
    tensor for k < N, but its entry N is post-norm, so `hf_index` is null there. `zero_based` counts layer
    outputs from 0 (SGLang, ModelOpt, DFlash); null for the embeddings.
    """

    vllm_id: int
    hf_index: int | None
    zero_based: int | None
    norm_state: Literal["residual_stream", "pre_final_norm"]


def layer_info(layer_id: int, num_layers: int) -> LayerInfo:
    """Name vLLM layer id `layer_id` of a model of `num_layers` decoder layers in every convention."""
    last = layer_id == num_layers
    return LayerInfo(
        vllm_id=layer_id,
        hf_index=None if last else layer_id,
        zero_based=layer_id - 1 if layer_id else None,
        norm_state="pre_final_norm" if last else "residual_stream",
    )


class Versioned(Wire):
    """A document of a dataset. Another format version is refused as such, whatever else it holds."""

    schema_version: int = SCHEMA_VERSION

    @model_validator(mode="before")
    @classmethod
    def _of_this_version(cls, data: Any) -> Any:  # noqa: ANN401 - whatever was read
        version = data.get("schema_version", SCHEMA_VERSION) if isinstance(data, dict) else SCHEMA_VERSION
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"format version {version!r}, expected {SCHEMA_VERSION}: capture the dataset anew with this "
                "version of Quarry, or read it with the version that made it"
            )
        return data


class Identity(Versioned):
    """Everything that determines the bytes of a dataset, apart from the engine's rounding.

    A resumed job must not change it.
    """

    model: str
    """A repository of the Hub, or `./` and the name of a local model's folder."""
    revision: str
    """Commit of the model repository, or the sha256 of a local model's config and weight index."""
    dtype: Dtype
    hidden_size: Count
    num_layers: Count
    layer_ids: tuple[Count, ...]
    tokenizer_sha256: str
    template_sha256: str | None
    source_fingerprint: str
    loss: LossRule
    max_tokens: int
    on_too_long: TooLong
    generate: Generate | None
    capture: CapturePasses | None
    compression: Compression
    chat_template_kwargs: dict[str, JsonValue] = Field(default={})
    tools_sha256: str | None = None
    """Of the canonical JSON of the tools given to samples without their own."""
    min_supervised_tokens: int = 1
    labels: tuple[str, ...] = ()
    duplicates: Duplicates = "same_id_and_tokens"
    part: OptionalPart = None
    """The share taken of the rows that `source_fingerprint` covers."""
    weights_sha256: str | None = None
    """Of all weights of a local model; null for a Hub model, which its commit identifies."""

    def sha256(self) -> str:
        """Return the digest of the canonical JSON."""
        return canonical_sha256(self.model_dump(mode="json"))

    def model_sha256(self) -> str:
        """Return a digest of the model itself, whatever its location and name."""
        fields = {"revision", "weights_sha256", "tokenizer_sha256"}
        return canonical_sha256(self.model_dump(mode="json", include=fields))

    def recipe(self) -> str:
        """Return the loss rule and the other choices of rendering and selection, in words."""
        parts: list[str] = [self.loss]
        parts += [f"{name}={canonical_json(value)}" for name, value in self.chat_template_kwargs.items()]
        if self.tools_sha256 is not None:
            parts.append(f"tools {self.tools_sha256[:8]}")
        if self.min_supervised_tokens > 1:
            parts.append(f"at least {self.min_supervised_tokens} supervised")
        if self.duplicates == "same_tokens":
            parts.append("no equal tokens")
        if self.part is not None:
            parts.append(f"part {self.part} of the rows")
        if self.labels:
            parts.append(f"labels {' '.join(self.labels)}")
        return ", ".join(parts)

    def differences(self, other: "Identity") -> list[str]:
        """Return the names of the fields that differ."""
        return [name for name in Identity.model_fields if getattr(self, name) != getattr(other, name)]

    def recipe_sha256(self) -> str:
        """Return the digest of everything that determines a sample's states, whatever its source."""
        return canonical_sha256(self.model_dump(mode="json", exclude={"source_fingerprint", "part"}))

    @property
    def is_rendered_again(self) -> bool:
        """Whether rows are compared with the template's rendering of their conversations."""
        return self.generate is not None and self.generate.is_rendered_again

    @property
    def state_bytes_per_token(self) -> int:
        """Bytes of hidden states per token, as captured: before planes or fp8."""
        return len(self.layer_ids) * self.hidden_size * DTYPE_BYTES[self.dtype]


class EngineInfo(Wire):
    """The engine that computed the states, with the options that can change their rounding."""

    name: str
    version: str
    device: str
    options: dict[str, str | int | float | bool | None]

    @property
    def title(self) -> str:
        """Its name and version."""
        return f"{self.name} {self.version}"


class Provenance(Wire):
    """How a dataset was made, and from what; stored in every shard's metadata and in the manifest."""

    job_id: JobId
    identity: Identity
    layers: tuple[LayerInfo, ...]
    final_norm: FinalNorm
    engine: EngineInfo
    service_version: str
