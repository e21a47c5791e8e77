"""Resolves `model` and `revision` to a folder with config, tokenizer and template, and digests the model."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from schemas.dataset.seal import sha256_of
from schemas.identity import Identity
from schemas.names import is_local_model
from service.artifacts.hub_client import reading_hub
from service.errors import HubUnavailable, UnknownModel
from service.settings import Settings

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
"""The files of a tokenizer and its chat template."""
CONFIG_FILES = (
    *("config.json", "generation_config.json", "*.safetensors.index.json"),
    # Engines also read these: the quantization of the weights, or the config in another format.
    *("hf_quant_config.json", "quant_config.json", "quantize_config.json", "params.json"),
)
WEIGHT_FORMATS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
"""Weights in any format: in a local model only these may be symlinks out of its folder.

A key's owner may link only to weights below the key's model roots: others' would be loaded otherwise.
"""

BLOCK_BYTES = 2**24
"""How much of a weight file is read at a time."""

MAX_SMALL_FILES, MAX_SMALL_BYTES = 1000, 2**28
"""Limits for a model's config, tokenizer and template files together; the largest tokenizers have 35 MB."""
MAX_WEIGHT_FILES = 10_000
"""Limit for a local model, whose headers are read at each submission; the largest models have some
hundreds.
"""
READ_CURE = "check the id and the revision, and that the Hub token may read it"

MAX_HEADER_BYTES = 100_000_000
"""The safetensors format's own bound on a header."""


