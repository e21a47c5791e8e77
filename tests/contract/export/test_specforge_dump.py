"""SpecForge's own dump of the same conversations holds, tensor by tensor, what we write for it.

What of it is SpecForge's code, and what is answered for SGLang, says `tests/support/specforge_dump.py`.
"""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from schemas.job import JobState
from service.export.options import Algorithm
from service.export.run import export
from service.plan.layers import auxiliary_layers
from tests.contract.export.conftest import AUX, HIDDEN, LAST, truths_of, wanted
from tests.support.jobs import Shop, conversations, request as request_of
from tests.support.tiny_model import random_target
from tests.support.trainers import loaded_by

pytestmark = pytest.mark.slow

DUMP = (Path(__file__).parents[2] / "support" / "specforge_dump.py").read_text()
NUM_ROWS = 16
LONGEST = 96
STATES = {
    "eagle3": ("aux_hidden_state", "hidden_state"),
    "dflash": ("hidden_states",),
    "domino": ("hidden_states",),
    "dspark": ("hidden_states", "target_last_hidden_states"),
}
PADDED_IS_OFF = {"float32": 1e-5, "bfloat16": 0.03}
"""How far a token's states may be off, relative: the matrices of a padded row have another shape."""
Stored = dict[tuple[int, ...], dict[str, torch.Tensor]]
"""The tensors of each file, by its token ids."""


@dataclass(frozen=True)
class Dumps:
    """The two dumps of one target: ours and theirs lie in `folder`, `found` is what their process said."""

    dtype: str
    folder: Path
    found: dict[str, Any]
    sizes: tuple[int, int]
    newline: int

    def ours(self, algorithm: str) -> Stored:
        return stored((self.folder / "ours" / algorithm / "data").rglob("*.ckpt"))

    def theirs(self, algorithm: str) -> Stored:
        return stored(self.found[algorithm]["files"])


def preset(algorithm: str) -> str:
    return "eagle3" if algorithm == "eagle3" else "dflash"


def stored(files: Iterable[Path | str]) -> Stored:
    rows = [torch.load(file, weights_only=True) for file in files]
    found = {tuple(row["input_ids"].tolist()): row for row in rows}
    assert len(found) == len(rows)
    return found


