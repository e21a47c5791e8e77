"""The facade that vLLM loads (`kv_connector_module_path="connector.hidden_states"`).

Builds the half that the role asks for and forwards to it.

The halves are in `connector.scheduler` and `connector.worker`; only this file knows vLLM's connector API. The
cache layout is taken as the engine gives it, so that the target's attention keeps the layout it runs best
with.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from connector.layout import CacheGroup, find_cache_group, view_BLSH
from connector.scheduler import SchedulerHalf
from connector.versions import LayoutError
from connector.wire import DrainConfig, StepWork
from connector.worker import WorkerHalf
from schemas.receipts import Refused, line

EXIT_SERVICE_GONE = 75
"""Exit status of an engine process whose service vanished (EX_TEMPFAIL)."""


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not typed for us
    """One step's work on its way to the worker half."""

    work: StepWork = field(default_factory=StepWork)


class HiddenStatesConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is not typed for us
    """Drains the cache-only layer of the `extract_hidden_states` proposer. Stores only; never loads."""

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Refuse sleep mode (vLLM 0.33 asks): it remaps the cache, and the worker half keeps a view of it."""
        return False

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Find the cache-only group; build the scheduler half now, the worker half once the cache exists."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        with _telling_refusals(self._kv_transfer_config):
            self._group: CacheGroup = find_cache_group(kv_cache_config.kv_cache_groups)
        self._scheduler = SchedulerHalf(self._group.block_size, self._group.group_id)
        self._worker: WorkerHalf | None = None
        self._drained: set[str] = set()
        """Requests that this rank must report as sent; they are added no later than they finish."""
        self._finished: set[str] = set()
        """Those that the engine has reported to this worker as finished; only these may be reported back."""
        self._copied: set[str] = set()

    # Scheduler side, in the engine core's process.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Offer no tokens: this connector never loads."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Do nothing: there is nothing to load."""

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hand a finished request to the scheduler half; True holds its blocks."""
        return self._scheduler.request_finished(request, block_ids), None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Do the same in an engine with a single cache group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """Return the step's work for the worker half."""
        self._scheduler.scheduled(scheduler_output)
        return StepMetadata(self._scheduler.take_work())

    def get_finished_count(self) -> int:
        """Expect one report per request: only the rank that drains a row reports it."""
        return 1

    # Worker side, in the engine's worker process.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Check the cache and start the worker half. Raises LayoutError; the engine then does not start."""
        with _telling_refusals(self._kv_transfer_config):
            self._worker = _start_worker(self._vllm_config, self._kv_transfer_config, self._group, kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin the step: this worker hook is called before the forward pass in every version of vLLM."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, StepMetadata):
            self._worker.begin(connector_metadata.work)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Run the worker half's step and report the requests whose blocks may be freed."""
        assert self._worker is not None, "vLLM registers the caches before the first step"  # noqa: S101
        metadata = self._get_connector_metadata() if self.has_connector_metadata() else None
        work = metadata.work if isinstance(metadata, StepMetadata) else StepWork()
        self._drained |= self._worker.drained(work)
        self._finished |= finished_req_ids & self._drained
        self._copied |= self._worker.step(work)
        sent = self._copied & self._finished
        self._drained -= sent
        self._copied -= sent
        self._finished -= sent
        return sent or None, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing: there is nothing to load."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: there is nothing to load."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: the cache-only layer stores the states itself.

        They are drained when the request ends.
        """

    def wait_for_save(self) -> None:
        """Do nothing: blocks are held until drained."""

    def shutdown(self) -> None:
        """Stop the worker half, if this process has one."""
        if self._worker is not None:
            self._worker.stop()


@contextmanager
def _telling_refusals(transfer_config: Any) -> Iterator[None]:
    """Report a LayoutError to the service: the engine refuses the model, and would again.

    Any other error is of this machine, such as a MemoryError; `connector.plugin.failure` keeps it.
    """
    try:
        yield
    except LayoutError as error:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as to_service:
            to_service.connect(transfer_config.get_from_extra_config("socket_path", None))
            to_service.sendall(line(Refused(detail=str(error))))
        raise


def _start_worker(
    vllm_config: Any,
    transfer_config: Any,
    group: CacheGroup,
    kv_caches: dict[str, torch.Tensor],
) -> WorkerHalf:
    """Check the engine's cache against its configuration and build the worker half."""
    from vllm.distributed.parallel_state import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    if vllm_config.parallel_config.pipeline_parallel_size != 1:
        raise LayoutError("pipeline_parallel_size must be 1: the captured layers lie on different stages")
    draft = vllm_config.speculative_config.draft_model_config.hf_config
    cache = view_BLSH(
        kv_caches[group.layer_name],
        group,
        num_layers=len(draft.eagle_aux_hidden_state_layer_ids),
        hidden_size=vllm_config.model_config.get_hidden_size(),
        dtype=vllm_config.model_config.dtype,
        version=vllm.__version__,
    )
    option = transfer_config.get_from_extra_config
    config = DrainConfig(
        work_root=Path(option("work_root", None)),
        socket_path=Path(option("socket_path", None)),
        pool_bytes=int(option("pool_bytes", None)),
        writer_threads=int(option("writer_threads", None)),
        rank=get_tensor_model_parallel_rank(),
        num_ranks=get_tensor_model_parallel_world_size(),
        engine_version=vllm.__version__,
    )
    return WorkerHalf(config, cache, vllm_config.model_config.max_model_len, on_lost=_stop_process)


def _stop_process() -> None:
    """End this process at once.

    Its service is gone: nothing it computes can be committed, and it would keep holding the device.
    """
    os._exit(EXIT_SERVICE_GONE)
