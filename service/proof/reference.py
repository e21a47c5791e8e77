"""Reference states by a transformers forward pass on the CPU, run as `python -m service.proof.reference`.

A process of its own, because vLLM's Transformers backend patches transformers inside its process. JSON goes
in by standard input, safetensors come out by a file. Imports torch: import it lazily.

Legend: T tokens, H hidden size.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from schemas.identity import DTYPE_BYTES
from schemas.request import Dtype
from service.errors import EngineRefused
from service.proof.canary import POST_NORM
from service.proof.head_weights import FINAL_NORM_MODULE, tensor_files, text_config

_SKIP = 'say "canary": "skip" to go without it; the manifest will record that'


def reference_states(
    folder: Path, prompts: Sequence[Sequence[int]], dtype: Dtype, *, max_bytes: int | None, timeout_s: float
) -> list[dict[int, torch.Tensor]]:
    """Return for each prompt the states [T, H] of every layer 0..N (N before the final norm) and POST_NORM.

    Args:
        folder: config and safetensors of the model.
        prompts: token ids; T is each one's length.
        dtype: the one the engine runs the model in.
        max_bytes: of weights to load; null is half of the memory that is available now.
        timeout_s: for loading and running the model.

    Raises:
        EngineRefused: the weights are too big, or transformers cannot run the model.
    """
    bound = available_bytes() // 2 if max_bytes is None else max_bytes
    needed = loaded_bytes(folder, dtype)
    if needed > bound:
        raise EngineRefused(
            f"the canary needs {needed} bytes of weights in memory, {bound} are allowed",
            field="canary",
            cure=_SKIP,
        )
    with tempfile.TemporaryDirectory(prefix="quarry-reference-") as scratch:
        out = Path(scratch) / "states.safetensors"
        token_ids = [list(ids) for ids in prompts]
        order = {"folder": str(folder), "prompts": token_ids, "dtype": dtype, "out": str(out)}
        try:
            subprocess.run(
                [sys.executable, "-m", "service.proof.reference"],
                input=json.dumps(order).encode(),
                capture_output=True,
                check=True,
                timeout=timeout_s,
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
            )
            tensors = load_file(out)
        except subprocess.TimeoutExpired as error:
            what = f"the reference took more than {timeout_s} s"
            raise EngineRefused(what, field="canary", cure=_SKIP) from error
        except subprocess.CalledProcessError as error:
            said = error.stderr.decode(errors="replace").strip().rsplit("\n", 1)[-1]
            raise EngineRefused(f"the reference failed: {said}", field="canary", cure=_SKIP) from error
    states: list[dict[int, torch.Tensor]] = [{} for _ in prompts]
    for name, tensor in tensors.items():
        prompt, layer_id = name.split("/")
        states[int(prompt)][int(layer_id)] = tensor
    return states


def available_bytes() -> int:
    """Return the kernel's MemAvailable. Raises OSError."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def loaded_bytes(folder: Path, dtype: Dtype) -> int:
    """Return about what the weights take in `dtype`, from the sizes of their files. Raises EngineRefused."""
    stored = sum(file.stat().st_size for file in set(tensor_files(folder).values()))
    width = DTYPE_BYTES.get(str(text_config(folder).get("dtype")), DTYPE_BYTES[dtype])
    return stored * DTYPE_BYTES[dtype] // width


def run_model(folder: Path, prompts: Sequence[Sequence[int]], dtype: str) -> dict[str, torch.Tensor]:
    """Run the model on each prompt in this process; return tensors [T, H] named `prompt/layer`.

    Raises ValueError and OSError, by transformers or because the final norm cannot be found.
    """
    from transformers import AutoModelForCausalLM

    # Eager attention knows sinks and soft caps, which the fused kernels leave out for some models.
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="eager", local_files_only=True
    ).eval()
    norms = [module for name, module in model.named_modules() if FINAL_NORM_MODULE.fullmatch(name)]
    if len(norms) != 1:
        raise ValueError(f"{len(norms)} modules of {type(model).__name__} are named like a final norm")
    seen: dict[str, torch.Tensor] = {}
    norms[0].register_forward_pre_hook(lambda _, args: seen.update(before=args[0]))
    norms[0].register_forward_hook(lambda _, args, output: seen.update(after=output))
    tensors: dict[str, torch.Tensor] = {}
    for number, ids in enumerate(prompts):
        with torch.inference_mode():
            output = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
        layers = dict(enumerate(output.hidden_states[:-1]))
        num_layers = model.config.get_text_config().num_hidden_layers
        if len(layers) != num_layers:
            raise ValueError(f"{len(layers)} hidden states of {num_layers} decoder layers")
        layers |= {num_layers: seen["before"], POST_NORM: seen["after"]}
        tensors |= {f"{number}/{layer_id}": states[0].clone() for layer_id, states in layers.items()}
    return tensors


def main() -> None:
    """Serve one order from standard input."""
    order = json.load(sys.stdin)
    save_file(run_model(Path(order["folder"]), order["prompts"], order["dtype"]), order["out"])


if __name__ == "__main__":
    main()
