"""The facade that vLLM loads: it forwards, and a refusal reaches the service before it ends the engine."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput

from connector.hidden_states import HiddenStatesConnector, StepMetadata, _telling_refusals
from connector.versions import LayoutError
from connector.wire import RowRef
from connector.worker import device_name
from schemas.receipts import AttemptId
from service.capture.link import EngineLink
from tests.support.fake_engine import FakeRequest, Status
from tests.support.plans import JOB


class Transfer:
    """vLLM's KVTransferConfig, as far as the facade reads it."""

    is_kv_producer = True

    def __init__(self, **extra: Any) -> None:
        self._extra = extra

    def get_from_extra_config(self, key: str, default: Any) -> Any:
        return self._extra.get(key, default)


def groups(name: str = "draft.cache_only_layers.8") -> SimpleNamespace:
    spec = SimpleNamespace(block_size=4)
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=[name], kv_cache_spec=spec)])


def facade(transfer: Transfer, cache: SimpleNamespace) -> HiddenStatesConnector:
    return HiddenStatesConnector(
        SimpleNamespace(kv_transfer_config=transfer), KVConnectorRole.SCHEDULER, cache
    )


async def told(raise_in: Any) -> str | None:
    """Return what the service heard while `raise_in(path)` refused."""
    link = EngineLink()
    await link.listen()
    with pytest.raises(LayoutError):
        await asyncio.to_thread(raise_in, str(link.path))
    async with asyncio.timeout(60):
        while link.refusal is None:
            await asyncio.sleep(0.001)
    await link.close()
    return link.refusal


def test_an_engine_without_the_cache_only_layer_is_refused_and_the_service_hears_why():
    heard = asyncio.run(told(lambda path: facade(Transfer(socket_path=path), groups("model.layers.0.attn"))))
    assert heard is not None
    assert "expected one cache-only layer" in heard
    assert "model.layers.0.attn" in heard


def test_a_machine_without_the_memory_refuses_no_job():
    """What it dies of is in the engine's log, where it counts against the machine."""
    with pytest.raises(MemoryError), _telling_refusals(Transfer(socket_path="/nobody/listens")):
        raise MemoryError("no 10 bytes for the host pool")


def test_a_finished_request_is_held_and_its_work_travels_with_the_next_step():
    connector = facade(Transfer(), groups())
    ref = RowRef(AttemptId(job_id=JOB, unit=0, epoch=1), 2, 5)
    request = FakeRequest("r", Status.FINISHED_LENGTH_CAPPED, ref.params(), 5, [1, 2, 3, 4, 5, 6])
    assert connector.request_finished_all_groups(request, ([0, 1],)) == (True, None)
    step = SchedulerOutput.make_empty()
    metadata = connector.build_connector_meta(step)
    assert isinstance(metadata, StepMetadata)
    assert [item.ref for item in metadata.work.items] == [ref]
    assert connector.build_connector_meta(step).work.items == []
    assert connector.get_num_new_matched_tokens(None, 7) == (0, False)
    assert connector.get_finished_count() == 1


def test_an_engine_that_would_sleep_is_refused():
    """Its cache would be mapped anew, and the worker half keeps a view. vLLM 0.33 asks before it starts."""
    assert HiddenStatesConnector.supports_sleep_mode(Transfer()) is False


class Worker:
    """A worker half that has copied what it is told to have copied."""

    def __init__(self, *steps: set[str]) -> None:
        self._steps = iter(steps)
        self._drains = set.union(*steps)

    def drained(self, work: Any) -> set[str]:
        return self._drains

    def step(self, work: Any) -> set[str]:
        return next(self._steps)


def test_a_request_is_reported_as_sent_only_after_the_engine_said_that_it_is_finished():
    connector = facade(Transfer(), groups())
    connector._worker = Worker({"early"}, set(), {"late"})
    assert connector.get_finished({"late"}) == (None, None)
    assert connector.get_finished({"early"}) == ({"early"}, None)
    assert connector.get_finished(set()) == ({"late"}, None)


def test_of_requests_that_others_drain_or_nobody_nothing_is_kept():
    connector = facade(Transfer(), groups())
    connector._worker = Worker({"ours"}, set())
    assert connector.get_finished({"ours", "another rank's", "an answer"}) == ({"ours"}, None)
    assert connector.get_finished({"void"}) == (None, None)
    kept = [names for names in vars(connector).values() if isinstance(names, set)]
    assert {"another rank's", "an answer", "void"} & set().union(*kept) == set()


def test_an_engine_is_known_by_the_model_of_its_gpu(monkeypatch):
    """Otherwise engines on two models of GPU would share a canary."""
    monkeypatch.setattr(torch.cuda, "get_device_name", {torch.device("cuda:1"): "NVIDIA H200"}.__getitem__)
    assert device_name(torch.device("cuda:1")) == "NVIDIA H200"
    assert device_name(torch.device("cpu")) == "cpu"
