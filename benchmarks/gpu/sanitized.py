"""A few rounds of a tiny pair under compute-sanitizer's memcheck, which sees accesses outside of what was allocated.

Every tensor is an allocation of its own then, so that none lies inside a larger one; graphs cannot be captured so, and
the same kernels run one by one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

from keeping import NO_GPU, Bound, Measured, NotMeasuredError

if TYPE_CHECKING:
    from session import Context

TOOL = "compute-sanitizer"
FAULT = 86  # the exit status by which the tool tells that it found something
OPTIONS = ("--tool", "memcheck", "--error-exitcode", str(FAULT), "--report-api-errors", "no")  # torch tries calls
SECONDS = 170.0


def tool() -> str | None:
    """The tool's path; None where it is not installed."""
    return shutil.which(TOOL, path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")


def sanitizer(context: Context) -> Measured:
    """What the tool says of a few rounds."""
    if not context.on_gpu:
        raise NotMeasuredError(NO_GPU)
    if (program := tool()) is None:
        raise NotMeasuredError(f"missing: {TOOL}")
    with tempfile.TemporaryDirectory() as folder:
        command = [program, *OPTIONS, sys.executable, __file__, folder]
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            raise NotMeasuredError(f"it did not end within {SECONDS:g} s") from None
    printed = [*done.stdout.splitlines(), *done.stderr.splitlines()]
    if any("not supported" in line for line in printed) or done.returncode not in (0, FAULT):
        raise NotMeasuredError(f"{TOOL} ended with status {done.returncode}: {' | '.join(printed[-3:])}")
    bound = Bound("runs with faulty accesses to memory", int(done.returncode == FAULT), most=0)
    return Measured({"status": done.returncode, "printed": printed[-60:]}, printed[-1:], [bound])


def main(folder: str) -> None:
    """Decode a little: every kernel of target and draft, greedily and by noise, with trees and with levels."""
    import torch
    from decoding import GREEDY, SAMPLED, Method, complete
    from pair import TINY, Models, prompts

    from dynatree.engine.gpu import row_runner

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with patch.object(row_runner, "graph_pool", lambda _: None):
        models = Models(replace(TINY, dtype=torch.bfloat16), device, Path(folder), 2)
        [(_, prompt)] = prompts(1)
        for method in (Method("linear", {"depth": 4}), Method("dyspec", {"max_nodes": 31})):
            for sampling in (GREEDY, SAMPLED):
                print(method.policy, complete(models.pair, prompt, TINY.new_tokens, method, sampling).token_ids)


if __name__ == "__main__":
    main(sys.argv[1])
