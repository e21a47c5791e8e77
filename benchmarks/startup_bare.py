"""vLLM alone, to its first answer: `python -m benchmarks.startup_bare OPTIONS`, AsyncEngineArgs' as JSON."""

import asyncio
import json
import sys

from benchmarks.startup_marks import mark

mark("vLLM's import begins")

from vllm import SamplingParams  # noqa: E402 - the mark comes first
from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402
from vllm.usage.usage_lib import UsageContext  # noqa: E402
from vllm.v1.engine.async_llm import AsyncLLM  # noqa: E402

mark("vLLM is imported")


async def answer(options: dict[str, object]) -> None:
    """Start an engine, ask for one token, stop it."""
    arguments = AsyncEngineArgs(**options)  # type: ignore[arg-type]
    # As Quarry starts it: with the batch sizes for the device.
    llm = AsyncLLM.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)
    mark("the engine is ready")
    one = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    async for _ in llm.generate({"prompt_token_ids": list(range(16))}, one, "first"):
        mark("the first answer")
    llm.shutdown()


if __name__ == "__main__":
    asyncio.run(answer(json.loads(sys.argv[1])))