@contextmanager
def _read() -> Iterator[None]:
    """Raise UnknownModel naming a local model's file that cannot be read."""
    try:
        yield
    except OSError as error:
        detail = f"{error.filename} cannot be read: {error.strerror}"
        raise _unknown(detail, "check that the file is whole, and who may read it") from error


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A readable folder with a model's small files. `commit` is the Hub's, None for a local model."""

    folder: Path
    commit: str | None = None


@dataclass(frozen=True, slots=True)
class ModelContent:
    """The digests of a model, as in an `Identity`: `weights_sha256` is None if `revision` is a commit."""

    revision: str
    weights_sha256: str | None
    tokenizer_sha256: str

    def is_that_of(self, identity: Identity) -> bool:
        """Return whether `identity` is of a dataset made with this model."""
        return all(getattr(self, name) == getattr(identity, name) for name in ModelContent.__slots__)


def locate_model(model: str, revision: str | None, settings: Settings) -> ModelFolder:
    """Find a local model, or fetch the small files of a Hub model (never weights).

    Raises UnknownModel naming `model` or `revision`; HubUnavailable if the Hub does not answer.
    """
    if is_local_model(model):
        return local_model(model, revision, settings.model_roots, weight_roots_of(settings))
    return _hub_snapshot(model, revision, settings)


def weight_roots_of(settings: Settings) -> tuple[Path, ...] | None:
    """Return the folders that links to weights may lead into; None, any, unless it is for a single owner."""
    return settings.model_roots if settings.closed_folder is not None else None


@_read()
def local_model(
    model: str, revision: str | None, roots: tuple[Path, ...], weight_roots: tuple[Path, ...] | None
) -> ModelFolder:
    """Return a local model's folder, which must be below one of `roots` and complete.

    Links to weights must lead into it, or below one of `weight_roots` if these are given.

    Raises UnknownModel naming `model` or `revision`.
    """
    if revision is not None:
        detail = f"{model!r} is a folder; a folder has no revisions"
        raise UnknownModel(detail, field="revision", cure="leave 'revision' null")
    folder = _resolved(Path(model))
    if not any(folder.is_relative_to(root.resolve()) for root in roots):
        cure = "add its folder to QUARRY_MODEL_ROOTS, or give a model id of the Hub"
        raise _unknown(f"{model!r} is not inside a folder that models may be loaded from", cure)
    if not (folder / "config.json").is_file():
        raise _unknown(f"{model!r} holds no config.json", "give the folder that config.json is in")
    # The Hub's cache symlinks a snapshot's files to blobs in the same repository's folder.
    cached = folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--")
    root = folder.parents[1] if cached else folder
    small = _matching(folder, (*CONFIG_FILES, *TOKENIZER_FILES))
    _check_small([path.stat().st_size for path in small], f"model {model!r}", "model")
    if (num_files := len(_matching(folder, WEIGHT_FORMATS))) > MAX_WEIGHT_FILES:
        cure = f"give a model of at most {MAX_WEIGHT_FILES}"
        raise _unknown(f"{model!r} has {num_files} files of weights", cure)
    for path in (*folder.glob("*"), *folder.glob("additional_chat_templates/*")):
        weights = any(path.match(pattern) for pattern in WEIGHT_FORMATS)
        if weights and weight_roots is not None and path.is_symlink():
            real = _resolved(path)
            if not any(real.is_relative_to(one.resolve()) for one in (root, *weight_roots)):
                detail = f"{path.name} in {model!r} is a link to weights that the key may not load"
                raise _unknown(detail, "copy the file there, or ask for a key with the folder it leads to")
        if path.is_file() and not weights and not path.resolve().is_relative_to(root):
            detail = f"{path.relative_to(folder)} in {model!r} is a link that leaves the model's folder"
            raise _unknown(detail, "copy the file there; only weights may be links")
        if path.suffix == ".safetensors":
            _safetensors_header(path)  # reports an interrupted copy before anything is planned
    return ModelFolder(folder)


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except RuntimeError as error:  # a loop of links, before Python 3.13
        raise _unknown(f"{str(path)!r} cannot be found: {error}", "fix the link") from error


def _unknown(detail: str, cure: str) -> UnknownModel:
    return UnknownModel(detail, field="model", cure=cure)


def _check_small(sizes: Sequence[int], what: str, field: str) -> None:
    if len(sizes) > MAX_SMALL_FILES or sum(sizes) > MAX_SMALL_BYTES:
        detail = f"{what} has {len(sizes)} files beside its weights, {sum(sizes)} bytes in sum"
        cure = f"give a model with at most {MAX_SMALL_FILES} of them and {MAX_SMALL_BYTES} bytes"
        raise UnknownModel(detail, field=field, cure=cure)


def _hub_snapshot(model: str, revision: str | None, settings: Settings) -> ModelFolder:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(model)
    except HFValidationError as error:
        cure = "give an id such as 'Qwen/Qwen3-8B', an absolute path, or a path that begins with './'"
        raise _unknown(f"{model!r} is neither a model id of the Hub nor a path", cure) from error
    patterns = (*CONFIG_FILES, *TOKENIZER_FILES)
    field = "revision" if revision else "model"
    folder = download(model, revision, patterns, settings, field, small=True)
    if not (folder / "config.json").is_file():
        raise _unknown(f"model {model!r} has no config.json", "give a model in the transformers format")
    return ModelFolder(folder, folder.name)


def download(
    model: str,
    revision: str | None,
    patterns: Iterable[str],
    settings: Settings,
    field: str,
    *,
    small: bool = False,
) -> Path:
    """Return a snapshot of a Hub model with the matching files.

    Raises UnknownModel (`field`) if the Hub has no such model or denies access, or, with `small`, if the
    files exceed the limits; HubUnavailable, DiskFull.
    """
    from huggingface_hub import snapshot_download

    what = f"model {model!r}" + (f" at revision {revision!r}" if revision else "")
    token, patterns = settings.reading_token(model), list(patterns)
    with reading_hub(what, UnknownModel, field, READ_CURE):
        info = _model_info(model, revision, settings)
        if info is not None and info.gated and token is False:
            raise UnknownModel(f"{what} is gated", field="model", cure=READ_CURE)
        if info is not None and small:
            files = info.siblings or ()
            matching = [file for file in files if any(fnmatch(file.rfilename, one) for one in patterns)]
            _check_small([file.size or 0 for file in matching], what, field)
        folder = snapshot_download(
            model, revision=revision, endpoint=settings.hub_endpoint, token=token, allow_patterns=patterns
        )
    return Path(folder)


def _model_info(model: str, revision: str | None, settings: Settings) -> "ModelInfo | None":
    """Ask the Hub for a model's files; return None if it does not answer, since the cache may suffice.

    Without a token it must answer: otherwise anybody could use a cached snapshot.
    """
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    token = settings.reading_token(model)
    try:
        api = HfApi(settings.hub_endpoint, token=token)
        return api.model_info(model, revision=revision, files_metadata=True)
    except (HfHubHTTPError, OfflineModeIsEnabled, httpx2.TransportError):
        if token is False:
            raise
        return None


@_read()
def weight_bytes(model: str, settings: Settings) -> int:
    """Return the size of the safetensors files that an engine loads: those in the index, if there is one.

    Fetches a Hub model's small files, never weights. Raises UnknownModel, HubUnavailable.
    """
    located = locate_model(model, None, settings)
    if located.commit is None:
        sizes = {path.name: path.stat().st_size for path in located.folder.glob("*.safetensors")}
    else:
        with reading_hub(f"model {model!r}", UnknownModel, "model", READ_CURE):
            info = _model_info(model, located.commit, settings)
        if info is None:
            raise HubUnavailable(f"the Hub does not say how large {model!r} is", field="model")
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        sizes = {name: size for name, size in sizes.items() if re.fullmatch(r"[^/]+\.safetensors", name)}
    index, names = located.folder / "model.safetensors.index.json", set(sizes)
    try:
        if index.is_file():
            names = set(json.loads(index.read_bytes())["weight_map"].values())
        if not names:
            raise _unknown(f"{model!r} holds no safetensors files", "convert the weights to safetensors")
        return sum(sizes[name] for name in names)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        detail = f"the index of {model!r} does not name its files of weights: {error!r}"
        raise _unknown(detail, "copy the model again") from error


def files_digest(folder: Path, patterns: Iterable[str]) -> str:
    """Return the sha256 over names and contents of the matching files of `folder`, in name order."""
    digest = hashlib.sha256()
    for path in _matching(folder, patterns):
        _add(digest, path.relative_to(folder).as_posix(), sha256_of(path)[0])
    return digest.hexdigest()


@_read()
def content_of(located: ModelFolder, watch: Callable[[], None] = lambda: None) -> ModelContent:
    """Return the digests of a model. Reads all weights of a local model, calling `watch` between blocks.

    Raises UnknownModel, and what `watch` raises.
    """
    tokenizer_sha256 = files_digest(located.folder, TOKENIZER_FILES)
    if located.commit is not None:
        return ModelContent(located.commit, None, tokenizer_sha256)
    revision = local_revision(located.folder, watch)
    return ModelContent(revision, weights_digest(located.folder, watch), tokenizer_sha256)


def local_revision(folder: Path, watch: Callable[[], None] = lambda: None) -> str:
    """Return the revision of a local model: a sha256. Calls `watch` between weight files.

    Copying, touching or renaming the folder does not change it. It covers the whole content of config, weight
    index, tokenizer and template files and, for each weight file, its name, its length and, for safetensors,
    its header (names, dtypes, shapes and offsets of the tensors). The weights' values are covered by
    `weights_digest`. Raises UnknownModel.
    """
    digest = hashlib.sha256()
    _add(digest, "small", files_digest(folder, (*CONFIG_FILES, *TOKENIZER_FILES)))
    for path in _matching(folder, WEIGHT_FORMATS):
        watch()
        _add(digest, path.name, str(path.stat().st_size))
        if path.suffix == ".safetensors":
            _add(digest, "header", hashlib.sha256(_safetensors_header(path)).hexdigest())
    return digest.hexdigest()


def weights_digest(folder: Path, watch: Callable[[], None] = lambda: None) -> str:
    """Return a sha256 over the names and the xxh3_128 of all weight files, computed at disk speed.

    Calls `watch` between blocks.
    """
    digest = hashlib.sha256()
    for path in _matching(folder, WEIGHT_FORMATS):
        content = xxhash.xxh3_128()
        with path.open("rb", buffering=0) as file:
            while block := file.read(BLOCK_BYTES):
                watch()
                content.update(block)
        _add(digest, path.relative_to(folder).as_posix(), content.hexdigest())
    return digest.hexdigest()


def _safetensors_header(path: Path) -> bytes:
    if path.is_fifo():
        raise _unknown(f"{path.name} is a pipe, which may never answer", "copy the model again")
    with path.open("rb") as file:
        length = file.read(8)
        num_bytes = int.from_bytes(length, "little")
        header = file.read(num_bytes) if num_bytes <= MAX_HEADER_BYTES else b""
    if len(length) != 8 or len(header) != num_bytes:
        raise _unknown(f"{path.name} is not a whole safetensors file", "copy the model again")
    return header


def _matching(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def _add(digest: "hashlib._Hash", *parts: str) -> None:
    """Add the parts as JSON, so that different lists of parts never give the same bytes."""
    digest.update(json.dumps(parts).encode())
