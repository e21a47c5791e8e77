"""The diagnosis in plain words: the verdict first, then tables. Pure functions."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from service.diagnose.acceptance import Length
from service.diagnose.diagnosis import LITTLE, Diagnosis
from service.diagnose.tried import AS_IT_IS, Tried
from service.report.wording import count, percent

KEEPS = 0.9
"""A drafter that keeps this share of the accepted tokens with another row's input does not use the input."""
LEAST_LENGTH = 0.05
"""Accepted tokens per place below which nothing can be said about which inputs are used."""
LEARNT = 0.9
"""An undertrained drafter does not exceed this share of the most-frequent-token baseline."""
SURE_OF_ITSELF, UNBELIEVED = 0.1, 1.5
"""Limits for the probability of a first draft, and for its ratio to the share that is right. Trained drafters
stay below them.
"""
TRIED = ("changed", "effect", "length", "gain", "interval")
LENGTHS = ("", "length", "95 %", "drafts")


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong, and the cure."""

    what: str
    cure: str


def findings(diagnosis: Diagnosis) -> list[Finding]:
    """Return what is wrong with the drafter, the main cause first; empty if nothing was found."""
    if diagnosis.untrained:
        what = "it is undertrained: no training changed its norms, and it knows next to nothing"
        return [Finding(what, "train it, or name a checkpoint that a training ended with")]
    causes, learnt = diagnosis.search.causes, diagnosis.search.learnt
    uses_states, uses_tokens = (_uses(diagnosis, name) for name in ("states", "tokens"))
    first, frequent = diagnosis.first_right, diagnosis.data.frequent
    knows_little = _last(diagnosis, AS_IT_IS.name).length - 1 < LITTLE * frequent
    learnt_less = not uses_states and not (uses_tokens and (causes or first > LEARNT * frequent))
    if (knows_little or learnt_less) and diagnosis.first_odds > max(SURE_OF_ITSELF, UNBELIEVED * first):
        what = (
            f"it is not what was trained: it gives its first drafts {percent(diagnosis.first_odds)}, and "
            f"{percent(first)} are right. Its head, vocabulary map, norms, embeddings or config are another's"
        )
        return [Finding(what, "compare its tensors and its config.json with the trainer's own checkpoint")]
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
    by_line = {one.cure.partition(":")[0]: one for one in causes}  # of steps in one direction, the last
    found = [
        Finding(
            f"it was trained on other inputs than it is fed: {one.name} "
            f"({one.gain:+.3f} accepted tokens per position, {one.low:+.3f} to {one.high:+.3f})",
            one.cure,
        )
        for one in by_line.values()
    ]
    better = [one for one in learnt if one.effect == "better"]
    if better:
        best = max(better, key=lambda one: one.gain)
        what = f"it learnt another target: {best.name} (covers {best.gain:+.3f} more of it)"
        found.append(Finding(what, best.cure))
    if not found and not uses_states:
        what = "it does not use the states that it is fed: those of another row serve it as well"
        found.append(Finding(what, "look for zero, constant or mixed-up states in its training data"))
    return found


def _uses(diagnosis: Diagnosis, what: str) -> bool:
    """Return whether the drafter, fed as trained, does worse by at least a tenth with another row's input.

    If the target's distributions are flat, only the greedy length shows it.
    """
    probe, base = _last(diagnosis, f"{what} of another row"), _last(diagnosis, AS_IT_IS.name)
    sampled, greedy = probe.sampled - 1, base.length - 1
    if sampled < KEEPS * (sampled - probe.gain):
        return True
    return greedy > LEAST_LENGTH and probe.length - 1 < KEEPS * greedy


def _last(diagnosis: Diagnosis, name: str) -> Tried:
    """Return the effect of a change in the last round."""
    return next(one for one in reversed(diagnosis.search.tried) if one.name == name)


def verdict(diagnosis: Diagnosis) -> str:
    """Return the first line: the length, and whether it is what a server gets."""
    length, at_most = diagnosis.length, 1 + diagnosis.drafted
    figures = (
        f"accepted length {length.mean:.2f} ({length.low:.2f} to {length.high:.2f}) of at most {at_most}"
    )
    if diagnosis.played:
        return f"expected {figures}"
    own = percent(diagnosis.data.own)
    return f"estimated {figures}; the target itself would have generated {own} of the tokens"


def not_tried(diagnosis: Diagnosis) -> str:
    """Return what could not be tried and how to try it; empty if everything was tried."""
    missing = diagnosis.search.missing_layers
    if not missing:
        return ""
    return (
        f"Not tried: the dataset lacks layers {', '.join(map(str, missing))}. To try them: "
        f'quarry extract job.json --out more, with "layers": {sorted({*missing, *diagnosis.layers})} '
        "and a few samples of the dataset"
    )


def lines(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield the report line by line."""
    found, search = findings(diagnosis), diagnosis.search
    yield f"{diagnosis.form} drafter {diagnosis.drafter}: {verdict(diagnosis)}"
    for finding in found:
        yield f"WRONG: {finding.what}"
        yield f"  cure: {finding.cure}"
    if not found:
        yield "nothing wrong was found in what it is fed"
    if search.missing_layers:
        yield not_tried(diagnosis)
    tables = [
        facts(diagnosis),
        [TRIED, *tried_rows(search.tried)],
        [("learnt instead", *TRIED[1:]), *tried_rows(search.learnt)],
    ]
    tables += [[(title, *LENGTHS[1:]), *length_rows(group)] for title, group in diagnosis.groups.items()]
    for table in tables:
        yield ""
        yield from (f"{name[:50]:50}  {'  '.join(f'{cell:14}' for cell in cells)}" for name, *cells in table)


def facts(diagnosis: Diagnosis) -> list[tuple[str, ...]]:
    """Return the measurements by name."""
    data, as_it_is = diagnosis.data, diagnosis.search.tried[0]
    return [
        ("rows, tokens", f"{count(data.rows)}, {count(data.tokens)}"),
        ("layers fed (vLLM's ids)", ", ".join(map(str, diagnosis.layers))),
        ("accepted at step 1, 2, ...", ", ".join(map(percent, diagnosis.by_step))),
        ("first draft: right", percent(diagnosis.first_right)),
        ("first draft: the drafter's confidence", percent(diagnosis.first_odds)),
        ("length with a draft at every position", f"{as_it_is.length:.3f}"),
        ("length at temperature 1, greedy drafts", f"{as_it_is.chance:.3f}"),
        ("length at temperature 1, sampled drafts", f"{as_it_is.sampled:.3f}"),
        ("tokens that the target would generate", percent(data.own)),
        ("supervised tokens", percent(data.supervised)),
        ("tokens in the draft vocabulary", percent(data.in_vocabulary)),
        ("right if always the most frequent token", percent(data.frequent)),
        ("tokenizer, template", f"{'' if data.same_tokenizer else 'NOT '}those of the dataset"),
    ]


def length_rows(group: Mapping[str, Length]) -> list[tuple[str, ...]]:
    """Return the rows of a group's lengths, for the header `LENGTHS`."""
    return [
        (name, f"{one.mean:.3f}", f"{one.low:.3f}..{one.high:.3f}", count(one.drafts))
        for name, one in group.items()
    ]


def tried_rows(tried: Iterable[Tried]) -> list[tuple[str, ...]]:
    """Return the rows of what was tried, for the header `TRIED`."""
    return [
        (one.name, one.effect, f"{one.length:.3f}", f"{one.gain:+.3f}", f"{one.low:+.3f}..{one.high:+.3f}")
        for one in tried
    ]
