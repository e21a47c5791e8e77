"""A field that is added later, with `added`, changes no hash of what was stored without it."""

from schemas.base import added
from schemas.identity import Identity
from schemas.request import ExtractRequest, Generate
from service.store import NewJob
from tests.support.plans import identity
from tests.support.store_cases import a_request, job_id


class LaterGenerate(Generate):
    """Answers with an option of a later version."""

    min_p: float = added(0.0)


class LaterIdentity(Identity):
    """An identity with a field of a later version."""

    generate: LaterGenerate | None = None
    pooling: str | None = added(None)


class LaterRequest(ExtractRequest):
    """A request with a field of a later version."""

    generate: LaterGenerate | None = None
    weight: float = added(1.0)


def test_an_identity_keeps_its_hash_and_its_text() -> None:
    old = identity().model_copy(update={"generate": Generate(max_tokens=8)})
    new = LaterIdentity.model_validate_json(old.model_dump_json())
    assert new.sha256() == old.sha256()
    assert new.model_dump_json() == old.model_dump_json()
    assert new.model_copy(update={"pooling": "mean"}).sha256() != old.sha256()


def test_an_idempotency_key_goes_on_naming_its_job() -> None:
    old = a_request().model_copy(update={"generate": Generate(max_tokens=8)})
    new = LaterRequest.model_validate(old.model_dump())
    hashes = [NewJob.of(job_id(1), "key", one).request_sha256 for one in (old, new)]
    assert hashes[0] == hashes[1]
    other = new.model_copy(update={"weight": 2.0})
    assert NewJob.of(job_id(1), "key", other).request_sha256 != hashes[0]
