"""What a state column says of its bytes, and how many of them a token takes."""

import pytest

from schemas.dataset.columns import shard_schema, stored_token_bytes

RAW = {b"dtype": b"bfloat16", b"shape": b"[num_tokens, 64]", b"layout": b"C,little-endian"}
CODES = RAW | {b"dtype": b"float8_e4m3fn", b"times": b"layer_3_scale", b"gives": b"bfloat16"}
SCALES = RAW | {b"dtype": b"float32", b"shape": b"[num_tokens]"}


@pytest.mark.parametrize(
    ("compression", "columns", "token_bytes"),
    [
        ("none", {"layer_3": RAW}, 128),
        ("planes", {"layer_3_hi": RAW, "layer_3_lo": RAW}, None),
        ("fp8", {"layer_3": CODES, "layer_3_scale": SCALES}, 68),
    ],
)
def test_a_state_column_says_what_its_bytes_are(
    compression: str, columns: dict[str, dict[bytes, bytes]], token_bytes: int | None
) -> None:
    schema = shard_schema((3,), 64, "bfloat16", compression)
    found = {name: schema.field(name).metadata for name in schema.names if name.startswith("layer_")}
    assert found == columns
    assert stored_token_bytes(1, 64, "bfloat16", compression) == token_bytes
