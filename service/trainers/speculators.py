"""`quarry train speculators`: speculators' own training command on a dataset, without copying the states.

speculators takes token ids and masks from an Arrow dataset, which is made here from the index, and asks a
backend of its package `hs_connectors` for the states of each row: ours reads them from the shards. The
backend must be registered before speculators' configuration is imported, so this module imports that late.
"""

import json
import os
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import yaml
from hs_connectors import HiddenStatesBackend, HiddenStatesTransfer
from huggingface_hub.errors import EntryNotFoundError
from safetensors import SafetensorError

from schemas.dataset.manifest import Manifest
from schemas.names import is_local_model
from service.artifacts.dataset_files import Files, files_of
from service.errors import IdentityChanged, OptionRefused, SourceRefused, UnknownModel
from service.export.formats.speculators import ARROW_FILE, index_files, make, row_tensors
from service.export.options import STATES_OF_LAST_ONLY, Algorithm, ExportOptions, FormatName, chosen_algorithm
from service.export.record import LOCK, RECORD, begin, end
from service.export.saving import seal_missing
from service.export.source import Source, refusing_datasets, source_of
from service.export.target import find_target, has_another_norm
from service.folder_lock import locked
from service.reader import QuarryDataset
from service.reader.jobs import read_jobs
from service.reader.places import Places
from service.reader.row import About
from service.reader.rows import Rows
from service.trainers.checkpoints import put_back

BACKEND = "quarry"
_FINAL_NORM = "model.norm.weight"
"""As speculators looks for it in a target, also behind a prefix."""
_LAYERS_OF_DRAFTER = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
ONE_EPOCH = {"epochs": ["1"], "checkpoint_freq": ["0.05"]}
"""Defaults of live training. Frequent checkpoints, because only checkpointed rows may be removed from the
service's disk, which may be small.
"""
_IDS = "quarry-ids-"
"""How the name of a temporary folder of ids begins, which is removed in the end."""
_NOTES = "Token ids and masks for `quarry train speculators`, which reads the states in their dataset.\n"


class QuarryTransfer(HiddenStatesTransfer):  # type: ignore[misc]  # of a package that mypy does not see
    """The rows of an Arrow dataset of ids, with states read from the dataset that it was made from.

    A loader worker gets only names; it maps the ids and opens shards when it needs its first row.
    """

    def __init__(
        self,
        files: Files,
        manifests: Collection[Manifest],
        ids: Path,
        options: ExportOptions,
        *,
        check: bool,
    ) -> None:
        """Store the arguments; nothing is opened yet.

        `ids` is the folder of the Arrow dataset, `manifests` are of the jobs with its rows, which are alike;
        `check` is as for `QuarryDataset`.
        """
        self._files, self._ids, self._options = files, ids, options
        self._shards = [entry for manifest in manifests for entry in manifest.shards]
        self._about = About.of(next(iter(manifests)).provenance)
        self._check = check
        self._rows: Rows | None = None

    def get_cached(self, file_idx: int) -> dict[str, torch.Tensor]:
        """Return `hidden_states` [T, A + 1, H] and `token_ids` [T] of a row. Raises ReaderError, OSError."""
        if self._rows is None:
            with pa.memory_map(str(self._ids / ARROW_FILE)) as file, pa.ipc.open_stream(file) as stream:
                places = Places(stream.read_all())
            self._rows = Rows(self._files, self._shards, places, None, check=self._check, about=self._about)
        row = self._rows.row(file_idx)
        algorithm, layers = self._options.algorithm, self._options.layers or ()
        if algorithm is not Algorithm.MTP:  # MTP's states must be normed
            states_TLH = self._rows.mapped(file_idx, (*layers, row.num_layers))
            if states_TLH is not None:
                return {"hidden_states": states_TLH, "token_ids": row.input_ids}
        return row_tensors(row, algorithm, layers)

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> None:
        """Return None: every row is in the dataset, and nothing is captured for a running trainer."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_rows": None}


@HiddenStatesBackend.register(BACKEND)
class QuarryBackend(HiddenStatesBackend):  # type: ignore[misc]
    """Lets speculators' command find the rows: our arguments name the dataset, `--data-path` the rest."""

    @staticmethod
    def add_train_args(parser: ArgumentParser) -> None:
        """Add `--quarry-dataset`, `--quarry-revision` and `--quarry-check`."""
        parser.add_argument("--quarry-dataset", help="Folder, or hf://datasets/NAMESPACE/NAME.")
        parser.add_argument("--quarry-revision", help="Branch, tag or commit of a dataset repository.")
        # speculators' own parser takes no flags from a backend.
        parser.add_argument(
            "--quarry-check", choices=("yes", "no"), default="no", help="Compare layers with their checksums."
        )

    @staticmethod
    def add_launch_args(parser: ArgumentParser) -> None:
        """Add nothing: Quarry captures with its own service."""

    @staticmethod
    def from_train_args(args: Namespace, data_path: str) -> QuarryTransfer:
        """Return the transfer of the rows whose ids are in `data_path`.

        Raises SourceRefused (`dataset`), ReaderError, OptionRefused, HubUnavailable, OSError.
        """
        from service.trainers.ahead import of_first_rank

        ids = Path(data_path)
        record = json.loads((ids / RECORD).read_text(encoding="utf-8"))
        if record["jobs"] != of_first_rank(lambda: record["jobs"]):
            raise SourceRefused(
                "this rank reads other jobs than the first one: rows would come twice or never",
                field="dataset",
                cure="give every rank the same dataset; for a repository that grows, name its --revision",
            )
        files = files_of(args.quarry_dataset, args.quarry_revision or None)
        manifests = read_jobs(files, frozenset(record["jobs"]))
        check = args.quarry_check == "yes"
        return QuarryTransfer(files, manifests.values(), ids, _options(args), check=check)

    @staticmethod
    def build_kv_transfer_config(args: Namespace) -> dict[str, Any]:
        """Refuse: this backend captures nothing."""
        cure = "capture with 'quarry extract' or POST /extract"
        raise OptionRefused("speculators' server captures nothing for Quarry", field="backend", cure=cure)


