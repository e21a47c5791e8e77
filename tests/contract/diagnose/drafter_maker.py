"""`python -m tests.contract.diagnose.drafter_maker TARGET DATASET OUT`: one that knows the rows by heart.

Trained for seconds by speculators' own class and loss, in a process that has its packages on the path.
"""

import sys
from pathlib import Path

import torch
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel
from transformers import LlamaConfig

from service.reader import QuarryDataset

LAYERS = [2, 4, 5]
STEPS, EPOCHS = 2, 14


def main(target: str, dataset: str, out: str) -> None:
    torch.manual_seed(0)
    rows = QuarryDataset(dataset)
    ours = LlamaConfig.from_pretrained(target)
    layer = LlamaConfig(
        vocab_size=ours.vocab_size,
        hidden_size=ours.hidden_size,
        intermediate_size=2 * ours.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-6,
    )
    model = Eagle3DraftModel.from_training_args(
        layer,
        draft_vocab_size=ours.vocab_size,
        norm_before_residual=True,
        target_layer_ids=LAYERS,
        verifier_name_or_path=target,
        ttt_steps=STEPS,
        draft_attn_impl="sdpa",
    )
    model.save_pretrained(Path(out, "untrained"))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=4e-3)
    loss_config = resolve_loss_config("kl_div", "eager")
    for _ in range(EPOCHS):
        for number in range(len(rows)):
            row = rows.row(number)
            _, loss, _ = model(
                hidden_states=row.auxiliary(tuple(LAYERS)).float()[None, :-1],
                input_ids=row.input_ids[None, 1:],
                document_ids=torch.zeros((1, row.num_tokens - 1), dtype=torch.long),
                loss_mask=row.loss_mask[None, 1:].bool(),
                verifier_last_hidden_states=row.last().float()[None, 1:],
                ttt_steps=STEPS,
                loss_config=loss_config,
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.save_pretrained(Path(out, "right"))


if __name__ == "__main__":
    main(*sys.argv[1:])
