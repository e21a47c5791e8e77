"""The target: what a request's model is, where its files are, which of its layers are captured."""

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

    `model` is how the dataset names it. `located` holds config and tokenizer files: the model's own folder,
    or a Hub snapshot without weights. `layer_ids` are vLLM's, ascending, unique. A prompt is at most
    `max_model_len - 1` tokens.
    """

    model: str
    located: ModelFolder
    layer_ids: tuple[int, ...]

    @property
    def folder(self) -> Path:
        """Where config and tokenizer files are."""
        return self.located.folder


def fetch_target(request: ExtractRequest, settings: Settings) -> ModelFolder | None:
    """Fetch the small files of a model on the Hub; nothing is looked at of a local one, which is null.

    Raises UnknownModel (`model`, `revision`), HubUnavailable.
    """
    local = is_local_model(request.model)
    return None if local else locate_model(request.model, request.revision, settings)


def target_of(request: ExtractRequest, located: ModelFolder, config: ModelConfig) -> Target:
    """Return the target that `config` describes. Raises UnknownLayer (`layers`, `final_layer`)."""
    layer_ids = resolve_layers(request.layers, request.final_layer, config.num_layers)
    return Target(**asdict(config), located=located, model=shown_model(request.model), layer_ids=layer_ids)


def check_planned(model: str, content: ModelContent, identity: Identity) -> None:
    """Return if `model` is what a job was planned for. Raises IdentityChanged (`model`)."""
    if not content.is_that_of(identity):
        cure = "put the model back as it was, or start a new job"
        detail = f"{model} was changed since the job was planned"
        raise IdentityChanged(detail, field="model", cure=cure)


def planned_target(identity: Identity, model: str, settings: Settings) -> Target:
    """Return the target that a job of `model` was planned for, however its branch moved since.

    A model on the Hub is read at the planned commit; of a local one all weights are read.

    Raises IdentityChanged (`model`) for a local one that is not the same any more, UnknownModel (`model`),
    HubUnavailable.
    """
    local = is_local_model(model)
    located = locate_model(model, None if local else identity.revision, settings)
    check_planned(model, content_of(located), identity)
    config = read_config(located.folder, identity.dtype)
    return Target(**asdict(config), located=located, model=identity.model, layer_ids=identity.layer_ids)


def fetch_weights(target: Target, settings: Settings) -> Path:
    """Return the folder that holds config, tokenizer and safetensors: engine, head and reference read it.

    Downloads what is missing of a Hub model.

    Raises:
        UnknownModel: the Hub has or gives no such files, or there are no safetensors; names the cure.
        HubUnavailable: the Hub did not answer, or the download broke off.
        DiskFull: there is no room for the weights.
    """
    folder, commit = target.folder, target.located.commit
    if commit is not None:
        folder = download(target.model, commit, WEIGHT_FILES, settings, "model")
    if not any(folder.glob("*.safetensors")):
        detail = f"{target.model} holds no safetensors files"
        raise UnknownModel(detail, field="model", cure="convert the weights to safetensors")
    return folder
