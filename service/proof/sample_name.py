"""A sample's id is a hash of what it names, so a row proves its own tokens and mask."""

from schemas.dataset.shard import LightRow
from service.plan.samples import Tokenized
from service.plan.units import sample_digest


def name_fault(light: LightRow) -> str | None:
    """Return how a row's source id, planned tokens and mask contradict its sample id, or none.

    What the target generated came after the id was given, so only the prompt's tokens are held against it.
    """
    planned = Tokenized(light.input_ids[: light.prompt_tokens], light.loss_mask[: light.prompt_tokens])
    due = sample_digest(light.source_id or "", planned).hex()
    if light.sample_id == due:
        return None
    return f"its source id, tokens and mask are those of sample {due}"
