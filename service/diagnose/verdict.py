"""The diagnosis in plain words: the verdict first, then a table. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from service.diagnose.acceptance import Length
from service.diagnose.diagnosis import Diagnosis
from service.diagnose.tried import AS_IT_IS, Tried
from service.report.wording import count, percent

KEEPS = 0.9
"""Of what is accepted: who keeps so much without an input does not use it."""
LITTLE = 0.25
"""Of what the most frequent token reaches: who accepts less, fed at its best, has learnt next to nothing."""
LEAST_LENGTH = 0.05
"""Accepted tokens a place: less says nothing of what is used."""
LEARNT = 0.9
"""Of what the most frequent token reaches: an undertrained drafter gets no further."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong, and what puts it right."""

    what: str
    cure: str


def findings(diagnosis: Diagnosis) -> list[Finding]:
    """Return what is wrong with the drafter, the first cause first; empty if nothing was found."""
    uses_states, uses_tokens = (_uses(diagnosis, name) for name in ("states", "tokens"))
    first, frequent = diagnosis.first_right, diagnosis.data.frequent
    knows_little = _last(diagnosis, AS_IT_IS.name).length - 1 < LITTLE * frequent
    learnt_less = not uses_states and not (uses_tokens and (diagnosis.causes or first > LEARNT * frequent))
    if knows_little or learnt_less:
        what = (
            "it is undertrained: what it gets right is what is frequent. Its first draft is right "
            f"{percent(first)} of the time, the token that most often follows {percent(frequent)}, "
            "and no change that could be tried helps it"
        )
        return [Finding(what, "train it longer, or on more rows; no input was found to be wrong")]
    if not uses_tokens:
        what = "it does not use the tokens that it is fed: its states were of other rows than its tokens"
        return [Finding(what, "make the training data anew: each row's states of its own tokens")]
    by_line = {one.cure.partition(":")[0]: one for one in diagnosis.causes}  # steps of one way: its end
    found = [
        Finding(f"it was trained on other inputs than it is fed: {one.name} ({_gain(one)})", one.cure)
        for one in by_line.values()
    ]
    better = [one for one in diagnosis.learnt if one.effect == "better"]
    if better:
        best = max(better, key=lambda one: one.gain)
        what = f"it learnt another target: {best.name} (covers {best.gain:+.3f} more of it)"
        found.append(Finding(what, best.cure))
    if not found and not uses_states:
        what = "it does not use the states that it is fed: those of another row serve it as well"
        found.append(Finding(what, "look for zero, constant or mixed-up states in its training data"))
    return found


def _uses(diagnosis: Diagnosis, what: str) -> bool:
    """Say whether the drafter, fed as it was trained, does worse by a tenth or more with another row's.

    Where the target's distributions are flat, only the greedy length shows it.
    """
    probe, base = _last(diagnosis, f"{what} of another row"), _last(diagnosis, AS_IT_IS.name)
    if probe.sampled < KEEPS * (probe.sampled - probe.gain):
        return True
    return base.length - 1 > LEAST_LENGTH and probe.length - 1 < KEEPS * (base.length - 1)


def _last(diagnosis: Diagnosis, name: str) -> Tried:
    """Return what a change came to in the last round."""
    return next(one for one in reversed(diagnosis.tried) if one.name == name)


def _gain(one: Tried) -> str:
    return f"{one.gain:+.3f} accepted tokens a place, {one.low:+.3f} to {one.high:+.3f}"


def verdict(diagnosis: Diagnosis) -> str:
    """Return the first line: the length, whether it is a server's, and whether anything is wrong."""
    length = diagnosis.length
    kind = "expected accepted length" if diagnosis.played else "estimated accepted length"
    text = (
        f"{kind} {length.mean:.2f} ({length.low:.2f} to {length.high:.2f}) of at most {1 + diagnosis.drafted}"
    )
    if not diagnosis.played:
        text += f"; the target itself would have said {percent(diagnosis.data.own)} of the tokens"
    return text


def lines(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield the report line by line."""
    found = findings(diagnosis)
    yield f"{diagnosis.form} drafter {diagnosis.drafter}: {verdict(diagnosis)}"
    for finding in found:
        yield f"WRONG: {finding.what}"
        yield f"  cure: {finding.cure}"
    if not found:
        yield "nothing wrong was found: it is fed what it was trained on"
    if diagnosis.missing_layers:
        yield f"not tried, for the dataset lacks them: layers {', '.join(map(str, diagnosis.missing_layers))}"
        yield f"  to try them: {capture_command(diagnosis)}"
    yield ""
    for name, value in facts(diagnosis):
        yield f"{name:34} {value}"
    yield ""
    for title, group in groups(diagnosis):
        yield title
        yield from (
            f"  {name:32} {one.mean:.3f}  {one.low:.3f}..{one.high:.3f}  {count(one.drafts)} drafts"
            for name, one in group.items()
        )
    yield ""
    yield f"{'tried':60} length    gain  interval"
    for one in (*diagnosis.tried, *diagnosis.learnt):
        interval = f"{one.gain:+.3f}  {one.low:+.3f}..{one.high:+.3f}"
        yield f"{one.name[:60]:60} {one.length:6.3f}  {interval}  {one.effect}"


def capture_command(diagnosis: Diagnosis) -> str:
    """Return how the layers that are missing are captured."""
    layers = sorted({*diagnosis.missing_layers, *diagnosis.layers})
    return f'quarry extract job.json --out more, with "layers": {layers} and a few samples of the dataset'


def facts(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Return what was measured, by name."""
    data = diagnosis.data
    steps = "  ".join(f"{share:.3f}" for share in diagnosis.by_step)
    return [
        ("rows, tokens", f"{count(data.rows)}, {count(data.tokens)}"),
        ("layers fed (vLLM's ids)", ", ".join(map(str, diagnosis.layers))),
        ("accepted at step 1, 2, ...", steps),
        ("length, drafts at every place", f"{diagnosis.every_place:.3f}"),
        ("length at temperature 1, greedy drafts", f"{diagnosis.sampled_greedy_drafts:.3f}"),
        ("length at temperature 1, drawn drafts", f"{diagnosis.sampled_drawn_drafts:.3f}"),
        ("tokens that the target would say", percent(data.own)),
        ("supervised tokens", percent(data.supervised)),
        ("tokens in the draft vocabulary", percent(data.in_vocabulary)),
        ("right by the most frequent token", percent(data.frequent)),
        (
            "tokenizer and template of the target",
            "the dataset's" if data.same_tokenizer else "NOT the dataset's",
        ),
    ]


def groups(diagnosis: Diagnosis) -> Iterator[tuple[str, Mapping[str, Length]]]:
    """Yield the groups that lengths are given by."""
    yield "by position in the answer, from", diagnosis.by_position
    yield "by tokens of the row, from", diagnosis.by_length
    for label, group in diagnosis.by_label.items():
        yield f"by {label}", group
