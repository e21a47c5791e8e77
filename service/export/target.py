"""What trainers need from the target but the dataset does not have: vocabulary size, model type, weights."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open

from schemas.dataset.norm import NormWeights
from schemas.identity import Identity
from schemas.names import is_local_model
from service.errors import OptionRefused
from service.export.source import Source
from service.plan.model_config import config_json, read_config
from service.plan.model_folder import ModelFolder, content_of, local_revision, locate_model
from service.proof.head_weights import HeadWeights, read_head, read_norm, tensor_files, text_config
from service.settings import Settings

_EMBEDDING = re.compile(r"(?:\w+\.)*?(?:embed_tokens|embed_in|wte|tok_embeddings|word_embeddings)\.weight")


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

    @property
    def final_norm(self) -> NormWeights:
        """The final norm. Raises EngineRefused."""
        return read_norm(self.folder, text_config(self.folder))

    def has_weights_of(self, identity: Identity) -> bool:
        """Say whether a dataset was made with these weights, as far as it knows. Raises UnknownModel."""
        known = identity.weights_sha256
        return known is None or content_of(ModelFolder(self.folder)).weights_sha256 == known

    def embedding_and_head(self) -> tuple[torch.Tensor, HeadWeights]:
        """Return input embedding [V, H] and output head in float32. Raises EngineRefused, OptionRefused."""
        files = tensor_files(self.folder)
        names = [name for name in files if _EMBEDDING.fullmatch(name)]
        if len(names) != 1:
            raise OptionRefused(
                f"{self.folder}: the input embedding is not clear among {sorted(names)}",
                field="target",
                cure="use a format that needs no weights of the target",
            )
        with safe_open(files[names[0]], framework="pt") as file:
            embedding_VH: torch.Tensor = file.get_tensor(names[0])
        head = read_head(self.folder, text_config(self.folder))
        return embedding_VH.float().contiguous(), replace(head, weight_VH=head.weight_VH.float().contiguous())


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
    raise OptionRefused(
        f"{path} holds no config.json, and this export needs the target's",
        field="target",
        cure="give --target the folder of the model that the dataset was made with, "
        "or add its parent folder to QUARRY_MODEL_ROOTS",
    )