def train(
    dataset: str,
    arguments: Sequence[str],
    jobs: Sequence[str] = (),
    revision: str | None = None,
    live: str | None = None,
    consumer: str | None = None,
    *,
    check: bool = False,
) -> None:
    """Run speculators' training command with `arguments` on the rows of a dataset.

    With `live`, a job's URL, it trains on that job's rows as they are captured, once, and the dataset is used
    for validation and the draft vocabulary. `consumer` is the name under which rows are then acknowledged.
    With `check`, every index is compared with its sha256, and every layer that is read with its checksum.

    Missing arguments are filled in: the backend, the target, its layers, and a temporary folder for the token
    ids and masks. With `--data-path`, these are kept in that folder, and ranks share them.

    Raises SourceRefused (`dataset`, `job`, `live`), OptionRefused (`layers`, `algorithm`, `data_path`,
    `d2t_path`, `t2d_path`, `from_pretrained`, `live`, `epochs`, `max_steps`, `save_best`, `save_path`,
    `sp_size`, `verifier_name_or_path`), IdentityChanged (`data_path`), HubUnavailable, and what training
    raises; SystemExit if speculators refuses an argument.
    """
    from speculators.train.cli import main
    from speculators.train.config import TrainConfig

    # Inherited by loader workers, which then assemble batches in huge pages, in half the CPU time.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    given = _given(arguments)
    # torchrun sends SIGTERM to the other ranks if one fails: exit normally, so that the temporary folder is
    # removed.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with TemporaryDirectory(prefix=_IDS) as folder:
        with refusing_datasets():
            rows = QuarryDataset(dataset, jobs=jobs or None, revision=revision, check=check)
            defaults = _defaults(rows) | {"data_path": [folder]} | (ONE_EPOCH if live else {})
            words = [
                word
                for name, values in defaults.items()
                if values and name not in given
                for word in (f"--{name.replace('_', '-')}", *values)
            ]
            words += [*arguments, "--quarry-dataset", dataset, "--quarry-revision", rows.revision or ""]
            words += ["--quarry-check", "yes" if check else "no"]
            settled = Namespace(**TrainConfig.resolve(words).flatten())
            source = source_of(rows, _options(settled))
            make(source)  # refuses a drafter that this trainer would feed the wrong states
            _refuse_another_target(source, settled.verifier_name_or_path)
            if live is not None:
                from service.trainers.live import Live

                _refuse_second_pass(settled)
                job = Live.at(live, consumer, rows.about, source.options, check=check)
                job.train_by(settled.max_steps)
            _write_ids(source, Path(settled.data_path), check=check)
        del rows, source  # the index is as large as the ids, which are mapped from now on
        if live is not None:
            put_back(Path(settled.save_path))  # before anything asks for the last checkpoint
        # The first rank's arguments are kept in `run.yaml`, for another run: so is what they name.
        beside = settled.save_path if os.environ.get("RANK", "0") == "0" else folder
        main(TrainConfig.resolve([*words, *_kept_vocabulary(settled, Path(beside).absolute())]))


