"""vLLM alone, to its first answer: `python -m benchmarks.startup_bare OPTIONS`, AsyncEngineArgs' as JSON."""

import asyncio
import json
import os
import sys
import time
from pathlib import Path

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM


async def answer(options: dict[str, object], file: Path) -> None:
    """Start an engine, ask for one token, note when it is there, stop the engine."""
    arguments = AsyncEngineArgs(**options)  # type: ignore[arg-type]
    # As Quarry starts it: with the batch sizes for the device.
    llm = AsyncLLM.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)
    one = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    async for _ in llm.generate({"prompt_token_ids": list(range(16))}, one, "first"):
        file.write_text(str(time.time()))
    llm.shutdown()


if __name__ == "__main__":
    asyncio.run(answer(json.loads(sys.argv[1]), Path(os.environ["QUARRY_STARTUP_FILE"])))