def talks(tokenizer: Any) -> list[dict[str, Any]]:
    """Return turns of many lengths, some of them cut; the first behind the first token of its answer."""
    every = conversations(NUM_ROWS - 3, longest=25)
    system = {"role": "system", "content": "You are a manual."}
    every.append({"id": "system", "messages": [system, *every[2]["messages"]]})
    every.append({"id": "turns", "messages": [*every[0]["messages"], *every[2]["messages"]]})

    def asked(length: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": ("holds ~" * LONGEST)[:length]}]

    def prompt_tokens(messages: list[dict[str, str]]) -> int:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return len(tokenizer(text)["input_ids"])

    cut = next(asked(length) for length in range(7 * LONGEST) if prompt_tokens(asked(length)) == LONGEST - 1)
    return [{"id": "cut", "messages": [*cut, {"role": "assistant", "content": "Everything."}]}, *every]


def extracted(folder: Path, target: Path, samples: list[dict[str, Any]]) -> Path:
    shop = Shop.open(folder, target, engine="tests.support.model_engine:ModelEngine")
    try:
        job = shop.run(request_of(target, samples, layers="dflash", max_tokens=LONGEST))
        assert job.state is JobState.COMPLETED, job.problem
        return shop.settings.dataset_dir(job.id)
    finally:
        shop.store.close()


def draft_vocabularies(dataset: Path) -> tuple[int, int]:
    """Return a size that cuts between two frequencies, where no tie decides, and one beyond what was seen."""
    seen = Counter(token for row in truths_of(dataset) for token in row.ids[row.mask == 1].tolist())
    times = sorted(seen.values(), reverse=True)
    clean = max(size for size in range(1, len(times)) if times[size - 1] > times[size])
    return clean, len(times) + 50


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dumps(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Dumps:
    """Extract the conversations, export them for every algorithm, and let the trainer dump and load."""
    folder = tmp_path_factory.mktemp("dumps")
    recipe = {"arch": "qwen3", "layers": LAST, "hidden": HIDDEN, "max_position": 512}
    target = random_target(folder / "models" / "target", dtype=request.param, **recipe)
    tokenizer = AutoTokenizer.from_pretrained(target)
    samples = talks(tokenizer)
    told = folder / "conversations.jsonl"
    told.write_text("".join(json.dumps({"conversations": one["messages"]}) + "\n" for one in samples))
    dataset = extracted(folder / "shop", target, samples)
    sizes = draft_vocabularies(dataset)
    for algorithm in STATES:
        layers = tuple(auxiliary_layers(preset(algorithm), LAST))
        options = wanted("specforge", algorithm=Algorithm(algorithm), layers=layers, target=str(target))
        export(str(dataset), folder / "ours" / algorithm, options)
    for size in sizes:
        export(
            str(dataset),
            folder / "maps of ours" / str(size),
            wanted("specforge", layers=AUX, draft_vocab=size, target=str(target)),
        )
    given = (target, told, folder, LONGEST, ",".join(map(str, sizes)), torch.get_num_threads())
    found = loaded_by(DUMP, *given, result=folder / "result.pt")
    (newline,) = tokenizer.encode("\n", add_special_tokens=False)
    return Dumps(request.param, folder, found, sizes, newline)


@pytest.mark.parametrize("algorithm", STATES)
def test_every_tensor_of_the_trainers_own_dump_is_what_we_write(dumps, algorithm):
    ours, theirs = dumps.ours(algorithm), dumps.theirs(algorithm)
    assert ours.keys() == theirs.keys()
    for ids, row in theirs.items():
        assert ours[ids].keys() == row.keys() == {"input_ids", "loss_mask", *STATES[algorithm]}
        for name, due in row.items():
            mine = ours[ids][name]
            assert (mine.dtype, mine.shape) == (due.dtype, due.shape), name
            assert torch.equal(mine, due), name
        assert {row[name].dtype for name in STATES[algorithm]} == {getattr(torch, dumps.dtype)}


@pytest.mark.parametrize("algorithm", STATES)
def test_the_trainer_makes_equal_batches_of_both(dumps, algorithm):
    ours, theirs = dumps.found[algorithm]["ours"], dumps.found[algorithm]["theirs"]
    assert sum(len(batch["input_ids"]) for batch in theirs) == len(dumps.theirs(algorithm))
    for mine, due in zip(ours, theirs, strict=True):
        assert mine.keys() == due.keys()
        for name, tensor in due.items():
            assert (mine[name].dtype, mine[name].shape) == (tensor.dtype, tensor.shape), name
            assert torch.equal(mine[name], tensor), name


@pytest.mark.parametrize("algorithm", STATES)
def test_the_layers_that_the_trainer_resolves_are_those_of_our_preset(dumps, algorithm):
    layers = dumps.found[algorithm]["layers"]
    assert [layer + 1 for layer in layers] == auxiliary_layers(preset(algorithm), LAST)
    out = dumps.folder / "ours" / algorithm
    assert f"Auxiliary layers {layers}, counted from 0" in (out / "TRAIN.md").read_text()
    told = json.loads((out / "train.json").read_text())["model"]
    assert told.get("aux_hidden_state_layer_ids") == (layers if algorithm == "eagle3" else None)


@pytest.mark.parametrize("algorithm", STATES)
def test_the_files_are_named_alike_and_the_same_row_is_left_out(dumps, algorithm):
    short = [row for row in dumps.ours("eagle3").values() if row["loss_mask"].sum() < 2]
    assert len(short) == 1
    folder = dumps.folder / "ours" / algorithm / "data"
    ours = list(folder.rglob("*.ckpt"))
    theirs = [Path(file) for file in dumps.found[algorithm]["files"]]
    left_out = 0 if algorithm == "eagle3" else 1
    # They number what is left, we number the dataset's rows, of which the first is left out.
    names = [f"rows_0-2000/data_{number}.ckpt" for number in range(NUM_ROWS)]
    assert {path.relative_to(folder).as_posix() for path in ours} == set(names[left_out:])
    assert [path.parts[-2] + "/" + path.name for path in theirs] == names[: NUM_ROWS - left_out]


def test_a_dump_in_batches_holds_our_rows_and_padding_behind_them(dumps):
    ours = dumps.ours("eagle3")
    padded = 0
    alone = [torch.load(file, weights_only=True) for file in dumps.found["eagle3"]["files"]]
    batched = [torch.load(file, weights_only=True) for file in dumps.found["padded"]]
    for single, row in zip(alone, batched, strict=True):
        length = len(single["input_ids"])
        mine = ours[tuple(row["input_ids"][:length].tolist())]
        assert torch.equal(row["loss_mask"][:length], mine["loss_mask"])
        assert not row["loss_mask"][length:].any()
        assert not row["input_ids"][length:].any()
        padded += len(row["input_ids"]) - length
        for name in STATES["eagle3"]:
            off = (mine[name] - row[name][:, :length]).float().norm(dim=-1) / mine[name].float().norm(dim=-1)
            assert off.max() < PADDED_IS_OFF[dumps.dtype]
    assert padded


def test_the_trainers_qwen_template_supervises_the_newline_behind_each_answer_too(dumps):
    ours = dumps.ours("eagle3")
    more = 0
    for row in dumps.found["newline"]:
        mine = ours[tuple(row["input_ids"].tolist())]["loss_mask"]
        added = row["loss_mask"] != mine
        assert (row["input_ids"][added] == dumps.newline).all()
        assert (row["loss_mask"][added] == 1).all()
        assert (mine[added.roll(-1)] == 1).all()
        more += int(added.sum())
    assert more


def test_the_vocabulary_maps_are_the_same_where_no_tie_decides(dumps):
    for size in dumps.sizes:
        theirs = dumps.found["maps"][size]
        ours = torch.load(dumps.folder / "maps of ours" / str(size) / "vocab_mapping.pt", weights_only=True)
        assert ours.keys() == theirs.keys()
        for name, due in theirs.items():
            assert ours[name].dtype == due.dtype
            assert torch.equal(ours[name], due), (size, name)
