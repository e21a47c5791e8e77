"""What trainers need from the target but the dataset does not have: vocabulary size, model type, weights."""

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from schemas.names import is_local_model
from service.errors import EngineRefused, OptionRefused
from service.export.source import Source
from service.plan.model_config import config_json, read_config
from service.plan.model_folder import ModelFolder, content_of, local_revision, locate_model, weights_digest
from service.proof.head_weights import (
    HeadWeights,
    norm_weight,
    read_embedding,
    read_head,
    read_norm,
    text_config,
)
from service.settings import Settings


@dataclass(frozen=True, slots=True)
class TargetFolder:
    """A folder with the target's `config.json`; its weights may be missing."""

    folder: Path

    @property
    def vocab_size(self) -> int:
        """The size of the target's vocabulary. Raises UnknownModel."""
        return read_config(self.folder, "auto").vocab_size

    @property
    def model_type(self) -> str:
        """The `model_type` of the config. Raises UnknownModel."""
        return str(config_json(self.folder).get("model_type", ""))

    def embedding_and_head(self) -> tuple[torch.Tensor, HeadWeights]:
        """Return input embedding [V, H] and output head in float32. Raises EngineRefused."""
        head = read_head(self.folder, text_config(self.folder))
        embedding_VH = read_embedding(self.folder).float().contiguous()
        return embedding_VH, replace(head, weight_VH=head.weight_VH.float().contiguous())


def find_target(source: Source, *, with_weights: bool = False) -> TargetFolder:
    """Find the target: `options.target`, or the model that the dataset names.

    A local model is looked up by folder name in the model roots and identified by its content; its weights
    are read only if `with_weights`. For a model on the Hub, only the small files are fetched.

    Raises OptionRefused (`target`), UnknownModel, HubUnavailable.
    """
    identity, named = source.identity, source.options.target
    if named is None and not is_local_model(identity.model):
        return TargetFolder(locate_model(identity.model, identity.revision, Settings()).folder)
    path = Path(named or identity.model)
    if named is not None and (path / "config.json").is_file():
        return TargetFolder(path)
    if named is None:
        for folder in (root / path.name for root in Settings().model_roots):
            if not (folder / "config.json").is_file() or local_revision(folder) != identity.revision:
                continue
            if not with_weights or content_of(ModelFolder(folder)).is_that_of(identity):
                return TargetFolder(folder)
    missing = f"no folder of QUARRY_MODEL_ROOTS holds the dataset's target, {path.name!r}, as it was captured"
    raise OptionRefused(
        missing if named is None else f"{path} holds no config.json",
        field="target",
        cure="give --target the folder of the model that the dataset was made with, "
        "or add its parent folder to QUARRY_MODEL_ROOTS",
    )


def refuse_another_name(source: Source) -> None:
    """Refuse to name a target to the trainer whose final norm is not the dataset's: its head is another's.

    Needs neither a config nor transformers. Where no norm is found, the trainer says what it lacks. Raises
    OptionRefused (`target`).
    """
    if (named := source.options.target) is None:
        return
    with suppress(EngineRefused):
        weight_H = norm_weight(Path(named))
        if weight_H is not None and has_another_norm(source, weight_H):
            raise _another(Path(named), "another final norm")


def has_another_norm(source: Source, weight_H: torch.Tensor) -> bool:
    """Return whether a final norm's weight cannot be that of the dataset's target.

    A copy of the target in fewer bits is the target. A weight of another size may be another part's, such as
    a vision tower's; or else training fails by it. One of quantized integers cannot be compared.
    """
    if not weight_H.is_floating_point():
        return False
    own_H = source.rows.row(0).norm.weight_H
    dtype = max(weight_H.dtype, own_H.dtype, source.rows.about.dtype, key=lambda one: torch.finfo(one).eps)
    return weight_H.shape == own_H.shape and not torch.equal(weight_H.to(dtype), own_H.to(dtype))


def refuse_another_model(source: Source, target: TargetFolder) -> None:
    """Refuse a target that is not the dataset's, by its final norm and, where they are known, its weights.

    Raises OptionRefused (`target`), EngineRefused, UnknownModel.
    """
    norm, dtype = read_norm(target.folder, text_config(target.folder)), source.rows.about.dtype
    alike, known = norm.is_that_of(source.rows.row(0).norm, dtype), source.identity.weights_sha256
    # A target that is not named was found by its weights.
    is_named = source.options.target is not None
    if not alike or (is_named and known is not None and weights_digest(target.folder) != known):
        raise _another(target.folder, "other weights" if alike else "another final norm")


def _another(folder: Path, what: str) -> OptionRefused:
    return OptionRefused(
        f"{folder} has {what} than the dataset: it is another model",
        field="target",
        cure="name the folder of the model that the dataset was made with in --target",
    )
