"""The target: a request's model, the place of its files, and its layers to capture."""

from dataclasses import asdict, dataclass
from pathlib import Path

from schemas.identity import Identity
from schemas.names import is_local_model, shown_model
from schemas.request import ExtractRequest
from service.errors import IdentityChanged, UnknownModel
from service.plan.layers import resolve_layers
from service.plan.model_config import ModelConfig, read_config
from service.plan.model_folder import ModelContent, ModelFolder, content_of, download, locate_model
from service.settings import Settings

WEIGHT_FILES = ("*.safetensors", "*.json", "*.model", "*.jinja", "*.txt")
"""Never pickles."""


@dataclass(frozen=True, slots=True)
class Target(ModelConfig):
    """A model that exists and whose layers were checked.

    `model` is its name in the dataset. `located` has config and tokenizer files: the model's own folder, or a
    Hub snapshot without weights. `layer_ids` are vLLM's, ascending and unique. A prompt has at most
    `max_model_len - 1` tokens.
    """

    model: str
    located: ModelFolder
    layer_ids: tuple[int, ...]

    @property
    def folder(self) -> Path:
        """The folder with config and tokenizer files."""
        return self.located.folder


def fetch_target(request: ExtractRequest, settings: Settings) -> ModelFolder | None:
    """Fetch the small files of a model on the Hub; return None for a local model, which is not read.

    Raises UnknownModel (`model`, `revision`), HubUnavailable.
    """
    local = is_local_model(request.model)
    return None if local else locate_model(request.model, request.revision, settings)


def target_of(request: ExtractRequest, located: ModelFolder, config: ModelConfig) -> Target:
    """Return the target that `config` describes. Raises UnknownLayer (`layers`, `final_layer`)."""
    layer_ids = resolve_layers(request.layers, request.final_layer, config.num_layers)
    return Target(**asdict(config), located=located, model=shown_model(request.model), layer_ids=layer_ids)


def check_planned(model: str, content: ModelContent, identity: Identity) -> None:
    """Raise IdentityChanged (`model`) if `model` is not what a job was planned for."""
    if not content.is_that_of(identity):
        cure = "put the model back as it was, or start a new job"
        detail = f"{model} was changed since the job was planned"
        raise IdentityChanged(detail, field="model", cure=cure)


def planned_target(identity: Identity, model: str, settings: Settings) -> Target:
    """Return the target that a job of `model` was planned for, even if its branch has moved since.

    A model on the Hub is read at the planned commit; all weights of a local model are read.

    Raises IdentityChanged (`model`) for a local model that has changed, UnknownModel (`model`),
    HubUnavailable.
    """
    local = is_local_model(model)
    located = locate_model(model, None if local else identity.revision, settings)
    check_planned(model, content_of(located), identity)
    config = read_config(located.folder, identity.dtype)
    return Target(**asdict(config), located=located, model=identity.model, layer_ids=identity.layer_ids)


def fetch_weights(target: Target, settings: Settings) -> Path:
    """Return the folder with config, tokenizer and safetensors that engine, head and reference read.

    Downloads the missing files of a Hub model.

    Raises:
        UnknownModel: the Hub has no such files or denies access, or there are no safetensors.
        HubUnavailable: the Hub did not answer, or the download was interrupted.
        DiskFull: there is no room for the weights.
    """
    folder, commit = target.folder, target.located.commit
    if commit is not None:
        folder = download(target.model, commit, WEIGHT_FILES, settings, "model")
    if not any(folder.glob("*.safetensors")):
        detail = f"{target.model} holds no safetensors files"
        raise UnknownModel(detail, field="model", cure="convert the weights to safetensors")
    return folder
