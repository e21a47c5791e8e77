"""The dataset card: README.md and its YAML, generated from the jobs of a repository.

The light `index` is the default configuration, so that the Hub's viewer stays usable; the states are another
one, named by `hub.config_name` (`states` if that is `default`). A configuration lists the folders of the jobs
that have a manifest instead of one glob for all, so that a job still being pushed is not loaded.

Only the text between two markers and a few YAML keys are generated; everything else is kept.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import yaml
from huggingface_hub import DatasetCardData
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from schemas.dataset.jobs_table import JobEntry
from schemas.identity import Identity, Provenance
from service.errors import OptionRefused
from service.publish.card_text import INDEX_CONFIG, card_text

DEFAULT_STATES_CONFIG = "states"
TAGS = ("hidden-states", "speculative-decoding", "eagle", "quarry")
BEGIN = "<!-- quarry:begin (rewritten at every push; text outside of the two markers is kept) -->"
END = "<!-- quarry:end -->"

MAX_HEADER_CHARS = 2**20
"""Maximum length of an existing card's YAML; a job takes about a hundred characters."""


@dataclass(frozen=True, slots=True)
class BegunJob:
    """A job that is being captured, with what decides whether it may share a repository with others."""

    job_id: str
    provenance: Provenance
    config_name: str


Job = JobEntry | BegunJob
"""A job in the repository, or one that is to be added to it."""
AnyJob = TypeVar("AnyJob", bound=Job)

JOB_IN_PATH = re.compile(r"data/(j-[0-9a-f]{16})/\*\.parquet")


def states_config(name: str) -> str:
    """Return the states' configuration name for a `hub.config_name`. Raises OptionRefused for it."""
    if name == INDEX_CONFIG:
        cure = f"choose another name, such as {DEFAULT_STATES_CONFIG!r}"
        detail = f"{INDEX_CONFIG!r} is the light configuration of every dataset"
        raise OptionRefused(detail, field="hub.config_name", cure=cure)
    return DEFAULT_STATES_CONFIG if name == "default" else name


def assigned_configs(card: str | None) -> dict[str, str]:
    """Return the configuration of each job that `card` lists; one that a person added only if no other does.

    Raises OptionRefused if its YAML is broken.
    """
    configs: dict[str, str] = {}
    for config in sorted(_configs(_parsed(card)[0]), key=_is_added):
        for job_id in JOB_IN_PATH.findall(str(config.get("data_files"))):
            if name := config.get("config_name"):
                configs.setdefault(job_id, str(name))
    return configs


def _configs(header: Mapping[str, Any]) -> list[dict[str, Any]]:
    given = header.get("configs")
    return [config for config in given if isinstance(config, dict)] if isinstance(given, list) else []


def render_card(
    jobs: Sequence[JobEntry], configs: Mapping[str, str] | None = None, existing: str | None = None
) -> str:
    """Return the README.md of a repository that holds `jobs`: the same jobs give the same text.

    `configs` maps a job to its states' configuration. A job that is not in it keeps the one it has in
    `existing`, the card to be replaced, or gets the one in its request.

    Raises:
        OptionRefused: two jobs of one configuration differ in model, layers or layout (`hub.config_name`).
    """
    groups = grouped(jobs, configs, existing)
    theirs, text = _parsed(existing)
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    # Without its end marker nothing tells old text of ours from a person's: all of it is kept.
    parts = (before, f"{BEGIN}\n{card_text(groups)}\n{END}", after if end else rest)
    header = DatasetCardData(**_metadata(theirs, groups)).to_yaml()
    return f"---\n{header}\n---\n\n" + "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def grouped(
    jobs: Sequence[AnyJob], configs: Mapping[str, str] | None, existing: str | None
) -> dict[str, list[AnyJob]]:
    """Return the jobs by states configuration. Takes the arguments and raises the errors of `render_card`."""
    chosen = assigned_configs(existing) | dict(configs or {})
    groups: dict[str, list[AnyJob]] = {}
    for job in sorted(jobs, key=lambda job: job.job_id):
        name = chosen.get(job.job_id) or states_config(job.config_name)
        groups.setdefault(name, []).append(job)
    for name, group in groups.items():
        _refuse_mixed(name, group)
    _refuse_other_labels(jobs)
    return groups


