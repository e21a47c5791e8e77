"""Datasets on the Hub, streamed through `datasets`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from schemas.request import HubSource
from service.errors import SourceRefused
from service.plan.hub_reading import reading_hub
from service.plan.sources.conversations import COLUMNS, read_row
from service.plan.sources.hub_files import check_found, check_named
from service.plan.sources.rows import SourceRow, not_empty
from service.settings import Settings

_CURE = "check the id, the configuration, the split and the revision, and that the Hub token may read it"
_FIELD = "source.repo_id"


@dataclass(frozen=True, slots=True)
class HubRows:
    """The rows of one split at one commit, so that fingerprint and rows speak of the same data."""

    source: HubSource
    commit: str
    endpoint: str | None
    token: str | None = field(repr=False)

    @classmethod
    def find(cls, source: HubSource, settings: Settings) -> "HubRows":
        """Resolve the revision to a commit. Raises SourceRefused (field `source.repo_id`), HubUnavailable."""
        from huggingface_hub import HfApi, get_token

        with reading_hub(_what(source), SourceRefused, _FIELD, _CURE):
            token = settings.token() or get_token()
            api = HfApi(endpoint=settings.hub_endpoint, token=token)
            commit = api.dataset_info(source.repo_id, revision=source.revision).sha
        if commit is None:
            raise SourceRefused(f"{_what(source)} has no commit", field=_FIELD, cure=_CURE)
        return cls(source, commit, settings.hub_endpoint, token)

    def fingerprint(self) -> str:
        """Return the repository, configuration, split, limit and commit."""
        source = self.source
        return (
            f"hub:{source.repo_id}@{self.commit}:{source.config or 'default'}:{source.split}:{source.limit}"
        )

    def rows(self) -> Iterator[SourceRow]:
        """Yield the rows as they arrive; nothing is kept on disk."""
        detail = f"{_what(self.source)} holds no row"
        refusal = SourceRefused(detail, field=_FIELD, cure="choose another split")
        return not_empty(islice(self._rows(), self.source.limit), refusal)

    def _rows(self) -> Iterator[SourceRow]:
        for position, row in enumerate(self._stream()):
            own_id, content = read_row(row)
            yield SourceRow(own_id or str(position), content)

    def _stream(self) -> Iterator[Mapping[str, Any]]:
        import datasets
        from datasets.exceptions import DatasetsError
        from datasets.features.features import require_decoding

        if self.endpoint is not None:
            # The library takes the endpoint from its module alone; in this process it is always the same one.
            datasets.config.HF_ENDPOINT = self.endpoint
        repo_id, token = self.source.repo_id, self.token
        with reading_hub(_what(self.source), SourceRefused, _FIELD, _CURE):
            try:
                check_named(repo_id, self.commit, self.endpoint, token)
                builder = datasets.load_dataset_builder(
                    # The scheme keeps `datasets` from taking a local folder of the same name.
                    f"hf://datasets/{repo_id}",
                    name=self.source.config,
                    revision=self.commit,
                    token=token,
                )
                check_found(builder, repo_id, self.commit)
                stream = builder.as_streaming_dataset(split=self.source.split)
                if stream.features is not None and require_decoding(stream.features):
                    # A row names the file of an image or a sound, by any path or URL; it is not opened.
                    stream = stream.decode(False)
                if stream.column_names is not None:
                    stream = stream.select_columns([name for name in stream.column_names if name in COLUMNS])
                yield from stream
            except (DatasetsError, KeyError, TypeError) as error:
                # The last two come of options in the repository's card that the library stumbles over.
                fault = error if isinstance(error, DatasetsError) else repr(error)
                detail = f"{_what(self.source)} cannot be read: {fault}"[:1000]
                raise SourceRefused(detail, field=_FIELD, cure=_CURE) from error


def _what(source: HubSource) -> str:
    return f"dataset {source.repo_id!r}, split {source.split!r}"
