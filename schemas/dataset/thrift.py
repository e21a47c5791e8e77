"""Encodes Thrift's compact protocol, as far as Parquet's headers and footer need it. Pure functions.

Source: `doc/specs/thrift-compact-protocol.md` of Apache Thrift. A `Value` is a wire type and the encoded
bytes, so that a struct is written as a dict from the IDL's field numbers to values.
"""

from collections.abc import Mapping, Sequence

Value = tuple[int, bytes]

STRUCT = 12
_I32, _I64, _BINARY, _LIST = 5, 6, 8, 9
_SHORT_LIST = 14
_STOP = b"\0"


def varint(number: int) -> bytes:
    """Return a non-negative number as ULEB128, which Parquet's level runs also use."""
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def i32(number: int) -> Value:
    """Encode a 32-bit integer or an enum member."""
    return _I32, _zigzag(number)


def i64(number: int) -> Value:
    """Encode a 64-bit integer."""
    return _I64, _zigzag(number)


def binary(data: bytes) -> Value:
    """Encode bytes or a UTF-8 string."""
    return _BINARY, varint(len(data)) + data


def items(kind: int, encoded: Sequence[bytes]) -> Value:
    """Encode a list of already encoded values of one wire type; it may be empty."""
    size = len(encoded)
    head = bytes((size << 4 | kind,)) if size <= _SHORT_LIST else bytes((0xF0 | kind,)) + varint(size)
    return _LIST, head + b"".join(encoded)


def values(same: Sequence[Value]) -> Value:
    """Encode a non-empty list of values of the same wire type."""
    return items(same[0][0], [data for _, data in same])


def fields(part: Mapping[int, Value], after: int = 0) -> bytes:
    """Encode fields of a struct that follow field `after`; the numbers ascend in steps of less than 16."""
    out = bytearray()
    for number, (kind, data) in part.items():
        out.append((number - after) << 4 | kind)
        out += data
        after = number
    return bytes(out)


def record(whole: Mapping[int, Value]) -> bytes:
    """Encode a struct or union from its fields by number."""
    return fields(whole) + _STOP


def struct(whole: Mapping[int, Value]) -> Value:
    """Encode a struct as a value, for use inside another struct."""
    return STRUCT, record(whole)


def _zigzag(number: int) -> bytes:
    return varint(number << 1 ^ number >> 63)
