"""Writes `docs/sizing.md`: python -m tests.support.sizing_page."""

from pathlib import Path

from service.plan.sizing import size
from service.settings import Settings

DEFAULTS = Settings.model_construct()
DRAIN_BYTES_PER_S = DEFAULTS.sizing_drain_bytes_per_s
"""Drained from a GPU that computes meanwhile; alone it is 54e9, and a plain pinned copy 55e9."""
WRITER_BYTES_PER_S = DEFAULTS.sizing_writer_bytes_per_s
"""By one thread alone on a disk that takes 1.96e9 of write() and fsync()."""
WRITER_CORE_S_PER_GB = 0.42
"""The writer with its checks and its xxh3, and the kernel's part."""
PROOF_CORE_S_PER_GB = 0.29
"""Of the sealed unit, read back, in a unit of a gigabyte; in units of 65 MB it is 1.3."""
DIGEST_CORE_S_PER_GB = 0.70
"""Of the sha256 that the Hub asks for: hashlib over memory, the read not counted."""
CORE_S_PER_GB = WRITER_CORE_S_PER_GB + PROOF_CORE_S_PER_GB + DIGEST_CORE_S_PER_GB

PAGE = Path(__file__).parents[2] / "docs" / "sizing.md"
FLOPS_PER_S = 500e12
"""Of one H200 at prefill: half of its dense bfloat16 peak."""
TARGETS = (
    # name, active parameters, hidden size, captured layers with the last, GPUs
    ("8B dense", 8e9, 4096, 4, (1, 8, 64)),
    ("70B dense", 70e9, 8192, 4, (8, 64)),
    ("mixture of experts, 37B of 671B active", 37e9, 7168, 4, (8, 64)),
)
COLUMNS = (
    "target, 3 auxiliary layers and the last",
    "GPUs",
    "tokens/s a GPU",
    "a token",
    f"drain a GPU (of {DRAIN_BYTES_PER_S / 1e9:.0f} GB/s)",
    "writers a GPU",
    "cores a GPU",
    "disk",
    "uplink",
    "dataset",
    "time",
)
TOKENS = 1_000_000_000


def render() -> str:
    """Return the page."""
    rows = []
    for name, active, hidden, layers, counts in TARGETS:
        rate, width = FLOPS_PER_S / (2 * active), 2 * hidden * layers
        for gpus in counts:
            told = size(TOKENS, width, rate, gpus, DEFAULTS)
            cells = (
                name,
                gpus,
                f"{rate:,.0f}",
                f"{width // 1024} KiB",
                f"{told.drain_bytes_per_s / 1e9:.2f} GB/s ({told.drain_share:.1%})",
                told.writer_threads,
                f"{told.cores:.1f}",
                f"{told.disk_bytes_per_s / 1e9:.1f} GB/s",
                f"{told.uplink_bits_per_s / 1e9:.0f} Gbit/s",
                f"{TOKENS * width / 1e12:.0f} TB",
                f"{told.seconds / 3600:.1f} h",
            )
            rows.append("| " + " | ".join(map(str, cells)) + " |")
    head = "| " + " | ".join(COLUMNS) + " |"
    rule = "| " + " | ".join("---" for _ in COLUMNS) + " |"
    table = "\n".join((head, rule, *rows))
    threads = f"{WRITER_BYTES_PER_S / 1e9:.2f}"
    return f"""# Sizing

What a host must carry so that no GPU waits for its states to be drained: bytes of state a second are tokens a
second times the bytes of a token, which are captured layers times hidden size times 2. `quarry estimate JOB
--tokens-per-s RATE --gpus N` (or `POST /estimate?tokens_per_s=RATE&gpus=N`) says the same for your job,
with its own tokens; measure the rate with plain prefill on your node first.

Measured on one H200's machine, with PCIe 5 x16 and 16 cores
([gpu-drain.json](../benchmarks/results/gpu-drain.json), `make gpu PART=bytes`):

| what | GB/s |
| --- | --- |
| a plain copy into pinned memory | 55 |
| Quarry's drain, alone | 51 to 55 |
| Quarry's drain, beside a model that never pauses | 41 to 46, typically {DRAIN_BYTES_PER_S / 1e9:.0f} |

They are of the drain before it summed each state on the device, one more reduction over each gathered part;
the drain of today has not run on that machine. The same goes for the writer: that file holds figures of one
that was replaced since. Today's was measured on a machine of two cores, with the CPU build, its own disk
and no GPU ([cpu-writer.json](../benchmarks/results/cpu-writer.json),
[job.json](../benchmarks/results/job.json)):

| what | GB/s of one thread | core seconds a GB |
| --- | --- | --- |
| rows checked and sealed (xxh3, Parquet, O_DIRECT, fsync) | {threads} | {WRITER_CORE_S_PER_GB} |
| the same bytes by write() and fsync() | 1.96 | 0.23 |
| a sealed unit of 1 GB read back and proven | - | {PROOF_CORE_S_PER_GB} |
| the same, units of 65 MB | - | 1.3 |
| sha256 of the shards at publication | {1 / DIGEST_CORE_S_PER_GB:.1f} | {DIGEST_CORE_S_PER_GB:.2f} |

The last line is of hashlib over memory on that machine, without the read; no file of results holds it. The
rates of another machine are set by `QUARRY_SIZING_DRAIN_BYTES_PER_S`, `QUARRY_SIZING_WRITER_BYTES_PER_S` and
`QUARRY_SIZING_CORE_S_PER_GB`.

On paper, for {TOKENS / 1e9:.0f} billion tokens. The rate is that of prefill at
{FLOPS_PER_S / 1e12:.0f} TFLOP/s a GPU (half of an H200's dense bfloat16 peak) over 2 operations a
parameter and token: an upper bound that engines reach in part, so what follows is what the host needs at
most. Nothing of this table was run.

{table}

What that says:

- **PCIe** is no bound: the smallest target, which makes the most bytes, takes a fortieth of what was
  measured. Under tensor parallelism each rank drains its share over its own link.
- **Cores**: writing, proof and sha256 keep {CORE_S_PER_GB:.1f} cores busy for each GB/s. The sha256 is the
  largest part of it, and it is taken when a job's last unit is committed, not while it captures. What the
  engine itself needs of the cores is not counted.
- **Writers**: one thread seals {threads} GB/s and waits nearly half of that time for its disk. How several
  share one disk was not measured: give them what the cores allow. `QUARRY_WRITER_THREADS` is the number for
  each rank, half of its share of the cores if you say nothing.
- **Disk**: a separate limit, whatever the cores do. Every byte is written once and read twice, by the proof
  and by the sha256, both past the page cache; a push reads it once more. Eight GPUs on an 8B target ask for
  more than one NVMe disk writes; stripe several, or give every GPU a worker and a disk of its own. A slow
  disk slows the engine; nothing grows, nothing is lost.
- **Uplink** is the bound of most clusters. A job is pushed when its last unit is committed, and its files
  stay: the disk holds the whole dataset, and the upload takes its own time after the capture. Cut a large
  source into several jobs, so that one is pushed while the next is captured; or send less (`planes` is
  lossless; fewer layers are fewer bytes).
"""


if __name__ == "__main__":
    PAGE.write_text(render())
