"""The reference's own process: `python -m service.proof.reference_process` serves one order and ends.

A process of its own, because vLLM's Transformers backend patches transformers inside its process, and
because what it held is then certainly given back. The order comes as JSON by standard input, the states go
out as a safetensors file; a refusal is the last line of standard error, as JSON, with `EXIT_REFUSED`.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers.utils.logging import disable_progress_bar

from connector.vector_math import settle_vector_math
from service.errors import EngineRefused, UnknownModel
from service.proof.reference_model import build_skeleton
from service.proof.reference_pass import ReferencePass
from service.proof.reference_weights import WeightStream

EXIT_REFUSED = 3


def serve(order: Mapping[str, Any]) -> None:
    """Run the model of an order and write its states.

    Raises:
        EngineRefused: there is no reference for this model.
        ValueError, OSError, RuntimeError: as transformers says.
    """
    folder, prompts, dtype = Path(order["folder"]), order["prompts"], getattr(torch, order["dtype"])
    skeleton = build_skeleton(folder, dtype)
    weights = WeightStream(skeleton, folder, dtype)
    states = ReferencePass(skeleton, weights).run(prompts)
    bits = skeleton.quantization.activation_bits if skeleton.quantization is not None else None
    metadata = {
        "library": f"transformers {transformers.__version__}",
        "activation_bits": str(bits or 0),
    }
    named = {f"{prompt}/{layer}": state for prompt, one in enumerate(states) for layer, state in one.items()}
    save_file(named, order["out"], metadata=metadata)


def main() -> int:
    """Serve one order from standard input; return the exit status."""
    disable_progress_bar()
    settle_vector_math()
    try:
        serve(json.load(sys.stdin))
    except (EngineRefused, UnknownModel) as refusal:
        print(json.dumps({"detail": refusal.detail, "cure": refusal.cure}), file=sys.stderr)
        return EXIT_REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
