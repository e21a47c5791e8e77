"""The Arrow schemas on disk: the shard, the light index, the frozen plan; and the bytes of a layer.

A row group is one row. A layer of a row is one uncompressed PLAIN page of a `large_binary` column, without
dictionary or statistics, so that one `pread` reads one layer of one row.
"""

from collections.abc import Iterable

import pyarrow as pa

from schemas.identity import DTYPE_BYTES

METADATA_KEY = b"quarry"
"""Key of the JSON document (`Provenance`) in a shard's Parquet key-value metadata."""

LAYER_PREFIX = "layer_"


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


def _list_of(kind: pa.DataType) -> pa.DataType:
    return pa.list_(_required("element", kind))


_NAMES = (_required("sample_id", pa.string()), pa.field("source_id", pa.string()))
_NUM_TOKENS, _PROMPT_TOKENS = (_required(name, pa.int32()) for name in ("num_tokens", "prompt_tokens"))
_TOKENS = (_required("input_ids", _list_of(pa.int32())), _required("loss_mask", _list_of(pa.uint8())))

SCALE_BYTES = 4
"""Size of a token's scale with `fp8`: a float32."""


def layer_columns(layer_ids: tuple[int, ...], compression: str) -> tuple[str, ...]:
    """Return the state columns in file order.

    One per layer, or two: `_hi` and `_lo` with `planes`, codes and `_scale` with `fp8`.
    """
    return tuple(f"{LAYER_PREFIX}{k}{suffix}" for k in layer_ids for suffix in _SUFFIXES[compression])


_SUFFIXES = {"none": ("",), "planes": ("_hi", "_lo"), "fp8": ("", "_scale")}


def _stored(column: str, hidden_size: int, dtype: str, compression: str) -> dict[str, str]:
    """Return a state column's field metadata, which describes its bytes."""
    metadata = {"dtype": dtype, "shape": f"[num_tokens, {hidden_size}]", "layout": "C,little-endian"}
    if compression == "fp8":
        if column.endswith("_scale"):
            return metadata | {"dtype": "float32", "shape": "[num_tokens]"}
        return metadata | {"dtype": "float8_e4m3fn", "times": f"{column}_scale", "gives": dtype}
    return metadata


def shard_schema(layer_ids: tuple[int, ...], hidden_size: int, dtype: str, compression: str) -> pa.Schema:
    """Return a shard's schema.

    A layer's value is the raw little-endian `[T, H]` of `dtype` in C order; with `fp8` it is one-byte codes
    `[T, H]`, with float32 scales `[T]` in a second column (`schemas.dataset.codecs.fp8`). `checksums` holds
    the xxh3_64 of each *layer's* raw bytes (before any split into planes; with `fp8` the codes followed by
    the scales), in ascending layer order.
    """
    layers = [
        _required(name, pa.large_binary()).with_metadata(_stored(name, hidden_size, dtype, compression))
        for name in layer_columns(layer_ids, compression)
    ]
    light = (*_NAMES, _NUM_TOKENS, _PROMPT_TOKENS, _required("hidden_size", pa.int32()), *_TOKENS)
    checksums = _required("checksums", _list_of(pa.uint64()))
    return pa.schema([*light, *layers, checksums])


WITH_STATISTICS = ("sample_id", "num_tokens")
"""Filters use these statistics to find row groups. For the states they would cost more than everything else
together.
"""

ZSTD_LEVEL = 1


def is_packed(field: pa.Field) -> bool:
    """Return whether a shard's column is compressed with zstd: lists, and the high planes of states."""
    is_state = field.name.startswith(LAYER_PREFIX)
    return bool(field.name.endswith("_hi") if is_state else pa.types.is_list(field.type))


INDEX_SCHEMA = pa.schema(
    [
        *_NAMES,
        _NUM_TOKENS,
        _PROMPT_TOKENS,
        _required("supervised_tokens", pa.int32()),
        *_TOKENS,
        _required("shard", pa.string()),
        _required("row", pa.int32()),
        pa.field("top_tokens", _list_of(pa.int32())),
        pa.field("top_logprobs", _list_of(pa.float32())),
    ]
)
"""`top_tokens` are the engine's 16 most likely tokens after a row's last token, the most likely first, and
`top_logprobs` their log-probabilities, so that the logit check can be repeated on a finished dataset.
Both are null where layer N is not captured. `shard` is a path inside the repository."""

LABEL_PREFIX = "label_"


def with_labels(schema: pa.Schema, labels: Iterable[str]) -> pa.Schema:
    """Return the schema of a plan or an index with a nullable string column for each label."""
    return pa.schema([*schema, *(pa.field(f"{LABEL_PREFIX}{name}", pa.string()) for name in labels)])


def labels_of(schema: pa.Schema) -> list[str]:
    """Return the names of a plan's or an index's labels."""
    return [name.removeprefix(LABEL_PREFIX) for name in schema.names if name.startswith(LABEL_PREFIX)]


PLAN_SCHEMA = pa.schema([_required("position", pa.int64()), *_NAMES, _PROMPT_TOKENS, *_TOKENS])
"""One row per sample of a unit, in plan order.

A row's number in this file is its `row` throughout the capture. `position` counts the source's rows from 0
and identifies rejects.
"""

CONTENT_HASH_BYTES = 16
HASH_FIELDS = (_required("content_hash", pa.binary(CONTENT_HASH_BYTES)),)
"""In a schedule's job: the hash by which later runs recognize a sample."""
DIALOGUE_FIELDS = (
    _required("document", pa.string()),
    _required("turn", pa.int32()),
    _required("most_tokens", pa.int32()),
    _required("segments", _list_of(_list_of(pa.int32()))),
)
"""In a job whose rows are checked against their conversations: how each prompt continues."""


def plan_schema(*, hashed: bool, in_dialogues: bool) -> pa.Schema:
    """Return the schema of a plan without labels."""
    return pa.schema(
        [*PLAN_SCHEMA, *(HASH_FIELDS if hashed else ()), *(DIALOGUE_FIELDS if in_dialogues else ())]
    )


MAX_VALUE_BYTES = 2**31 - 2**16
"""Maximum size of a value, which is a layer of one row. Parquet's page sizes are int32; the margin is for the
page's own bytes and zstd's worst case.
"""


def most_tokens(hidden_size: int, dtype: str) -> int:
    """Return the maximum tokens of a row: the `[T, hidden_size]` states of one layer are one value."""
    return MAX_VALUE_BYTES // state_bytes(1, 1, hidden_size, dtype)


def stored_token_bytes(num_layers: int, hidden_size: int, dtype: str, compression: str) -> int | None:
    """Return the stored size of one token's states, or None if that depends on their values."""
    if compression == "planes":
        return None
    if compression == "fp8":
        return num_layers * (hidden_size + SCALE_BYTES)
    return state_bytes(1, num_layers, hidden_size, dtype)


def state_bytes(num_tokens: int, num_layers: int, hidden_size: int, dtype: str) -> int:
    """Return the size in bytes of `[num_layers, num_tokens, hidden_size]` states of `dtype`, as captured."""
    return num_tokens * num_layers * hidden_size * DTYPE_BYTES[dtype]
