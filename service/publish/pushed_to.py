"""Decides which configuration of a repository a job's states belong to."""

from schemas.identity import Identity
from schemas.request import HubTarget
from service.publish.card import states_config
from service.store import Store, captured_samples

CONFIG_CHARS = 55
"""Maximum length kept of a configuration's name, so that a recipe's digest can be appended."""


def pushed_to(store: Store, job_id: str, identity: Identity, hub: HubTarget) -> HubTarget:
    """Return where a job is pushed to; a schedule's new recipe has a configuration of its own."""
    recipe = identity.recipe_sha256()
    if store.read(captured_samples.first_recipe, job_id) in {None, recipe}:
        return hub
    name = f"{states_config(hub.config_name)[:CONFIG_CHARS]}-{recipe[:8]}"
    return hub.model_copy(update={"config_name": name})
