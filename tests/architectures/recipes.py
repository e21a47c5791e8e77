"""Every recipe, by its row's name."""

from tests.architectures.dense import DENSE
from tests.architectures.experts import MIXTURES
from tests.architectures.hybrids import HYBRIDS
from tests.architectures.latent import LATENTS
from tests.architectures.multimodal import MULTIMODAL
from tests.architectures.namesakes import NAMESAKES
from tests.architectures.recipe import Recipe

RECIPES: dict[str, Recipe] = {
    recipe.key: recipe for recipe in (*DENSE, *MIXTURES, *LATENTS, *HYBRIDS, *MULTIMODAL, *NAMESAKES)
}
