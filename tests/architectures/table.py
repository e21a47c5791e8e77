"""Writes `docs/architectures.md` from what was measured. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence

from connector.versions import SUPPORTED
from tests.architectures.limits import FLOAT32_TOLERANCE, LENGTHS, MEDIAN_FACTOR, SHARED, TAILS
from tests.architectures.recipe import NUM_LAYERS
from tests.architectures.recipes import RECIPES
from tests.architectures.results import Matrix, Row, Verdict
from tests.architectures.target import digest

INTRO = f"""\
# Architectures

Which models Quarry captures correctly. `make architectures` writes this page from
[architectures.json](architectures.json), which has every layer's numbers; edit neither.

Each row is a job that ran through the service on the real engine: a random model of {NUM_LAYERS} decoder
layers, made from its config class in transformers; {len(LENGTHS) + len(TAILS)} prompts of {min(LENGTHS)}
to {max(LENGTHS)} tokens, around the engine's block, longer than a chunk of the prefill, two with a
prefix of {SHARED} tokens in common; every layer captured, with canary and logit check. Then every stored
row was compared with a transformers forward pass in float32.

- **pass**: the job was completed, and every layer of every row is the model's. In float32 the worst
  token may be {FLOAT32_TOLERANCE:.0e} off; in bfloat16 the median token {MEDIAN_FACTOR} times as far as
  transformers' own in bfloat16.
- **refused**: the job ended with the reason that is given, and nothing was stored.
- **cannot run on CPU**: the engine's CPU build, or a package that it lacks here, stops at the model. It
  says nothing about a GPU.

`route` is how the engine was made to return states, as the manifest says: by its own class (`native`),
by ours (`plugin`), by its Transformers backend (`transformers`). `layers` are vLLM's ids. The cosine and
the error, a token's distance over the length of its state, are those of the worst token of the worst
layer; in brackets are transformers' own in the same dtype, where single tokens may go to other
experts. `logits` counts the rows whose next token, recomputed from the sealed bytes, is the engine's.

The canary of a model's first job decides whether it can be captured, also for a model in the table: a
published checkpoint is not a random one."""

NOT_TARGETS = {
    "drafter": "drafters, which learn from states and are no targets",
    "pooling": "pooling models, which generate nothing",
    "backend": "the engine's names for its Transformers backend, by which many rows above went",
}


def render(matrix: Matrix) -> str:
    """Return the whole page."""
    passed = [row for row in matrix.rows if row.verdict is Verdict.PASS]
    others = [row for row in matrix.rows if row.verdict is not Verdict.PASS]
    counts = Counter(row.verdict for row in matrix.rows)
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])
    parts = (
        INTRO,
        f"{len(matrix.rows)} models: {said}.",
        *pending(matrix),
        "## Pass",
        grid(
            ("architecture", "route", "layers", "dtype", "worst cosine", "worst error", "logits", "note"),
            [passing(row) for row in passed],
        ),
        "## Refused, or cannot run on CPU",
        grid(("architecture", "verdict", "by", "reason"), [failing(row) for row in others]),
        "## Not in the table",
        unmeasured(matrix),
        "## Engine versions",
        versions(matrix),
        "An engine of any other version is refused at start, with its number.",
    )
    return "\n\n".join(parts) + "\n"


def passing(row: Row) -> tuple[str, ...]:
    """Return the cells of a row with numbers."""
    error = f"{max(layer.max_rel_error for layer in row.layers):.1e}"
    own = [layer.own_max_rel_error for layer in row.layers if layer.own_max_rel_error is not None]
    return (
        row.key,
        row.route or "",
        f"{row.layers[0].layer_id}-{row.layers[-1].layer_id}",
        row.dtype,
        cosine(min(layer.min_cosine for layer in row.layers)),
        f"{error} ({max(own):.1e})" if own else error,
        f"{row.logit_argmax_agree} / {row.logit_rows}",
        note_of(row),
    )


def failing(row: Row) -> tuple[str, ...]:
    """Return the cells of a row that stored nothing."""
    parts = [row.reason or ""]
    if row.logit_rows:
        parts.append(
            f"without a canary {row.logit_argmax_agree} of {row.logit_rows} rows pass the logit check"
        )
    return row.key, row.verdict, row.by or "", "; ".join(part for part in (*parts, note_of(row)) if part)


def note_of(row: Row) -> str:
    """Return what its recipe has to say to the reader, and whether it is another one by now."""
    if row.key not in RECIPES:
        return ""
    recipe = RECIPES[row.key]
    older = "" if row.recipe == digest(recipe) else "measured with an earlier form of its recipe"
    return "; ".join(part for part in (recipe.note, older) if part)


def pending(matrix: Matrix) -> tuple[str, ...]:
    """Return a paragraph that names the recipes without a row, or none if each has one."""
    names = [key for key in RECIPES if matrix.row(key) is None]
    if not names:
        return ()
    return (f"**Not measured yet**, {len(names)} of {len(RECIPES)} recipes: {'; '.join(names)}.",)


def cosine(value: float) -> str:
    """Return a cosine by its distance from 1, where that is small."""
    gap = max(1.0 - value, 0.0)
    return f"1 - {gap:.0e}" if gap < 1e-3 else f"{value:.4f}"


def grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def unmeasured(matrix: Matrix) -> str:
    """Return the names that the engine lists as able to return states, and that have no row."""
    measured = {row.architecture for row in matrix.rows}
    left = [name for kind in ("text", "multimodal") for name in matrix.listed.get(kind, ())]
    groups = {what: matrix.listed.get(kind, ()) for kind, what in NOT_TARGETS.items()}
    groups["targets without a recipe"] = tuple(name for name in left if name not in measured)
    total = sum(len(names) for names in matrix.listed.values())
    lines = [
        f"{matrix.listed_by} lists {total} names whose classes can return states. Those without a row:",
        "",
    ]
    lines += [f"- {len(names)} {what}: {', '.join(names)}." for what, names in groups.items() if names]
    return "\n".join(lines)


def versions(matrix: Matrix) -> str:
    """Return which engines were run, and which were only read."""
    measured = sorted({f"{name} {number}" for row in matrix.rows for name, number in row.versions.items()})
    rows = [
        (matrix.listed_by, "CPU", "V1", f"run: the tables above, with {', '.join(measured)}"),
        *((run.engine, run.device, run.runner, run.outcome) for run in matrix.elsewhere),
        (f"vLLM {SUPPORTED}", "", "", "read: cache layout, axis order, scheduler calls; contract tests"),
    ]
    return grid(("engine", "device", "runner", "what was done"), rows)