def _refuse_another_target(source: Source, verifier: str) -> None:
    """Refuse a verifier whose final norm is not that of the dataset's target.

    The drafter would learn from the head of another model. No more of the verifier is fetched than training
    fetches. Raises OptionRefused (`verifier_name_or_path`).
    """
    from speculators.utils.loading import load_model_layers

    try:
        weight_H = load_model_layers([_FINAL_NORM], verifier)[_FINAL_NORM]
    except (ValueError, FileNotFoundError, EntryNotFoundError):
        return  # training says what the verifier lacks
    if has_another_norm(source, weight_H):
        detail = f"{verifier} has another final norm than {source.identity.model}, the target of the dataset"
        raise OptionRefused(detail, field="verifier_name_or_path", cure="name the dataset's own target")


def _refuse_second_pass(settled: Namespace) -> None:
    """Refuse what would read a live job's rows again. Raises OptionRefused (`save_best`, `epochs`)."""
    if settled.save_best:
        detail = "the best checkpoint may lack rows that are gone then"
        raise OptionRefused(detail, field="save_best", cure="leave --save-best out")
    if settled.epochs != 1:
        detail, cure = "a job's rows come once", "leave --epochs out, and repeat the job's source"
        raise OptionRefused(detail, field="epochs", cure=cure)


def _given(arguments: Sequence[str]) -> set[str]:
    """Return the names of the arguments the user gives, including those in `--config`. Raises SystemExit."""
    from speculators.train.config.resolution import build_parser

    parsed = vars(build_parser().parse_args(arguments))
    names = set(parsed)
    if parsed["config"] is not None:
        with suppress(OSError, yaml.YAMLError):  # speculators will report it
            names |= set(_keys(yaml.safe_load(Path(parsed["config"]).read_text(encoding="utf-8"))))
    return names


def _keys(document: object) -> Iterator[str]:
    """Yield the keys of a document at every depth: arguments are grouped, and their names unique.

    One of a run's own `run.yaml` that names its temporary folder is left out.
    """
    if isinstance(document, dict):
        for key, value in document.items():
            if key != "data_path" or not Path(str(value)).name.startswith(_IDS):
                yield str(key)
            yield from _keys(value)


def _defaults(rows: QuarryDataset) -> dict[str, list[str]]:
    """Return the arguments that follow from a dataset; the target is left out if it is not found."""
    source = Source(rows, ExportOptions(FormatName.SPECULATORS, Algorithm.EAGLE3), ())
    model = source.identity.model
    target = [] if is_local_model(model) else [model]
    if not target:
        with suppress(OptionRefused, UnknownModel):
            target = [str(find_target(source).folder)]
    layers = [str(layer_id) for layer_id in rows.about.layer_ids if layer_id != rows.about.num_layers]
    return {
        "hidden_states_backend": [BACKEND],
        "on_missing": ["raise"],
        "verifier_name_or_path": target,
        "target_layer_ids": layers,
    }


def _options(args: Namespace) -> ExportOptions:
    """Return the export options for the trainer's resolved arguments. Raises OptionRefused."""
    from transformers import PretrainedConfig

    algorithm = chosen_algorithm(FormatName.SPECULATORS, args.speculator_type)
    layers = args.target_layer_ids
    if args.from_pretrained:
        # If the trainer continues from a drafter, it takes the layers from that drafter.
        drafter, _ = PretrainedConfig.get_config_dict(args.from_pretrained)
        named = (drafter.get(name) for name in _LAYERS_OF_DRAFTER)
        layers = next(filter(None, named), layers)
    if algorithm in STATES_OF_LAST_ONLY or not layers:
        return ExportOptions(FormatName.SPECULATORS, Algorithm(algorithm))
    return ExportOptions(FormatName.SPECULATORS, Algorithm(algorithm), tuple(sorted(layers)))


