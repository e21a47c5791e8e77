"""A transformers loop: one forward pass a sample, one file a sample, as dump scripts of trainers do it.

Legend: T tokens, H hidden size.
"""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.rows.contract import RowFailed, Site, Written, removed


class TransformersEngine:
    """The model by transformers, in this process, on all cores."""

    def __init__(self, site: Site) -> None:
        """Hold what is run; the model comes with `start`."""
        self._site = site
        self._model: Any = None
        self.rows = {"transformers": self}
        self._prompts: list[tuple[int, ...]] = []

    @property
    def _files(self) -> Path:
        return self._site.folder / "files"

    async def start(self) -> None:
        """Load the model."""
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self._model = AutoModelForCausalLM.from_pretrained(self._site.weights, dtype=torch.bfloat16).eval()

    async def stop(self) -> None:
        """The model goes with the process."""

    async def prepare(self, turn: int) -> None:
        """Draw the round's prompts."""
        self._prompts = self._site.work.prompts("transformers", turn)
        self._files.mkdir()

    async def measure(self) -> float:
        """Run every sample and write its file."""
        return await asyncio.to_thread(self._dump)

    async def clean(self) -> Written:
        """Hold every file against its prompt, and delete them."""
        loaded = [torch.load(path, mmap=True) for path in sorted(self._files.glob("*.ckpt"))]
        self._site.check_lengths([one["hidden_state"].shape[1] for one in loaded])
        for one, prompt in zip(loaded, self._prompts, strict=True):
            if one["input_ids"][: len(prompt)].tolist() != list(prompt):
                raise RowFailed("a file holds other tokens than were asked for")
        return removed(self._files, "*.ckpt")

    @torch.inference_mode()
    def _dump(self) -> float:
        begin = time.perf_counter()
        *aux, _ = self._site.work.target.layer_ids
        for number, prompt in enumerate(self._prompts):
            ids_1T = torch.tensor([prompt])
            answer = self._site.work.kind.answer_tokens
            if answer:
                ids_1T = self._model.generate(
                    ids_1T, max_new_tokens=answer, do_sample=False, attention_mask=torch.ones_like(ids_1T)
                )[:, :-1]
            # Without the head: its logits are no part of a dump.
            states = self._model.model(ids_1T, output_hidden_states=True, use_cache=False).hidden_states
            sample = {
                "input_ids": ids_1T[0],
                "loss_mask": torch.ones_like(ids_1T[0]),
                "hidden_state": states[-1],
                "aux_hidden_state": torch.cat([states[layer] for layer in aux], dim=-1),
            }
            torch.save(sample, self._files / f"{number:05d}.ckpt")
        return time.perf_counter() - begin
