"""What reader, `quarry verify` and `quarry export` give for a frozen dataset, as JSON that can be compared.

A tensor is a line of text. Stored bytes are named by their hash: `int64[29] = 9f86d081884c7d65`. What was
computed from them, by the final norm or the head, may differ in the last bit from machine to machine, so it
is named by a few numbers, projections of its tokens onto a fixed vector: `bfloat16[29,64] ~ 0.731 -1.26 ...`.
"""

import itertools
import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import xxhash
from safetensors.torch import load_file

from service.cli import main
from service.reader import DFlash, Eagle, Eagle3, Mtp, PEagle, QuarryDataset, Row, Step35Mtp

HERE = Path(__file__).parent
DATASETS = HERE / "datasets"
NAMES = ("answers", "fp8", "plain", "planes", "repository")

VIEWS = {
    "Eagle": Eagle(),
    "Eagle3": Eagle3(),
    "Eagle3 of two": Eagle3(layers=(1, 3)),
    "PEagle": PEagle(num_steps=3),
    "DFlash": DFlash(),
    "Mtp": Mtp(num_steps=2),
    "Mtp before the norm": Mtp(num_steps=2, normed=False),
    "Step35Mtp": Step35Mtp(),
}
COMPUTED_BY_VIEWS = {("Eagle", "hidden_states"), ("Mtp", "hidden_states")}

EXPORTS: dict[str, tuple[str, ...]] = {
    "speculators": ("--draft-vocab", "30"),
    "speculators mtp": ("--algorithm", "mtp"),
    "specforge": ("--draft-vocab", "30"),
    "specforge dspark": ("--algorithm", "dspark", "--layers", "1,3"),
    "torchspec": ("--draft-vocab", "30"),
    "modelopt": ("--draft-vocab", "30"),
    "angelslim": ("--draft-vocab", "30"),
    "eagle": (),
    "deepspec": (),
    "nemo": ("--max-tokens", "20"),
    "nemo eagle3": ("--algorithm", "eagle3", "--draft-vocab", "30"),
}
COMPUTED_BY_EXPORTS = {
    ("speculators mtp", "hidden_states"),
    ("specforge", "hidden_state"),
    ("specforge dspark", "target_last_hidden_states"),
    ("modelopt", "hidden_states"),
    ("angelslim", "target_hiddens"),
    ("eagle", "hidden_state"),
    ("deepspec", "last"),
    ("nemo", "target_last_hidden_states"),
    ("nemo eagle3", "target_probs"),
}
MOST = 16
UNFROZEN = frozenset({"TRAIN.md", ".export.lock"})
"""Notes for people; a lock."""


def exports_of(name: str) -> tuple[str, ...]:
    """Return which exports of a dataset are frozen: all of one, of the others one that reads every layer."""
    return tuple(EXPORTS) if name == "plain" else ("speculators",)


# Values.


def read(folder: Path) -> dict[str, Any]:
    """Return everything that the reader gives."""
    rows = QuarryDataset(folder)
    views = {name: QuarryDataset(folder, view) for name, view in VIEWS.items()}
    return {
        "about": {
            "rows": len(rows),
            "num_tokens": rows.num_tokens,
            "sample_ids": rows.sample_ids,
            "supervised": {str(token): count for token, count in sorted(rows.supervised_counts().items())},
            "layer_ids": list(rows.about.layer_ids),
            "num_layers": rows.about.num_layers,
            "hidden_size": rows.about.hidden_size,
            "dtype": str(rows.about.dtype),
        },
        "jobs": {path.stem: len(QuarryDataset(folder, jobs=[path.stem])) for path in _manifests(folder)},
        "rows": [_row(rows.row(number)) for number in range(len(rows))],
        "views": {name: [_view(name, row) for row in made] for name, made in views.items()},
    }


def _manifests(folder: Path) -> list[Path]:
    return sorted(folder.glob("manifests/*.json"))


def _row(row: Row) -> dict[str, Any]:
    layers = {str(layer_id): exact(row.layer(layer_id)) for layer_id in row.layer_ids}
    return {
        "sample_id": row.sample_id,
        "source_id": row.source_id,
        "prompt_tokens": row.prompt_tokens,
        "input_ids": exact(row.input_ids),
        "loss_mask": exact(row.loss_mask),
        "layers": layers,
        "auxiliary": exact(row.auxiliary()),
        "last_normed": computed(row.last_normed()),
    }


