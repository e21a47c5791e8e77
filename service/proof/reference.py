"""Reference states from a transformers forward pass on the CPU, in a process that holds one layer at a time.

The model is built without weights and its own forward runs unchanged. Each decoder layer's tensors are read
from the safetensors files before it runs and dropped afterwards. So the files are read once, in the memory of
the largest layer, for any architecture in transformers. The alternative, `device_map` with disk offload,
writes converted tensors such as MoE experts to disk a second time (transformers 5.19 with accelerate 1.15: 85
% of a small Mixtral's bytes). The process is killed if it uses too much memory.

Imports torch: import it lazily.

Legend: T tokens, H hidden size.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from schemas.request import Dtype
from service.errors import EngineDied, EngineRefused
from service.memory import available_bytes
from service.proof.canary import CANARY_SKIP, no_reference

EXIT_REFUSED = 3
"""Exit status of the process if its last line of standard error is a refusal, as JSON."""
_WATCH_S = 0.1
_ENVIRONMENT = {
    # Any GPU memory that the process took would disturb an engine that is measuring the free memory.
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    # Convert a layer's tensors one after the other instead of all at once: half the memory.
    "HF_DEACTIVATE_ASYNC_LOAD": "1",
}


@dataclass(frozen=True, slots=True)
class Reference:
    """The states of the reference, and what computing them cost.

    `states` are [T, H] by prompt and layer: 0..N (N before the final norm) and POST_NORM. `library` computed
    them; `seconds` is the process's lifetime, `peak_bytes` its peak memory including mapped files.
    `activation_bits` is set if the model's quantization makes an engine round the inputs of matmuls, too.
    """

    states: tuple[dict[int, torch.Tensor], ...]
    library: str
    seconds: float
    peak_bytes: int
    activation_bits: int | None


async def reference_states(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    dtype: Dtype,
    *,
    max_bytes: int | None,
    timeout_s: float,
    last_tokens: int | None = None,
) -> Reference:
    """Run the reference on `prompts`; a cancelled call leaves no process behind.

    Args:
        folder: the model's folder, with config and safetensors.
        prompts: token ids, T per prompt.
        dtype: the dtype in which the engine runs the model.
        max_bytes: memory that the process may use; if None, half of what is available now.
        timeout_s: limit for the whole run.
        last_tokens: of a longer prompt, return the states of this many tokens at its end.

    Raises:
        EngineRefused: it needs too much memory or time, or transformers cannot run the model (`canary`).
        EngineDied: its process was killed, such as for want of memory, which is no fault of the model.
    """
    bound = available_bytes() // 2 if max_bytes is None else max_bytes
    with tempfile.TemporaryDirectory(prefix="quarry-reference-") as scratch:
        out = Path(scratch) / "states.safetensors"
        order = {
            "folder": str(folder),
            "prompts": [list(ids) for ids in prompts],
            "dtype": dtype,
            "last_tokens": last_tokens,
            "out": str(out),
        }
        began = time.monotonic()
        peak_bytes = await _run(json.dumps(order).encode(), bound, timeout_s)
        seconds = time.monotonic() - began
        return await asyncio.to_thread(_read, out, len(prompts), seconds, peak_bytes)


async def _run(order: bytes, max_bytes: int, timeout_s: float) -> int:
    """Run the process until it ends; return its peak memory in bytes."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "service.proof.reference_process"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | _ENVIRONMENT,
    )
    ended = asyncio.create_task(process.communicate(order))
    peak_bytes = 0
    try:
        async with asyncio.timeout(timeout_s):
            while not ended.done():
                peak_bytes = max(peak_bytes, _peak_bytes(process.pid))
                if peak_bytes > max_bytes:
                    raise no_reference(
                        f"the canary's reference needs {peak_bytes} bytes of memory, {max_bytes} are allowed",
                        f"raise QUARRY_CANARY_MAX_BYTES, or {CANARY_SKIP}",
                    )
                await asyncio.wait({ended}, timeout=_WATCH_S)
    except TimeoutError as error:
        raise no_reference(f"the reference took more than {timeout_s:g} s") from error
    finally:
        if process.returncode is None:
            process.kill()
        await asyncio.gather(ended, return_exceptions=True)
    _, errors = ended.result()
    if process.returncode:
        raise _failure(process.returncode, errors.decode(errors="replace").strip().rsplit("\n", 1)[-1])
    return peak_bytes


def _peak_bytes(pid: int) -> int:
    """Return the peak memory of a process so far; 0 if it has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def _failure(status: int, last_line: str) -> EngineRefused | EngineDied:
    if status == EXIT_REFUSED:
        return EngineRefused(**json.loads(last_line), field="canary")
    if status == -signal.SIGKILL:
        cure = f"look in the kernel's log; where memory is short, free some, or {CANARY_SKIP}"
        return EngineDied("the kernel ended the canary's reference", field="canary", cure=cure)
    why = f"signal {-status} ended it" if status < 0 else last_line
    return no_reference(f"the reference failed: {why}")


def _read(file: Path, num_prompts: int, seconds: float, peak_bytes: int) -> Reference:
    states: tuple[dict[int, torch.Tensor], ...] = tuple({} for _ in range(num_prompts))
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    for name, tensor in load_file(file).items():
        prompt, layer_id = name.split("/")
        states[int(prompt)][int(layer_id)] = tensor
    bits = int(metadata["activation_bits"]) or None
    return Reference(states, metadata["library"], seconds, peak_bytes, bits)
