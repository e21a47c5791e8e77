"""How pyarrow writes a shard: the same columns, codecs and pages as ours."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from schemas.dataset.columns import METADATA_KEY, WITH_STATISTICS, ZSTD_LEVEL, is_packed


def writer_options(schema: pa.Schema) -> dict[str, Any]:
    """Return the keyword arguments of `pq.ParquetWriter` for a shard of `schema`.

    `write_batch_size=1` keeps a page to one value, so a value may reach 2 GiB - 64 KiB. Without the page
    index, which nobody reads, pyarrow repeats the statistics in the pages' headers.
    """
    packed = {
        f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name: is_packed(field)
        for field in schema
    }
    return {
        "compression": {name: "zstd" if is_zstd else "none" for name, is_zstd in packed.items()},
        "compression_level": {name: ZSTD_LEVEL for name, is_zstd in packed.items() if is_zstd},
        "use_dictionary": False,
        "write_statistics": list(WITH_STATISTICS),
        "write_page_index": True,
        "write_batch_size": 1,
        "data_page_version": "1.0",
        "store_schema": True,
    }


def tell(folder: Path, told: bytes, other: bytes) -> None:
    """Let every shard of a dataset say something else of its job."""
    for path in folder.glob("data/*/*.parquet"):
        schema, table = pq.read_schema(path), pq.read_table(path)
        said = schema.metadata[METADATA_KEY]
        assert told in said
        schema = schema.with_metadata({METADATA_KEY: said.replace(told, other)})
        pq.write_table(table.cast(schema), path, row_group_size=1, **writer_options(schema))


def xxh3_of(path: Path) -> str:
    """Return the hex xxh3_128 of a file."""
    return str(xxhash.xxh3_128_hexdigest(path.read_bytes()))


def footer_xxh3(content: bytes) -> str:
    """Return the hex xxh3_128 of a Parquet file's footer with its length and the magic."""
    num_bytes = int.from_bytes(content[-8:-4], "little") + 8
    return str(xxhash.xxh3_128_hexdigest(content[-num_bytes:]))