def _kept_vocabulary(settled: Namespace, folder: Path) -> list[str]:
    """Write the vocabulary maps of the drafter that training continues from; return arguments that name them.

    speculators would make new ones from the counts of these rows, which the drafter's head does not follow.
    Raises OptionRefused: `d2t_path`, `t2d_path` if maps are given that are not the drafter's, `save_path`,
    `from_pretrained` if its own cannot be read.
    """
    from speculators.train.checkpointer import BaseCheckpointer
    from speculators.utils.loading import is_config_only_dir

    last = None if settled.no_resume_from_checkpoint else BaseCheckpointer(settled.save_path).prev_path
    drafter = last or settled.from_pretrained
    given = {"d2t": settled.d2t_path, "t2d": settled.t2d_path}
    # Those of a checkpoint are always named: it may be loaded into `from_pretrained`, which has others.
    no_maps = not last and settled.draft_vocab_size is None and not all(given.values())
    if not drafter or is_config_only_dir(drafter) or no_maps:
        return []
    field = "save_path" if last else "from_pretrained"
    maps = _maps_of(str(drafter), field)
    for name, path in given.items():
        if path and name in maps and not np.array_equal(np.load(path), maps[name].numpy()):
            detail, cure = f"{path} is not the map of {drafter}", "leave --d2t-path and --t2d-path out"
            raise OptionRefused(
                detail, field=f"{name}_path", cure=f"{cure}, also of a file that --config names"
            )
    if any(given.values()) or not maps:
        return []
    if len(maps) == 1:
        cure = "give both of its maps with --d2t-path and --t2d-path"
        raise OptionRefused(f"{drafter} holds no map but {', '.join(maps)}", field=field, cure=cure)
    words = []
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensor in maps.items():
        np.save(path := folder / f"kept-{name}.npy", tensor.numpy())
        words += [f"--{name}-path", str(path)]
    return words


def _maps_of(drafter: str, field: str) -> dict[str, torch.Tensor]:
    """Return the vocabulary maps of a drafter; none if it drafts from the whole vocabulary.

    Raises OptionRefused (`field`).
    """
    from speculators.utils.loading import load_model_layers

    try:
        maps: dict[str, torch.Tensor] = load_model_layers(["d2t", "t2d"], drafter)
    except (ValueError, KeyError, SafetensorError, FileNotFoundError, EntryNotFoundError) as error:
        if type(error) is ValueError:  # and not, say, of an index that is no JSON
            return {}
        detail = f"the vocabulary maps of {drafter} cannot be read: {error}"
        cure = "give all of it, its weights in model.safetensors or in files that an index beside it lists"
        raise OptionRefused(detail, field=field, cure=cure) from error
    return maps


def _write_ids(source: Source, out: Path, *, check: bool) -> None:
    """Write the Arrow dataset and the token counts to `out`, unless it already has those of the same jobs.

    With `check`, those of an index that was not checked are refused. Ranks that share the folder on one
    machine wait for the first of them. Raises OptionRefused, IdentityChanged (`data_path`), OSError.
    """
    jobs = {job: manifest.sha256 for job, manifest in source.rows.manifests.items()}
    identity: dict[str, Any] = {"format": "speculators, ids alone", "jobs": jobs}
    identity |= {"checked": True} if check else {}
    out.mkdir(parents=True, exist_ok=True)
    with locked(out / LOCK, f"{out} is written to", "data_path", wait=True):
        try:
            is_written = begin(out, identity)
        except (IdentityChanged, OptionRefused) as error:
            ids = "checked ids" if check else "the ids"
            detail, cure = f"{out} holds something else than {ids} of these jobs", "name another folder"
            raise type(error)(detail, field="data_path", cure=f"{cure} in --data-path") from error
        seal_missing(out, index_files(source))
        if not is_written:
            end(out, identity, len(source.rows), _NOTES)
