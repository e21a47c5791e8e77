"""The part `bytes`: the CUDA gather's correctness, byte by byte, which no machine without a GPU can test.

Legend: B blocks, L captured layers, S slots a block, H hidden size, T tokens of a request.
"""

import numpy as np
import torch

from benchmarks.gpu.cache import LAYOUTS, Request, random_cache, random_requests, states_LTH, view_BLSH
from benchmarks.gpu.figures import Save
from benchmarks.gpu.turns import Model
from benchmarks.gpu.ways import POOL_BYTES, Flight, QuarryWay, Way
from connector.cuda_gather import STAGE_BYTES, CudaGather
from connector.pool import HostPool
from connector.sentinels import SENTINELS, Sentinels
from tests.support.sums import token_sums

SMALL_STAGE_BYTES = 3 * 2**20
"""Smaller than a request, so that the halves of the stage take turns many times within one."""

ODD_SHAPES = ((torch.float32, 3, 48), (torch.float16, 1, 8), (torch.bfloat16, 5, 136))
"""dtype, layers and hidden size of caches whose blocks are padded to no whole number of rows."""


class WrongBytes(AssertionError):
    """A copy that differs from the cache; no figure of such a gather is worth anything."""


def check_bytes(cache_bytes: int, seed: int, save: Save) -> None:
    """Compare copies with the cache, bit for bit; save how many bytes of each check were equal.

    Raises WrongBytes.
    """
    flat, pool, model = random_cache(cache_bytes, seed), HostPool(POOL_BYTES, pinned=True), Model()
    for layout in LAYOUTS:
        cache = view_BLSH(flat, layout)
        requests = [
            *(Request(tuple(range(5, 5 + -(-count // 16))), count) for count in (1, 15, 16, 17, 511)),
            *random_requests("typical", POOL_BYTES // 4, len(cache), seed=1),
            *random_requests("long", 1, len(cache), seed=2),
            *random_requests("short", POOL_BYTES // 16, len(cache), seed=3),
        ]
        save(f"bytes equal, sentinels, {layout}", check_sentinels(cache))
        for stage_bytes in (STAGE_BYTES, SMALL_STAGE_BYTES):
            name = f"{layout}, stage of {stage_bytes >> 20} MiB"
            equal = check_way(QuarryWay(cache, pool, stage_bytes), cache, requests, name)
            save(f"bytes equal, {name}", equal)
        save(f"bytes equal, {layout}, while written", check_order(cache, pool, model))
    save("bytes equal, padded caches", sum(check_padded(pool, *shape) for shape in ODD_SHAPES))


def check_sentinels(cache_BLSH: torch.Tensor) -> int:
    """Mark blocks in the middle and at both ends of a cache beyond 2^31 elements; nothing else may change.

    Returns the bytes compared: those blocks and their neighbours.
    """
    last = len(cache_BLSH) - 1
    marked = sorted({0, 3, last // 2, last // 2 + 1, last - 2, last})
    seen = sorted({at for block in marked for at in (block - 1, block, block + 1) if 0 <= at <= last})
    index = torch.tensor(seen, device=cache_BLSH.device)
    wanted = cache_BLSH[index].clone()
    before = wanted.clone()
    words = wanted.view(torch.int16)
    for place in (place for place, block in enumerate(seen) if block in marked):
        words[place, ..., 0] = words[place, ..., -1] = SENTINELS[cache_BLSH.dtype]
    Sentinels(cache_BLSH).place(marked)
    if not torch.equal(cache_BLSH[index].view(torch.int16), words):
        raise WrongBytes(
            "sentinels are not the first and last element of every slot of their blocks, or are elsewhere"
        )
    cache_BLSH[index] = before
    return wanted.nbytes


def check_way(way: Way, cache_BLSH: torch.Tensor, requests: list[Request], name: str) -> int:
    """Copy all requests at once, then compare each."""
    flights = way.start(requests)
    torch.cuda.synchronize()
    if len(flights) < len(requests) or not all(flight.done() for flight in flights):
        raise WrongBytes(f"{name}: a request found no room, or was not done after all work had ended")
    for flight in flights:
        compare(flight, states_LTH(cache_BLSH, flight.request), name)
        flight.end()
    return sum(request.num_bytes for request in requests)


def check_order(cache_BLSH: torch.Tensor, pool: HostPool, model: Model) -> int:
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
        raise WrongBytes("a copy was done before the work that it must wait for")
    while not flight.done():
        pass
    cache_BLSH.index_copy_(0, blocks, other)
    torch.cuda.synchronize()
    wanted_LTH = fresh.transpose(0, 1).flatten(1, 2)[:, : request.num_tokens].cpu()
    compare(flight, wanted_LTH, "blocks written just before")
    flight.end()
    cache_BLSH.index_copy_(0, blocks, before)
    return request.num_bytes


def check_padded(pool: HostPool, dtype: torch.dtype, num_layers: int, hidden_size: int) -> int:
    """Check a small cache whose blocks lie apart by no multiple of a row."""
    block_size = num_layers * 7 * hidden_size
    pages = torch.randn(50, block_size + 8, device="cuda").to(dtype)[:, 8:]
    cache_BLSH = pages.unflatten(1, (7, num_layers, hidden_size)).permute(0, 2, 1, 3)
    gather = CudaGather(cache_BLSH, SMALL_STAGE_BYTES)
    request = Request(tuple(np.random.default_rng(5).permutation(50).tolist()), 50 * 7 - 3)
    shape_LTH = (num_layers, request.num_tokens, hidden_size)
    slab = pool.acquire(num_layers * request.num_tokens * hidden_size * dtype.itemsize)
    assert slab is not None, "the pool is empty"
    out_LTH = pool.tensor(slab, dtype, shape_LTH)
    gather.begin_step()
    (copy,) = gather.start([(request.block_ids, out_LTH)])
    torch.cuda.synchronize()
    flight = Flight(request, out_LTH, copy.done, lambda: pool.release(slab), copy.sums)
    compare(flight, states_LTH(cache_BLSH, request), f"padded {dtype}")
    flight.end()
    return slab.num_bytes


def compare(flight: Flight, wanted_LTH: torch.Tensor, name: str) -> None:
    """Compare a copy that is done as bytes: as numbers, -0.0 would equal 0.0."""
    copied = flight.states.contiguous().view(torch.uint8)
    if not torch.equal(copied, wanted_LTH.contiguous().view(torch.uint8)):
        raise WrongBytes(f"{name}: a request of {flight.request.num_tokens} tokens differs from the cache")
    if flight.sums is not None and (flight.sums() != token_sums(wanted_LTH.contiguous())).any():
        raise WrongBytes(f"{name}: the sums on the device are not those of the copied states")
