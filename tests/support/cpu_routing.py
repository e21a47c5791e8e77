"""Lets the engine's CPU build route as Step-3.5 does: sigmoid scores, a bias to choose by, a scaling factor.

Its router computes that for groups of experts, and refuses it without groups; one group of all of them is the
same. Named as `worker_extension_cls`, this module is imported by each worker before the model is made.
"""

from typing import Any

from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter


class SigmoidRouting:
    """Becomes a base of the worker's class."""


_compute_routing = CPURouter._compute_routing


def _in_one_group(router: CPURouter, *args: Any, **more: Any) -> Any:
    if router.scoring_func == "sigmoid" and not router.use_grouped_topk:
        router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1
    return _compute_routing(router, *args, **more)


CPURouter._compute_routing = _in_one_group
