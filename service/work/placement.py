"""Assigns GPUs and CPU cores to each worker of a node."""

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from service.errors import OptionRefused

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER, BY_BUS = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
AUTO = "auto"
LIST_S = 60.0
PCI_DEVICES = Path("/sys/bus/pci/devices")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one worker runs: `gpus` as named in CUDA_VISIBLE_DEVICES, and `cores`; None means all."""

    gpus: tuple[str, ...] | None = None
    cores: frozenset[int] | None = None

    def environment(self) -> dict[str, str]:
        """Return the environment variables that limit the worker to its GPUs."""
        if self.gpus is None:
            return {}
        # GPUs are numbered as by nvidia-smi.
        return {VISIBLE: ",".join(self.gpus), ORDER: BY_BUS}


EVERYWHERE = Placement()


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU and the cores of its NUMA node, None if unknown."""

    name: str
    cores: frozenset[int] | None = None


def placements(
    workers: str, tensor_parallel_size: int, list_gpus: Callable[[], Sequence[Gpu]] | None = None
) -> list[Placement]:
    """Return a placement for each worker.

    `workers` is a number, or `auto` for one per group of `tensor_parallel_size` GPUs. GPUs of the same NUMA
    node are grouped together. A single worker gets everything. Raises OptionRefused (`workers`).
    """
    if workers == "1":
        return [EVERYWHERE]
    gpus = (list_gpus or visible_gpus)()
    most = len(gpus) // tensor_parallel_size
    if workers == AUTO and not gpus:
        return [EVERYWHERE]
    number = most if workers == AUTO else _number(workers)
    if not gpus:
        return [Placement(None, cores) for cores in _shares(frozenset(os.sched_getaffinity(0)), number)]
    if number > most or not number:
        needed = max(number, 1) * tensor_parallel_size
        cure = "lower it, or QUARRY_TENSOR_PARALLEL_SIZE"
        raise OptionRefused(f"{len(gpus)} GPUs are here, {needed} are needed", field="workers", cure=cure)
    near = sorted(gpus, key=lambda gpu: min(gpu.cores or {0}))
    groups = [near[n * tensor_parallel_size : (n + 1) * tensor_parallel_size] for n in range(number)]
    nodes = [group[0].cores for group in groups]
    shares = {cores: _shares(cores, nodes.count(cores)) for cores in nodes if cores is not None}
    return [
        Placement(tuple(gpu.name for gpu in group), shares[cores].pop() if cores in shares else None)
        for group, cores in zip(groups, nodes, strict=True)
    ]


def _number(workers: str) -> int:
    if not workers.isdecimal() or int(workers) == 0:
        cure = f"give 1 or more, or {AUTO!r}"
        raise OptionRefused(f"{workers!r} is not a number of workers", field="workers", cure=cure)
    return int(workers)


def _shares(cores: frozenset[int], number: int) -> list[frozenset[int] | None]:
    """Split cores into `number` contiguous shares; all None if there are not enough cores."""
    each = len(cores) // number
    ordered = sorted(cores)
    return [frozenset(ordered[n * each : (n + 1) * each]) or None for n in range(number)]


def visible_gpus() -> list[Gpu]:
    """Return the GPUs that this process may use: those in CUDA_VISIBLE_DEVICES, or all that nvidia-smi lists.

    Raises OptionRefused: for `workers` if nvidia-smi fails; for CUDA_VISIBLE_DEVICES if it names a GPU twice,
    or uses numbers that CUDA counts in a different order.
    """
    shown = os.environ.get(VISIBLE)
    # CUDA stops at the first entry that is not a GPU; Slurm writes NoDevFiles if there is none.
    given = map(str.strip, (shown or "").split(","))
    names = takewhile(lambda name: name not in ("-1", "NoDevFiles"), given)
    named = None if shown is None else [name for name in names if name]
    listed = query_gpus("index", "uuid", "pci.bus_id", "name")
    known = {Gpu(index, _near(bus_id)): uuid for index, uuid, bus_id, _ in listed}
    gpus = list(known) if named is None else [_named(name, known) for name in named]
    if len(set(gpus)) < len(gpus):
        raise OptionRefused(f"{shown} names a GPU twice", field=VISIBLE, cure="name each one once")
    is_counted = any(name.isdecimal() for name in named or ())
    if is_counted and len({model for *_, model in listed}) > 1 and os.environ.get(ORDER) != BY_BUS:
        detail = (
            f"GPUs of several models are here: CUDA counts {shown} from the fastest, nvidia-smi by the bus"
        )
        raise OptionRefused(detail, field=VISIBLE, cure=f"set {ORDER}={BY_BUS}, or name the GPUs by UUID")
    return gpus


def _named(name: str, known: Mapping[Gpu, str]) -> Gpu:
    """Return the GPU with a number, or with a UUID prefix, which CUDA accepts for the whole UUID."""
    return next((gpu for gpu, uuid in known.items() if gpu.name == name or uuid.startswith(name)), Gpu(name))


def query_gpus(*fields: str) -> list[list[str]]:
    """Return the fields of each of the machine's GPUs, sizes in MiB; an empty list without nvidia-smi.

    The last field may contain any text. Raises OptionRefused (`workers`) with nvidia-smi's message.
    """
    command = ("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIST_S)  # noqa: S603
        said, is_well = done.stdout or done.stderr, done.returncode == 0
    except FileNotFoundError:
        return []
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        said, is_well = str(error), False
    rows = [line.split(", ", len(fields) - 1) for line in said.splitlines()]
    # A lost GPU shows as a line of text, even if nvidia-smi succeeds.
    if not is_well or any(len(row) != len(fields) for row in rows):
        detail = f"nvidia-smi fails: {' '.join(said.split())}"
        raise OptionRefused(detail, field="workers", cure="fix the driver")
    return rows


def _near(bus_id: str) -> frozenset[int] | None:
    """Return the cores of a PCI device's NUMA node that this process may use, or None."""
    try:
        # nvidia-smi writes the domain with eight digits, the kernel with four.
        text = (PCI_DEVICES / bus_id[-12:].lower() / "local_cpulist").read_text()
    except OSError:
        return None
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1)) if first else set()
    return frozenset(cores & os.sched_getaffinity(0)) or None
