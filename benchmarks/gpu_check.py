"""The CUDA gather's correctness, byte by byte: what no machine without a GPU can test.

Legend: B blocks, L captured layers, S slots a block, H hidden size, T tokens of a request.
"""

import numpy as np
import torch

from benchmarks.gpu_cache import LAYOUTS, Request, random_requests, states_LTH, view_BLSH
from benchmarks.gpu_turns import Model
from benchmarks.gpu_ways import ExampleWay, QuarryWay, SlabFlight, Way
from connector.cuda_gather import STAGE_BYTES, CudaGather
from connector.pool import HostPool
from tests.support.sums import token_sums

SMALL_STAGE_BYTES = 3 * 2**20
"""Smaller than a request, so that the ring turns many times within one."""

ODD_SHAPES = ((torch.float32, 3, 48), (torch.float16, 1, 8), (torch.bfloat16, 5, 136))
"""dtype, layers and hidden size of caches whose blocks are padded to no whole number of rows."""


class WrongBytes(AssertionError):
    """A copy that differs from the cache; no figure of such a run is worth anything."""


def check_everything(flat: torch.Tensor, pool: HostPool, model: Model) -> dict[str, int]:
    """Compare copies with the cache, bit for bit; return how many bytes of each check were equal.

    Raises WrongBytes.
    """
    checked = {}
    for layout in LAYOUTS:
        cache = view_BLSH(flat, layout)
        requests = [
            *(Request(tuple(range(5, 5 + -(-count // 16))), count) for count in (1, 15, 16, 17, 511)),
            *random_requests("typical", pool.num_bytes // 4, len(cache), seed=1),
            *random_requests("long", 1, len(cache), seed=2),
            *random_requests("short", pool.num_bytes // 16, len(cache), seed=3),
        ]
        for stage_bytes in (STAGE_BYTES, SMALL_STAGE_BYTES):
            name = f"{layout}, stage of {stage_bytes >> 20} MiB"
            checked[name] = _check_way(QuarryWay(cache, pool, stage_bytes), cache, requests, name)
        checked[f"{layout}, example"] = _check_way(
            ExampleWay(cache, None), cache, requests[:12], f"{layout}, example"
        )
        checked[f"{layout}, while written"] = _check_order(cache, pool, model)
    checked["padded caches"] = sum(_check_padded(pool, *shape) for shape in ODD_SHAPES)
    return checked


def _check_way(way: Way, cache_BLSH: torch.Tensor, requests: list[Request], name: str) -> int:
    """Copy all requests at once, then compare each."""
    flights = way.start(requests)
    torch.cuda.synchronize()
    if len(flights) < len(requests) or not all(flight.done() for flight in flights):
        raise WrongBytes(f"{name}: a request found no room, or was not done after all work had ended")
    for flight in flights:
        _compare(flight.states_LTH(), states_LTH(cache_BLSH, flight.request), name)
        if isinstance(flight, SlabFlight) and (flight.sums_LT() != token_sums(flight.states_LTH())).any():
            raise WrongBytes(f"{name}: the sums on the device are not those of the copied states")
        flight.end()
    return sum(request.num_bytes for request in requests)


def _check_order(cache_BLSH: torch.Tensor, pool: HostPool, model: Model) -> int:
    """Write a request's blocks behind long work, start its copy, write them anew once that is done."""
    (request,) = random_requests("typical", 1, len(cache_BLSH), seed=4)
    blocks = torch.tensor(request.block_ids, device="cuda")
    fresh, other = (torch.randn_like(cache_BLSH[: len(blocks)]) for _ in range(2))
    way = QuarryWay(cache_BLSH, pool, STAGE_BYTES)
    before = cache_BLSH[blocks]
    model.step(50)
    cache_BLSH.index_copy_(0, blocks, fresh)
    (flight,) = way.start([request])
    if flight.done():
        raise WrongBytes("a copy was done before the work that it stands behind")
    while not flight.done():
        pass
    cache_BLSH.index_copy_(0, blocks, other)
    torch.cuda.synchronize()
    wanted = fresh.transpose(0, 1).flatten(1, 2)[:, : request.num_tokens].cpu()
    _compare(flight.states_LTH(), wanted, "blocks written just before")
    flight.end()
    cache_BLSH.index_copy_(0, blocks, before)
    return request.num_bytes


def _check_padded(pool: HostPool, dtype: torch.dtype, num_layers: int, hidden_size: int) -> int:
    """Check a small cache whose blocks lie apart by no multiple of a row."""
    block = num_layers * 7 * hidden_size
    pages = torch.randn(50, block + 8, device="cuda").to(dtype)[:, 8:]
    cache = pages.unflatten(1, (7, num_layers, hidden_size)).permute(0, 2, 1, 3)
    gather = CudaGather(cache, SMALL_STAGE_BYTES)
    blocks = np.random.default_rng(5).permutation(50).tolist()
    shape_LTH = (num_layers, 50 * 7 - 3, hidden_size)
    slab = pool.acquire(num_layers * shape_LTH[1] * hidden_size * dtype.itemsize)
    assert slab is not None, "the pool is empty"
    out = pool.tensor(slab, dtype, shape_LTH)
    gather.begin_step()
    gather.start([(blocks, out)])
    torch.cuda.synchronize()
    wanted = torch.cat([cache[block].cpu() for block in blocks], dim=1)[:, : shape_LTH[1]]
    _compare(out, wanted, f"padded {dtype}")
    pool.release(slab)
    return slab.num_bytes


def _compare(found_LTH: torch.Tensor, wanted_LTH: torch.Tensor, name: str) -> None:
    """Compare as bytes: as numbers, -0.0 would equal 0.0."""
    equal = torch.equal(found_LTH.contiguous().view(torch.uint8), wanted_LTH.contiguous().view(torch.uint8))
    if not equal:
        raise WrongBytes(f"{name}: a request of {found_LTH.shape[1]} tokens differs from the cache")
