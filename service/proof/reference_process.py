"""The reference's own process: `python -m service.proof.reference_process` serves one order and ends.

A process of its own, because vLLM's Transformers backend patches transformers inside its process, and
because what it held is then certainly given back. The order comes as JSON by standard input, the states go
out as a safetensors file; a refusal is the last line of standard error, as JSON, with `EXIT_REFUSED`.

Legend: N decoder layers.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers.utils.logging import disable_progress_bar

from connector.vector_math import settle_vector_math
from service.errors import EngineRefused, UnknownModel
from service.proof.canary import CANARY_SKIP
from service.proof.reference_model import Skeleton, build_skeleton
from service.proof.reference_pass import ReferencePass
from service.proof.reference_weights import WeightStream

EXIT_REFUSED = 3


def check_memory(
    skeleton: Skeleton, weights: WeightStream, prompts: Sequence[Sequence[int]], max_bytes: int
) -> None:
    """Refuse a model of which the largest part and all states do not fit. Raises EngineRefused (`canary`)."""
    text = skeleton.model.config.get_text_config(decoder=True)
    tokens = len(prompts) * max(len(ids) for ids in prompts)
    # Of layers 0..N and POST_NORM; once more while they are written.
    states = 2 * (len(skeleton.layers) + 2) * tokens * int(text.hidden_size) * skeleton.model.dtype.itemsize
    needed = _bytes("VmRSS") + weights.largest_part() + states
    if needed > max_bytes:
        raise EngineRefused(
            f"the canary's reference needs {needed} bytes of memory, {max_bytes} are allowed",
            field="canary",
            cure=f"raise QUARRY_CANARY_MAX_BYTES, or {CANARY_SKIP}",
        )


def serve(order: Mapping[str, Any]) -> None:
    """Run the model of an order and write its states.

    Raises:
        EngineRefused: there is no reference for this model, or it is too big.
        ValueError, OSError, RuntimeError: as transformers says.
    """
    folder, prompts, dtype = Path(order["folder"]), order["prompts"], getattr(torch, order["dtype"])
    skeleton = build_skeleton(folder, dtype)
    weights = WeightStream(skeleton, folder, dtype)
    check_memory(skeleton, weights, prompts, order["max_bytes"])
    states = ReferencePass(skeleton, weights).run(prompts)
    bits = skeleton.quantization.activation_bits if skeleton.quantization is not None else None
    told = {
        "library": f"transformers {transformers.__version__}",
        "peak_bytes": str(_bytes("VmHWM")),
        "activation_bits": str(bits or 0),
    }
    named = {f"{prompt}/{layer}": state for prompt, one in enumerate(states) for layer, state in one.items()}
    save_file(named, order["out"], metadata=told)


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


def _bytes(what: str) -> int:
    """Return a line of the kernel's account of this process: VmRSS now, VmHWM the most there ever was."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:"))


if __name__ == "__main__":
    sys.exit(main())
