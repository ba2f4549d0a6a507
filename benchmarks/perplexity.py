"""The perplexity of models and precisions over one text, through the product's own forward passes.

    python benchmarks/perplexity.py TEXT MODEL[:WEIGHTS[:DTYPE]]... [--windows N] [--out JSON]

A text is cut into windows of 512 tokens, each scored by itself; the first token of a window is not scored. A MODEL is a
folder or a GGUF file, WEIGHTS is auto, int8 or int4, and DTYPE that of the activations.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dynatree.bench.environment import environment
from dynatree.engine.engine import Engine
from dynatree.engine.forward.segment import Segment
from dynatree.engine.loading import load_engine
from dynatree.engine.settings import ModelSettings

WINDOW = 512  # tokens


@torch.inference_mode()
def negative_log_likelihoods(engine: Engine, tokens: list[int]) -> list[float]:
    """Return that of each token but the first, in nats."""
    kv = engine.kv_cache.reserve(len(tokens))
    assert kv is not None, "the KV cache has room for one session"
    try:
        (logits,) = engine.forward([Segment(kv, 0, tokens, range(len(tokens)))])
    finally:
        engine.kv_cache.release(kv)
    chosen = logits[:-1].float().log_softmax(1).gather(1, torch.tensor(tokens[1:])[:, None])
    return (-chosen.double().squeeze(1)).tolist()


def measured(argument: str, text: str, windows: int) -> dict[str, Any]:
    """Measure one MODEL[:WEIGHTS[:DTYPE]]."""
    model, weights, dtype = (*argument.split(":"), "auto", "auto")[:3]
    engine = load_engine(ModelSettings(model, "cpu", dtype, weights, sessions=1, measured_rows=0, max_context=WINDOW))
    tokens: list[int] = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
    whole = [tokens[at : at + WINDOW] for at in range(0, len(tokens) - WINDOW + 1, WINDOW)][:windows]
    begun = time.perf_counter()
    each = [sum(negative_log_likelihoods(engine, window)) / (WINDOW - 1) for window in whole]
    return {
        "model": engine.info.name,
        "weights": weights,
        "dtype": engine.info.dtype,
        "perplexity": math.exp(sum(each) / len(each)),
        "nats_by_window": each,
        "seconds": time.perf_counter() - begun,
        "weight_bytes": engine.info.step_bytes,
    }


def main() -> None:
    """Measure all models, and print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--windows", type=int, default=100)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    text = options.text.read_text(encoding="utf-8")
    results = []
    for argument in options.models:
        results.append(measured(argument, text, options.windows))
        shown = {name: value for name, value in results[-1].items() if name != "nats_by_window"}
        print(json.dumps(shown), flush=True)
    if options.out:
        record = {
            "text": options.text.name,
            "window": WINDOW,
            "environment": asdict(environment(None, None)),
            "results": results,
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
