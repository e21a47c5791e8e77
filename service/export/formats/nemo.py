"""NeMo Automodel reads two caches, one a recipe: DSpark's and EAGLE-3's. Both need the target's weights."""

from service.errors import OptionRefused
from service.export.format import Format
from service.export.formats import nemo_dspark, nemo_eagle3
from service.export.options import Algorithm
from service.export.source import Source
from service.export.target import find_target

SHARD_BYTES = 2**28
"""A shard is made in memory."""


def make(source: Source) -> Format:
    """Return the format. Raises OptionRefused (`draft_vocab`, `layers`, `target`), EngineRefused."""
    target = find_target(source)
    if not any(target.folder.glob("*.safetensors")):
        raise OptionRefused(
            f"{target.folder} holds no weights, and this trainer reads the target's embedding and head",
            field="target",
            cure="download the target and name its folder in --target",
        )
    if source.options.algorithm is Algorithm.EAGLE3:
        return nemo_eagle3.make(source, target, SHARD_BYTES)
    return nemo_dspark.make(source, target, SHARD_BYTES)
