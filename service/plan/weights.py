"""A target's weights on local disk: the engine, the head and the reference all read the same folder."""

from pathlib import Path

from service.errors import UnknownModel
from service.plan.target import Target
from service.settings import Settings

WEIGHT_FILES = ("*.safetensors", "*.json", "*.model", "*.jinja", "*.txt")
"""Never pickles."""


def fetch_weights(target: Target, settings: Settings) -> Path:
    """Return the folder that holds config, tokenizer and safetensors.

    Downloads what is missing of a Hub model.

    Raises UnknownModel naming the cure if there are no safetensors.
    """
    folder = target.folder
    if not Path(target.model).is_absolute() and not target.model.startswith("."):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        try:
            folder = Path(
                snapshot_download(
                    target.model,
                    revision=target.revision,
                    allow_patterns=list(WEIGHT_FILES),
                    endpoint=settings.hub_endpoint,
                    token=settings.token(),
                )
            )
        except (HfHubHTTPError, LocalEntryNotFoundError) as error:
            raise UnknownModel(
                f"the weights of {target.model} cannot be downloaded: {type(error).__name__}",
                field="model",
                cure="check the name, the token's rights and the network",
            ) from None
    if not any(folder.glob("*.safetensors")):
        raise UnknownModel(
            f"{target.model} holds no safetensors files",
            field="model",
            cure="convert the weights to safetensors",
        )
    return folder
