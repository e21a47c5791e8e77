"""Thrift's compact protocol, as far as Parquet's headers and footer need it. Encodes only; pure.

Source: `doc/specs/thrift-compact-protocol.md` of Apache Thrift. A `Value` is a wire type and the encoded
bytes, so that a struct is written down as the numbers of its fields in the IDL.
"""

from collections.abc import Mapping, Sequence

Value = tuple[int, bytes]

BOOLEAN, STRUCT = 1, 12
_FALSE, _I8, _I16, _I32, _I64, _BINARY, _LIST = 2, 3, 4, 5, 6, 8, 9
_SHORT_LIST = 14

STOP = b"\0"
"""Ends a struct that is put together from `fields`."""

FALSE_ITEM = bytes((_FALSE,))
"""A false in a list. The document has 0 here; the C++, Java and Rust writers of Parquet have 2, and all
readers take whatever is not 1."""


def varint(number: int) -> bytes:
    """Return a number from 0 as ULEB128, which Parquet's runs of levels use as well."""
    if number < 0x80:
        return bytes((number,))
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def i8(number: int) -> Value:
    """Return an 8-bit integer."""
    return _I8, number.to_bytes(1, signed=True)


def i16(number: int) -> Value:
    """Return a 16-bit integer."""
    return _I16, _zigzag(number)


def i32(number: int) -> Value:
    """Return a 32-bit integer, or an enum's member."""
    return _I32, _zigzag(number)


def i64(number: int) -> Value:
    """Return a 64-bit integer."""
    return _I64, _zigzag(number)


def boolean(flag: bool) -> Value:
    """Return a struct's boolean, which is all in its type."""
    return (BOOLEAN if flag else _FALSE), b""


def binary(data: bytes) -> Value:
    """Return bytes, or a string in UTF-8."""
    return _BINARY, varint(len(data)) + data


def items(values: Sequence[Value]) -> Value:
    """Return a list of one value or more, which are all of the first one's type."""
    return encoded_items(values[0][0], [data for _, data in values])


def encoded_items(kind: int, encoded: Sequence[bytes]) -> Value:
    """Return a list of values of one wire type that are encoded already; it may be empty."""
    size = len(encoded)
    head = bytes((size << 4 | kind,)) if size <= _SHORT_LIST else bytes((0xF0 | kind,)) + varint(size)
    return _LIST, head + b"".join(encoded)


def fields(part: Mapping[int, Value], after: int = 0) -> bytes:
    """Return some fields of a struct by number, ascending and fewer than 16 apart, behind field `after`."""
    out = bytearray()
    for number, (kind, data) in part.items():
        out.append((number - after) << 4 | kind)
        out += data
        after = number
    return bytes(out)


def record(whole: Mapping[int, Value]) -> bytes:
    """Return a struct, or a union, of fields by number."""
    return fields(whole) + STOP


def struct(whole: Mapping[int, Value]) -> Value:
    """Return `record(whole)` as a value, for a struct inside another."""
    return STRUCT, record(whole)


def _zigzag(number: int) -> bytes:
    return varint(number << 1 ^ number >> 63)
