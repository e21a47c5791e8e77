"""Asks the installed engine which architectures can return hidden states, and what it takes them for.

In a process of its own, because it imports every model of the engine: `python -m ...engine_names OUT`.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]

KINDS = {
    "_TEXT_GENERATION_MODELS": "text",
    "_TRANSFORMERS_SUPPORTED_MODELS": "text",
    "_MULTIMODAL_MODELS": "multimodal",
    "_SPECULATIVE_DECODING_MODELS": "drafter",
    "_TRANSFORMERS_BACKEND_MODELS": "backend",
}
"""By the engine's own tables; whatever else stands in them is a pooling model."""


def listed_by_the_engine() -> dict[str, tuple[str, ...]]:
    """Return the architectures by kind: text, multimodal, drafter, backend, pooling."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "names.json"
        command = [sys.executable, "-m", "tests.architectures.engine_names", str(out)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        return {kind: tuple(names) for kind, names in json.loads(out.read_bytes()).items()}


def main() -> None:
    """Import every class that can be imported here, and ask each."""
    from vllm.model_executor.models import registry
    from vllm.model_executor.models.interfaces import supports_eagle3

    kinds: dict[str, list[str]] = {}
    for name, model in sorted(registry.ModelRegistry.models.items()):
        try:
            able = supports_eagle3(model.load_model_cls())
        except (ImportError, AttributeError, RuntimeError):
            # A package or a kernel that is not here; a recipe's own run says which.
            continue
        if able:
            kind = next(
                (kind for table, kind in KINDS.items() if name in getattr(registry, table)), "pooling"
            )
            kinds.setdefault(kind, []).append(name)
    Path(sys.argv[1]).write_text(json.dumps(kinds))


if __name__ == "__main__":
    main()
