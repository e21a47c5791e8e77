"""The dataset to export: its rows and their identity."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from schemas.identity import Identity
from service.errors import OptionRefused, SourceRefused
from service.export.options import STATES_OF_LAST_ONLY, ExportOptions
from service.reader import QuarryDataset, ReaderError
from service.reader.errors import JobsDiffer


@dataclass(frozen=True, slots=True)
class Source:
    """Rows of complete jobs with the same kind of states. `layers`: auxiliary layers to write, ascending."""

    rows: QuarryDataset
    options: ExportOptions
    layers: tuple[int, ...]

    @property
    def identity(self) -> Identity:
        """The identity of the first job; the others agree in everything that determines the tensors."""
        return next(iter(self.rows.manifests.values())).provenance.identity

    @property
    def vllm_layers(self) -> str:
        """The auxiliary layers as text for messages."""
        return ", ".join(str(layer_id) for layer_id in self.layers) or "none"


def open_dataset(where: str, options: ExportOptions) -> Source:
    """Open a folder or `hf://datasets/NAMESPACE/NAME`, reading manifests, indexes and one footer.

    Every layer that is read of it is held against its checksum.

    Raises OptionRefused (`layers`), ReaderError.
    """
    rows = QuarryDataset(where, jobs=options.jobs or None, revision=options.revision, check=True)
    return source_of(rows, options)


def source_of(rows: QuarryDataset, options: ExportOptions) -> Source:
    """Return the source for opened rows. Raises OptionRefused (`layers`)."""
    return Source(rows, options, _layers(rows, options))


@contextmanager
def refusing_datasets() -> Iterator[None]:
    """Turn a ReaderError in the context into SourceRefused (`job`, `dataset`)."""
    try:
        yield
    except JobsDiffer as error:
        cure = "name jobs of the same states in --job"
        raise SourceRefused(str(error), field="job", cure=cure) from error
    except ReaderError as error:
        cure = "name the root of a dataset that Quarry made; if it is one, run 'quarry verify' on it"
        raise SourceRefused(str(error), field="dataset", cure=cure) from error


def _layers(rows: QuarryDataset, options: ExportOptions) -> tuple[int, ...]:
    dataset = rows.about
    if dataset.num_layers not in dataset.layer_ids:
        raise OptionRefused(
            f"the dataset holds layers {list(dataset.layer_ids)} and not the last one, {dataset.num_layers}, "
            "which every trainer needs",
            field="layers",
            cure="extract with the final layer",
        )
    if options.algorithm in STATES_OF_LAST_ONLY:
        if options.layers is not None:
            raise OptionRefused(
                f"{options.algorithm} is fed the last layer alone", field="layers", cure="leave --layers out"
            )
        return ()
    if options.layers is None:
        chosen = tuple(layer_id for layer_id in dataset.layer_ids if layer_id != dataset.num_layers)
        if not chosen:
            raise OptionRefused(
                f"the dataset holds the last layer alone, and {options.algorithm} is fed others",
                field="layers",
                cure="extract auxiliary layers",
            )
        return chosen
    missing = sorted(set(options.layers) - set(dataset.layer_ids))
    if missing:
        raise OptionRefused(
            f"the dataset holds layers {list(dataset.layer_ids)}, not {missing}",
            field="layers",
            cure="name some of those it holds, by vLLM's ids",
        )
    return options.layers
