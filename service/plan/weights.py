"""A target's weights on local disk: the engine, the head and the reference all read the same folder."""

from pathlib import Path

from service.errors import UnknownModel
from service.plan.hub_reading import downloading
from service.plan.target import Target
from service.settings import Settings

WEIGHT_FILES = ("*.safetensors", "*.json", "*.model", "*.jinja", "*.txt")
"""Never pickles."""


def fetch_weights(target: Target, settings: Settings) -> Path:
    """Return the folder that holds config, tokenizer and safetensors.

    Downloads what is missing of a Hub model.

    Raises:
        UnknownModel: the Hub has or gives no such files, or there are no safetensors; names the cure.
        HubUnavailable: the Hub did not answer, or the download broke off.
        DiskFull: there is no room for the weights.
    """
    folder = target.folder
    if not Path(target.model).is_absolute() and not target.model.startswith("."):
        from huggingface_hub import snapshot_download

        cure = "check the name, and that the Hub token may read it"
        with downloading(f"the weights of {target.model}", UnknownModel, "model", cure):
            folder = Path(
                snapshot_download(
                    target.model,
                    revision=target.revision,
                    allow_patterns=list(WEIGHT_FILES),
                    endpoint=settings.hub_endpoint,
                    token=settings.token(),
                )
            )
    if not any(folder.glob("*.safetensors")):
        raise UnknownModel(
            f"{target.model} holds no safetensors files",
            field="model",
            cure="convert the weights to safetensors",
        )
    return folder
