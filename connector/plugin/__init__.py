"""Makes vLLM return hidden states where its own classes do not: entry point `vllm.general_plugins`.

And readies each process for what vLLM's CPU build does in it: the tiles that it takes without asking
(`tiles`), the vector math that it starts with many threads at once (`connector.vml`). vLLM calls `register`
in each of its processes, before there is a model. No file of vLLM is changed: its registry is told of
classes.
"""

from connector.plugin.carried import BACKEND, BACKEND_CLASSES, CARRIED, MODELS

CLASSES = "connector.plugin.classes"


def register() -> None:
    """Name our class for each architecture that we carry; it is made when vLLM first loads it."""
    from vllm import ModelRegistry

    from connector.plugin.tiles import ask_for_tiles
    from connector.vml import settle_vector_math

    ask_for_tiles()
    settle_vector_math()

    for architecture, known in list(ModelRegistry.models.items()):
        place = (getattr(known, "module_name", None), getattr(known, "class_name", None))
        about = CARRIED.get(architecture)
        if about is not None and place == (f"{MODELS}.{about.module}", about.model):
            ModelRegistry.register_model(architecture, f"{CLASSES}:{architecture}")
        elif place[0] == BACKEND and place[1] in BACKEND_CLASSES:
            ModelRegistry.register_model(architecture, f"{CLASSES}:{place[1]}")
