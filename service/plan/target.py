"""The target: what a request's model is, where its small files are, which of its layers are captured."""

from dataclasses import asdict, dataclass
from pathlib import Path

from schemas.identity import Identity
from schemas.names import is_local_model, shown_model
from schemas.request import ExtractRequest
from service.errors import IdentityChanged
from service.plan.layers import resolve_layers
from service.plan.model_config import ModelConfig, read_config
from service.plan.model_folder import locate_model
from service.settings import Settings


@dataclass(frozen=True, slots=True)
class Target(ModelConfig):
    """A model that exists and whose layers were checked.

    `model` is how the dataset names it. `folder` holds config and tokenizer files: the model's own folder, or
    a Hub snapshot without weights. `revision` is the commit, or the digest of a local model
    (`model_folder.local_revision`). `layer_ids` are vLLM's, ascending, unique. A prompt is at most
    `max_model_len - 1` tokens.
    """

    model: str
    folder: Path
    revision: str
    weights_sha256: str | None
    layer_ids: tuple[int, ...]


def inspect_target(request: ExtractRequest, settings: Settings) -> Target:
    """Read the model's config, fetched from the Hub if it is not local; never weights, never its code.

    Raises UnknownModel (`model`, `revision`), UnknownLayer (`layers`, `final_layer`), OptionRefused
    (`dtype`), HubUnavailable.
    """
    located = locate_model(request.model, request.revision, settings)
    config = read_config(located.folder, request.dtype)
    layer_ids = resolve_layers(request.layers, request.final_layer, config.num_layers)
    return Target(**asdict(config), **asdict(located), model=shown_model(request.model), layer_ids=layer_ids)


def planned_target(identity: Identity, model: str, settings: Settings) -> Target:
    """Return the target that a job of `model` was planned for, however its branch moved since.

    A model on the Hub is read at the planned commit. Raises IdentityChanged (`model`) for a local one that is
    not the same any more, UnknownModel (`model`), HubUnavailable.
    """
    local = is_local_model(model)
    located = locate_model(model, None if local else identity.revision, settings)
    if not located.is_that_of(identity):
        cure = "put the model back as it was, or start a new job"
        detail = f"{model} was changed since the job was planned"
        raise IdentityChanged(detail, field="model", cure=cure)
    config = read_config(located.folder, identity.dtype)
    return Target(
        **asdict(config),
        folder=located.folder,
        model=identity.model,
        revision=identity.revision,
        weights_sha256=identity.weights_sha256,
        layer_ids=identity.layer_ids,
    )
