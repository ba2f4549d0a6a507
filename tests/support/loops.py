"""Event loops that end in order."""

import asyncio


async def end_other_tasks() -> None:
    """Cancel all other tasks of this loop until none is left."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
