"""What must hold of a compose file for GPU nodes: each rule maps the file to the faults it finds."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

from service.api.worker_process import STOP_MARGIN_S
from service.settings import Settings

SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|API_KEY")
VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?P<rest>[^}]*)\}")
UNIT_S = {"s": 1, "m": 60, "h": 3600}

TEXT = {"type": "string"}
TEXTS = {"type": "array", "items": TEXT}

DEVICE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["driver", "capabilities"],
    "properties": {
        "driver": TEXT,
        "count": {},
        "device_ids": TEXTS,
        "capabilities": {**TEXTS, "contains": {"const": "gpu"}},
    },
}
HEALTHCHECK = {
    "type": "object",
    "additionalProperties": False,
    "required": ["test", "start_period"],
    "properties": {
        "test": TEXTS,
        "interval": TEXT,
        "timeout": TEXT,
        "retries": {"type": "integer"},
        "start_period": TEXT,
    },
}
SERVICE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["image", "user", "restart", "healthcheck", "stop_grace_period", "deploy"],
    "properties": {
        **{key: TEXT for key in ("image", "restart", "stop_grace_period", "shm_size", "ipc")},
        **{key: TEXTS for key in ("command", "cap_drop", "security_opt", "secrets", "tmpfs", "ports")},
        **{key: {"type": "boolean"} for key in ("init", "read_only")},
        "build": {"type": "object", "additionalProperties": False, "properties": {"context": TEXT}},
        "user": {"type": "string", "not": {"pattern": "^(root|0)(:|$)"}},
        "environment": {"type": "object", "additionalProperties": TEXT},
        "volumes": {"type": "array"},
        "logging": {"type": "object"},
        "healthcheck": HEALTHCHECK,
        "deploy": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "resources": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "reservations": {
                            "type": "object",
                            "additionalProperties": False,
                            "properties": {"devices": {"type": "array", "items": DEVICE}},
                        }
                    },
                }
            },
        },
    },
}
FILE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["services"],
    "properties": {
        "name": TEXT,
        "services": {"type": "object", "additionalProperties": SERVICE},
        "secrets": {"type": "object"},
        "volumes": {"type": "object"},
    },
}
"""The part of the compose format that we use: a misspelt key is a fault, and so is a missing one."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A compose file's text, its `.env.example`, and the folder that relative paths start from."""

    text: str
    env_text: str
    folder: Path

    @property
    def document(self) -> dict[str, Any]:
        """The parsed file, before any variable is put in."""
        parsed: dict[str, Any] = yaml.safe_load(self.text)
        return parsed

    @property
    def services(self) -> dict[str, dict[str, Any]]:
        """The services by name."""
        found: dict[str, dict[str, Any]] = self.document["services"]
        return found

    @property
    def example(self) -> dict[str, str]:
        """The variables of `.env.example`."""
        lines = [line for line in self.env_text.splitlines() if line and not line.startswith("#")]
        return dict(line.split("=", 1) for line in lines)

    def filled(self, text: str) -> str:
        """Return `text` with the example's variables put in."""
        return VARIABLE.sub(lambda match: self.example.get(match["name"], ""), text)


def shape(deployment: Deployment) -> Iterator[str]:
    """Keys are known and the required ones are there."""
    for error in Draft202012Validator(FILE).iter_errors(deployment.document):
        yield f"{error.json_path}: {error.message}"


def images_are_pinned(deployment: Deployment) -> Iterator[str]:
    """Every image has a tag that is a version."""
    for name, service in deployment.services.items():
        if not re.search(r":v?\d+\.\d+(\.\d+)?([-.]\w+)*(@sha256:[0-9a-f]{64})?$", service["image"]):
            yield f"{name}: image {service['image']!r} has no version tag"


def variables_are_documented(deployment: Deployment) -> Iterator[str]:
    """`.env.example` names exactly the variables that are used."""
    used = {match["name"] for match in VARIABLE.finditer(deployment.text)}
    yield from (f"{name} is not in .env.example" for name in sorted(used - set(deployment.example)))
    yield from (f"{name} is in .env.example and not used" for name in sorted(set(deployment.example) - used))


def secrets_come_from_files(deployment: Deployment) -> Iterator[str]:
    """No secret has a default, and none stands in the environment."""
    for match in VARIABLE.finditer(deployment.text):
        if SECRET_NAME.search(match["name"]) and match["rest"].startswith((":-", "-")):
            yield f"{match['name']} has a default"
    for name, service in deployment.services.items():
        for key in service.get("environment", {}):
            if SECRET_NAME.search(key) and not key.endswith("_FILE"):
                yield f"{name}: {key} stands in the environment"


def bind_mounts_exist(deployment: Deployment) -> Iterator[str]:
    """A bound folder exists with the example's values."""
    for name, service in deployment.services.items():
        for volume in service.get("volumes", []):
            if isinstance(volume, dict) and volume["type"] == "bind":
                source = deployment.filled(volume["source"])
                if not (deployment.folder / source).exists():
                    yield f"{name}: {source} does not exist"


def volumes_are_declared(deployment: Deployment) -> Iterator[str]:
    """Named volumes are declared, and declared ones are used; a bare path is neither."""
    services = deployment.services.values()
    used = {
        volume.split(":")[0]
        for service in services
        for volume in service.get("volumes", [])
        if isinstance(volume, str)
    }
    for name in sorted(used ^ set(deployment.document.get("volumes", {}))):
        yield f"volume {name} is not both declared and used"


def ports_stay_on_loopback(deployment: Deployment) -> Iterator[str]:
    """The API has no accounts, so it is not published to the network."""
    for name, service in deployment.services.items():
        for port in service.get("ports", []):
            if not port.startswith("127.0.0.1:"):
                yield f"{name}: port {port} is open to the network"


def settings_are_known(deployment: Deployment) -> Iterator[str]:
    """Every QUARRY_ variable is a setting: a misspelt one would be ignored without a word."""
    for name, service in deployment.services.items():
        for key in unknown_settings(service.get("environment", {})):
            yield f"{name}: {key} is not a setting"


def unknown_settings(names: Any) -> list[str]:
    """Return those of `names` that look like settings and are none."""
    known = {f"QUARRY_{field.upper()}" for field in Settings.model_fields}
    return [name for name in names if name.startswith("QUARRY_") and name not in known]


def stops_in_order(deployment: Deployment) -> Iterator[str]:
    """Units drain and the worker ends before the container is killed."""
    for name, service in deployment.services.items():
        drain_s = float(service["environment"]["QUARRY_DRAIN_S"])
        worker_s, container_s = drain_s + STOP_MARGIN_S, seconds(service["stop_grace_period"])
        if worker_s >= container_s:
            yield f"{name}: the worker may take {worker_s} s to stop, the container only {container_s} s"


def seconds(text: str) -> float:
    """Return the seconds of `4m` or `90s`."""
    return float(text[:-1]) * UNIT_S[text[-1]]


RULES: tuple[Callable[[Deployment], Iterator[str]], ...] = (
    shape,
    images_are_pinned,
    variables_are_documented,
    secrets_come_from_files,
    bind_mounts_exist,
    volumes_are_declared,
    ports_stay_on_loopback,
    settings_are_known,
    stops_in_order,
)


def faults(deployment: Deployment) -> list[str]:
    """Return the faults of the first rule that finds any: later rules rely on the shape."""
    for rule in RULES:
        if found := list(rule(deployment)):
            return found
    return []
