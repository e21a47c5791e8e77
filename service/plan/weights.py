"""A target's weights on local disk: the engine, the head and the reference all read the same folder."""

from pathlib import Path

from service.errors import UnknownModel
from service.plan.model_folder import download
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
    folder, commit = target.folder, target.located.commit
    if commit is not None:
        folder = download(target.model, commit, WEIGHT_FILES, settings, "model")
    if not any(folder.glob("*.safetensors")):
        detail = f"{target.model} holds no safetensors files"
        raise UnknownModel(detail, field="model", cure="convert the weights to safetensors")
    return folder
