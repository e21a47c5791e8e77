"""`make nights`, on the fake engine."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from examples.nights import NAME, night_with_samples
from service.client import Quarry
from tests.support.api import serving
from tests.support.nights import Nights, open_nights


def test_a_slot_that_found_nothing_is_not_taken_for_the_night(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A night. 2. A slot that waited for it finds nothing. 3. The next one finds what was brought."""
    nights = open_nights(tmp_path, target, f"sqlite:///{tmp_path / 'quarry.db'}", name=NAME)
    nights.drop(range(3))
    known = {nights.night().job_id}
    nights.night()
    monkeypatch.setattr("examples.nights.time", SimpleNamespace(sleep=lambda seconds: brought(nights)))
    with serving(nights.shop.settings) as client, Quarry(str(client.base_url)) as quarry:
        job = night_with_samples(quarry, known)
    assert job.progress.samples_written == 2
    nights.store.close()


def brought(nights: Nights) -> None:
    nights.drop(range(3, 5))
    nights.night()