def _view(name: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {
        key: computed(tensor)
        if key == "target_hidden_states" or (name, key) in COMPUTED_BY_VIEWS
        else exact(tensor)
        for key, tensor in tensors.items()
    }


def verify(folder: Path) -> dict[str, Any]:
    """Return what `quarry verify --json` says, its logits checked against the frozen target."""
    code, said = quarry("verify", str(folder), "--model", str(HERE / "target"), "--json")
    report = json.loads(said)
    del report["where"], report["logit_max_error"]  # the latter is of this machine's arithmetic
    return {"exit": code, "report": report}


def export(name: str, folder: Path, out: Path) -> dict[str, Any]:
    """Export a dataset to `out` and return every value in every file. Run in the folder of `target/`."""
    places = ("--out", str(out), "--target", "./target")
    code, _ = quarry("export", str(folder), "--to", name.split()[0], *places, *EXPORTS[name])
    assert code == 0
    files = sorted(path for path in out.rglob("*") if path.is_file() and path.name not in UNFROZEN)
    return {path.relative_to(out).as_posix(): _file(name, path, out) for path in files}


def _file(name: str, path: Path, out: Path) -> Any:
    match path.suffix:
        case ".safetensors":
            return _value(name, "", load_file(path))
        case ".pt" | ".ckpt":
            return _value(name, "", torch.load(path, weights_only=True))
        case ".npy":
            return exact(torch.from_numpy(np.load(path)))
        case ".arrow":
            with pa.ipc.open_stream(path.read_bytes()) as stream:
                return stream.read_all().to_pydict()
        case ".bin":
            return [_value(name, "", record) for record in _deepspec(path)]
        case ".idx":
            return xxhash.xxh3_64_hexdigest(path.read_bytes())
        case _:
            return [json.loads(line) for line in _lines(path, out)]


def _lines(path: Path, out: Path) -> Iterable[str]:
    text = path.read_text().replace(str(out.absolute()), "OUT")
    text = text.replace('"target": "./target"', '"target": null')  # an option, and not what is exported
    return text.splitlines() if path.suffix == ".jsonl" else [text]


def _deepspec(path: Path) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of every row of a shard; the index says where they begin."""
    content = path.read_bytes()
    records = list(struct.iter_unpack("<QIIQQQQQ", path.with_name("samples.idx").read_bytes()))
    ends = [*(record[3] for record in records[1:]), len(content)]
    for (_, _, num_tokens, *begins), end in zip(records, ends, strict=True):
        parts = [content[a:b] for a, b in itertools.pairwise((*begins, end))]
        tensors = [
            torch.frombuffer(bytearray(part), dtype=torch.uint8).view(num_tokens, -1) for part in parts
        ]
        keys = ("input_ids", "attention_mask", "loss_mask", "auxiliary")
        yield dict(zip(keys, tensors, strict=False)) | {"last": tensors[-1].view(torch.bfloat16)}


def _value(name: str, key: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return computed(value) if (name, key) in COMPUTED_BY_EXPORTS else exact(value)
    if isinstance(value, Mapping):
        return {str(inner): _value(name, str(inner), one) for inner, one in sorted(value.items())}
    return value


def quarry(*arguments: str) -> tuple[int, str]:
    """Run a command in this process; return its exit code and what it printed."""
    with StringIO() as output, redirect_stdout(output):
        try:
            main(arguments)
        except SystemExit as ended:
            return int(str(ended.code or 0)), output.getvalue()


# Text.


def exact(tensor: torch.Tensor) -> str:
    """Name a tensor by its bytes."""
    digest = xxhash.xxh3_64_hexdigest(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return f"{_form(tensor)} = {digest}"


def computed(tensor: torch.Tensor) -> str:
    """Name a tensor by a number for every token, or for as many neighbours as make `MOST` numbers."""
    width = tensor.shape[-1]
    onto = torch.cos(torch.arange(width, dtype=torch.float64) * 1.7 + 0.3) * math.sqrt(2 / width)
    tokens = (tensor.reshape(-1, width).double() @ onto).numpy()
    tokens *= np.cos(np.arange(len(tokens)) * 0.9 + 0.1)
    groups = np.array_split(tokens, min(MOST, len(tokens))) if len(tokens) else []
    numbers = (f"{group.sum() / math.sqrt(len(group)):.4g}" for group in groups)
    return f"{_form(tensor)} ~ {' '.join(numbers)}".rstrip()


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}".replace(" ", "")


def differences(frozen: Any, found: Any, where: str = "") -> list[str]:
    """Return what is not as it was, by its place; computed values may be two hundredths off."""
    if frozen == found:
        return []
    if isinstance(frozen, dict) and isinstance(found, dict) and frozen.keys() == found.keys():
        return [one for key in frozen for one in differences(frozen[key], found[key], f"{where}/{key}")]
    if isinstance(frozen, list) and isinstance(found, list) and len(frozen) == len(found):
        pairs = enumerate(zip(frozen, found, strict=True))
        return [one for place, (a, b) in pairs for one in differences(a, b, f"{where}/{place}")]
    if isinstance(frozen, str) and isinstance(found, str) and _alike(frozen, found):
        return []
    return [f"{where}: {str(frozen)[:200]} became {str(found)[:200]}"]


def _alike(frozen: str, found: str) -> bool:
    (form, is_computed, before), (other, _, after) = frozen.partition(" ~"), found.partition(" ~")
    if not is_computed or form != other:
        return False
    old, new = np.array(before.split(), float), np.array(after.split(), float)
    return old.shape == new.shape and bool(np.all(np.abs(old - new) <= 0.02 * np.sqrt(np.mean(old**2))))