def _parsed(card: str | None) -> tuple[dict[str, Any], str]:
    """Return the YAML and the text of a card."""
    card = (card or "").removeprefix("\ufeff")  # which some editors write
    if not card.startswith("---"):
        return {}, card
    header = REGEX_YAML_BLOCK.search(card[:MAX_HEADER_CHARS])
    if header is None and len(card) <= MAX_HEADER_CHARS:
        return {}, card
    try:
        if header is None:
            raise yaml.YAMLError(f"it has more than {MAX_HEADER_CHARS} characters")  # noqa: TRY301
        data = yaml.load(header.group(2), _NoAliases) or {}  # noqa: S506 - a safe loader
        named = {key: value for key, value in data.items() if isinstance(key, str) and value is not None}
    except (
        *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError),
        yaml.YAMLError,
    ) as error:
        cure = "fix or remove README.md of the repository"
        detail = f"the YAML of README.md is broken: {error!s:.200}"
        raise OptionRefused(detail, field="hub.repo_id", cure=cure) from error
    return named, card[header.end() :]


class _NoAliases(yaml.SafeLoader):  # type: ignore[misc]  # untyped
    """Refuses aliases, a few of which can expand to gigabytes. `1:30` is text, as in YAML 1.2."""

    def construct_yaml_int(self, node: yaml.ScalarNode) -> object:
        return node.value if ":" in node.value else super().construct_yaml_int(node)

    def construct_yaml_float(self, node: yaml.ScalarNode) -> object:
        return node.value if ":" in node.value else super().construct_yaml_float(node)

    def compose_node(self, parent: object, index: object) -> object:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias ('*name'): write out what it stands for")
        return super().compose_node(parent, index)


for _kind in ("int", "float"):  # a base-60 number of maximum length takes a minute to parse
    _NoAliases.add_constructor(f"tag:yaml.org,2002:{_kind}", getattr(_NoAliases, f"construct_yaml_{_kind}"))


def _metadata(theirs: Mapping[str, Any], groups: Mapping[str, Sequence[JobEntry]]) -> dict[str, Any]:
    members = {name: [job.job_id for job in groups[name]] for name in sorted(groups)}
    every = sorted(job_id for ids in members.values() for job_id in ids)
    configs = [{"config_name": INDEX_CONFIG, "default": True, "data_files": _files(INDEX_CONFIG, every)}]
    configs += [{"config_name": name, "data_files": _files("data", ids)} for name, ids in members.items()]
    foreign = [c for c in _configs(theirs) if c.get("config_name") not in {INDEX_CONFIG, *groups}]
    model = next(iter(groups.values()))[0].provenance.identity.model
    given = theirs.get("tags")
    tags = given if isinstance(given, list) else []
    return {
        "pretty_name": f"Hidden states of {model}",
        "task_categories": ["text-generation"],
        **theirs,
        "tags": tags + [tag for tag in TAGS if tag not in tags],
        "configs": configs + foreign,
    }


def _is_added(config: Mapping[str, Any]) -> bool:
    """Return whether the files of a configuration are not as Quarry writes them; any may have a new name."""
    files = config.get("data_files")
    return bool(files != _files("data", JOB_IN_PATH.findall(str(files))))


def _files(folder: str, jobs: Sequence[str]) -> list[dict[str, Any]]:
    return [{"split": "train", "path": [f"{folder}/{job}/*.parquet" for job in jobs]}]


def _shape(one: Identity) -> tuple[object, ...]:
    model = one.model, one.revision, one.weights_sha256
    return model, one.layer_ids, one.hidden_size, one.dtype, one.compression


def _refuse_other_labels(jobs: Iterable[Job]) -> None:
    """Refuse indexes with different columns, since all indexes are one configuration."""
    labels = {tuple(sorted(job.provenance.identity.labels)): job.job_id for job in jobs}
    if len(labels) > 1:
        jobs_named = " and ".join(sorted(labels.values())[:2])
        raise OptionRefused(
            f"jobs {jobs_named} of one repository have other labels",
            field="labels",
            cure="name the labels of the jobs that are there, or push to another repository",
        )


def _refuse_mixed(name: str, group: Sequence[Job]) -> None:
    first, *others = (job.provenance for job in group)
    for other in others:
        if _shape(other.identity) != _shape(first.identity):
            raise OptionRefused(
                f"configuration {name!r} would mix jobs {first.job_id} and {other.job_id}, "
                "which differ in model, layers or layout",
                field="hub.config_name",
                cure="give one of them another configuration name",
            )
