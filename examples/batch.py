"""Many prompts at once, through DynaTree's client: `python examples/batch.py [ADDRESS] <prompts.txt >answers.jsonl`.

Standard input has one prompt a line. The answers are JSON lines, in the prompts' order. The bundled pair will do:

    dynatree serve --target-model embedded --draft-model embedded --grpc localhost:50051
"""

import asyncio
import json
import sys
import time

from dynatree.client import AsyncClient, Completion, DynaTreeError

AT_ONCE = 8  # `dynatree serve --max-sessions` is how many the services take; more would only wait in their queue


async def main() -> None:
    """Complete every prompt; one that fails does not end the others."""
    prompts = [line.rstrip("\n") for line in sys.stdin if line.strip()]
    places = asyncio.Semaphore(AT_ONCE)
    began = time.perf_counter()
    async with AsyncClient(sys.argv[1] if sys.argv[1:] else "localhost:50051") as client:

        async def complete(prompt: str) -> Completion | DynaTreeError:
            async with places:
                try:
                    return await client.generate(prompt, max_new_tokens=64)
                except DynaTreeError as error:
                    return error

        answers = await asyncio.gather(*map(complete, prompts))
    seconds, tokens = time.perf_counter() - began, 0
    for prompt, answer in zip(prompts, answers, strict=True):
        if isinstance(answer, DynaTreeError):
            print(json.dumps({"prompt": prompt, "error": str(answer)}))
        else:
            tokens += len(answer.token_ids)
            print(json.dumps({"prompt": prompt, "text": answer.text, "finish_reason": answer.finish_reason}))
    print(f"{len(prompts)} prompts, {tokens} tokens, {tokens / seconds:.1f} tokens/s", file=sys.stderr)


asyncio.run(main())
