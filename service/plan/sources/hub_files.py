"""Which files a dataset repository may name: its own, at the commit that is read.

`datasets` takes the names of files from the repository's card and from `.huggingface.yaml`. It would read an
absolute path from this node, and any URL. Both documents were written by others.
"""

from collections.abc import Iterator
from typing import Any

from service.errors import SourceRefused

FORMS = frozenset({
    "arrow", "audiofolder", "conll", "csv", "eval", "imagefolder", "json", "parquet", "pdffolder", "text",
    "videofolder", "webdataset", "xml",
})  # fmt: skip
"""Builders of `datasets` that read the files only. Those of HDF5 or Lance may name other files anywhere."""
FIELD = "source.repo_id"
_CURE = "name the dataset's files by paths relative to its repository, without '..'"


def check_named(repo_id: str, commit: str, endpoint: str | None, token: str | None) -> None:
    """Refuse a repository whose documents name files outside it, before `datasets` looks for these.

    Raises SourceRefused, what `huggingface_hub` raises, and ValueError for a text that is no card.
    """
    import yaml  # type: ignore[import-untyped]

    try:
        configs = _configs(repo_id, commit, endpoint, token)
    except (yaml.YAMLError, AttributeError, TypeError, LookupError) as error:
        detail = f"the card of dataset {repo_id!r} cannot be read: {error}"[:1000]
        cure = "mend the YAML of its README.md or .huggingface.yaml"
        raise SourceRefused(detail, field=FIELD, cure=cure) from error
    for config in configs:
        for name in _names([config.get("data_files"), config.get("data_dir")]):
            if _leads_out(name):
                raise _refusal(repo_id, name)


def check_found(builder: Any, repo_id: str, commit: str) -> None:  # noqa: ANN401 - `datasets` is loaded late
    """Refuse a builder that would read other files than this repository's at this commit.

    Raises SourceRefused.
    """
    if builder.name not in FORMS:
        detail = f"dataset {repo_id!r} is of the form {builder.name!r}, which is not read"
        raise SourceRefused(detail, field=FIELD, cure="convert it to Parquet or JSONL")
    own = f"hf://datasets/{repo_id}@{commit}/"
    for files in builder.config.data_files.values():
        for file in files:
            if not file.startswith(own) or _leads_out(file.removeprefix(own)):
                raise _refusal(repo_id, file)


def _configs(repo_id: str, commit: str, endpoint: str | None, token: str | None) -> list[dict[str, Any]]:
    """Return the configurations as `datasets` finds them: those of the YAML file come before the card's."""
    import yaml
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCard, DatasetCardData, HfApi
    from huggingface_hub.errors import EntryNotFoundError

    api = HfApi(endpoint=endpoint, token=token)

    def path(name: str) -> str | None:
        try:
            return str(api.hf_hub_download(repo_id, name, repo_type="dataset", revision=commit))
        except EntryNotFoundError:
            return None

    card, standalone = path("README.md"), path(".huggingface.yaml")
    data = DatasetCardData() if card is None else DatasetCard.load(card).data
    if standalone is not None:
        with open(standalone, encoding="utf-8") as file:  # noqa: PTH123
            given = yaml.safe_load(file)
        if given:
            data = DatasetCardData(**(data.to_dict() | given))
    return list(MetadataConfigs.from_dataset_card_data(data).values())


def _names(value: object) -> Iterator[str]:
    """Yield every text in a card's `data_files`, whatever its form; a split's name does no harm."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _names(part)


def _leads_out(name: str) -> bool:
    """Say whether `datasets` or `fsspec` could take `name` for anything but a path inside the repository.

    `::` chains file systems: the one after it is opened first.
    """
    from datasets.utils.file_utils import is_relative_path

    return not is_relative_path(name) or "://" in name or "::" in name or ".." in name.split("/")


def _refusal(repo_id: str, name: str) -> SourceRefused:
    detail = f"dataset {repo_id!r} names {name[:300]!r}, which is outside its repository"
    return SourceRefused(detail, field=FIELD, cure=_CURE)
