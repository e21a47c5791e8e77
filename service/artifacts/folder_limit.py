"""How many files a folder of a repository may have."""

from schemas.names import MAX_FOLDER_FILES
from service.errors import OptionRefused


def check_folder(num_shards: int) -> None:
    """Refuse a job whose repository would not take all of its shards. Raises OptionRefused."""
    if num_shards > MAX_FOLDER_FILES:
        detail = f"the job would push more than {MAX_FOLDER_FILES} shards, which the Hub refuses in a folder"
        cure = "make the shards larger, or split the source: each job, and each 'part', has its own folder"
        raise OptionRefused(detail, field="storage.shard_bytes", cure=cure)
