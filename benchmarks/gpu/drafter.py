"""The part `drafter`: a job's dataset, read by the shipped reader, through a trainer's step on the GPU.

The step is that of EAGLE-3's first drafted token: auxiliary states are joined, a decoder layer runs over them
and the token's embedding, and its output is compared with the target's distribution, made of the last layer.

Legend: T tokens, L auxiliary layers, H hidden size, V vocabulary.
"""

import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from benchmarks.gpu.figures import Save
from benchmarks.gpu.jobs import NUM_ROWS, NUM_TINY, run_job, write_job_target
from service.reader import QuarryDataset
from service.reader.views import Eagle3

STEPS, TINY_STEPS, REPORTED = 400, 20, 50
ROWS_A_STEP = 8
LEARNING_RATE = 3e-4
HEADS = 16


class Drafter(nn.Module):
    """One decoder layer on joined states and the next token's embedding, which is the target's."""

    def __init__(self, num_layers: int, embedding_VH: torch.Tensor, heads: int) -> None:
        """Take the target's embedding as it is; it is not trained."""
        super().__init__()
        hidden_size = embedding_VH.shape[1]
        self.register_buffer("embedding_VH", embedding_VH)
        self.join = nn.Linear(num_layers * hidden_size, hidden_size, bias=False)
        self.norm = nn.RMSNorm(2 * hidden_size)
        self.mix = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layer = nn.TransformerEncoderLayer(hidden_size, heads, 4 * hidden_size, 0.0, batch_first=True)
        self.last = nn.RMSNorm(hidden_size)

    def forward(self, joined: torch.Tensor, next_ids_T: torch.Tensor) -> torch.Tensor:
        """Return the drafted states [T, H]: of auxiliary states side by side [T, L * H] and the next ids."""
        embedded_TH = self.embedding_VH[next_ids_T]
        seen_TH = self.mix(self.norm(torch.cat([self.join(joined), embedded_TH], dim=-1)))
        length = len(seen_TH)
        mask = nn.Transformer.generate_square_subsequent_mask(
            length, device=seen_TH.device, dtype=seen_TH.dtype
        )
        drafted: torch.Tensor = self.last(self.layer(seen_TH[None], src_mask=mask, is_causal=True)[0])
        return drafted


def measure_drafter(options: Namespace, save: Save) -> None:
    """Make a dataset, train a drafter on it; save the loss as it falls, and what a step and a read take."""
    folder = (options.folder / "drafter").resolve()
    write_job_target(folder / "target", tiny=options.tiny)
    rows = NUM_TINY if options.tiny else NUM_ROWS // 3
    dataset = QuarryDataset(run_job(folder, "dataset", 9, rows, None, options, save), Eagle3())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    embedding_VH, head_VH = target_ends(folder / "target", device)
    drafter = Drafter(3, embedding_VH, HEADS).to(device)
    optimizer = torch.optim.AdamW(drafter.parameters(), LEARNING_RATE)
    losses: list[float] = []
    read_s = step_s = 0.0
    for step in range(TINY_STEPS if options.tiny else STEPS):
        begun = time.perf_counter()
        batch = [dataset[(step * ROWS_A_STEP + row) % len(dataset)] for row in range(ROWS_A_STEP)]
        read_s += time.perf_counter() - begun
        begun = time.perf_counter()
        losses.append(train_step(drafter, optimizer, head_VH, batch, device))
        step_s += time.perf_counter() - begun
        if (step + 1) % (TINY_STEPS // 2 if options.tiny else REPORTED) == 0:
            save(
                "steps",
                {
                    "steps": step + 1,
                    "loss_first": losses[0],
                    "loss_last_tenth": sum(losses[-len(losses) // 10 :]) / -(-len(losses) // 10),
                    "read_s_a_step": read_s / (step + 1),
                    "step_s": step_s / (step + 1),
                },
            )


def target_ends(folder: Path, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the target's embedding and head, both [V, H] in float32."""
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return tuple(found[name].float().to(device) for name in ("model.embed_tokens.weight", "lm_head.weight"))  # type: ignore[return-value]


def train_step(
    drafter: Drafter,
    optimizer: torch.optim.Optimizer,
    head_VH: torch.Tensor,
    batch: list[dict[str, Any]],
    device: torch.device,
) -> float:
    """Take one step over a batch of rows; return the mean cross-entropy of a token."""
    optimizer.zero_grad()
    total = torch.zeros((), device=device)
    for row in batch:
        states, target = (row[name].to(device).float() for name in ("hidden_states", "target_hidden_states"))
        drafted_TV = drafter(states, row["input_ids"].to(device)) @ head_VH.T
        wanted_TV = torch.softmax(target @ head_VH.T, dim=-1)
        total = total + nn.functional.cross_entropy(drafted_TV, wanted_TV) / len(batch)
    total.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return total.item()
