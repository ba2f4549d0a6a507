"""Made-up records of `dynatree bench`, from which every figure of tables and plots can be computed by hand."""

from collections.abc import Sequence
from typing import Any, cast

from dynatree.bench.record import Report, Run

STATISTICS: dict[str, Any] = {
    "rounds": 10,
    "draft_n": 0,
    "draft_n_accepted": 0,
    "acceptance_rate": 0.0,
    "tokens_per_round": 1.0,
    "mean_path_length": 0.0,
    "nodes_per_round": 0.0,
    "committed_per_level": 0.0,
}
DRAFTED: dict[str, Any] = STATISTICS | {
    "draft_n": 40,
    "draft_n_accepted": 6,
    "rounds": 4,
    "tokens_per_round": 2.5,
    "nodes_per_round": 10.0,
    "acceptance_rate": 0.15,
    "committed_per_level": 1.25,
    "mean_path_length": 1.5,
}
PARTS = ("draft_forward", "grow", "verify_forward", "accept", "commit", "wire", "detokenize")


def new_run(label: str, seconds: float = 2.0, *, tokens: int = 20, step: int = 1, **changes: Any) -> Run:
    """A greedy run whose tokens arrive `step` at a time, evenly over `seconds` seconds."""
    came = [*range(1, tokens, step), tokens]
    run = {
        "label": label,
        "policy": label,
        "settings": {},
        "temperature": 0.0,
        "scheme": None,
        "seed": None,
        "prompt": 0,
        "repetition": 0,
        "tokens": tokens,
        "equal": True,
        "agrees": tokens,
        "wall_seconds": seconds,
        "arrivals": [(count, seconds * count / tokens) for count in came],
        "peak_memory": {"draft": 10_000_000, "verify": 50_000_000, "client": None},
        "statistics": STATISTICS,
    }
    return cast(Run, run | changes)


def baseline(label: str, seconds: float, **changes: Any) -> Run:
    """A run of a transformers baseline: no policy, no statistics."""
    nothing = {"policy": None, "statistics": None, "peak_memory": {"draft": None, "verify": None, "client": 90_000_000}}
    return new_run(label, seconds, **nothing | changes)


def detailed(base: dict[str, Any], part_seconds: float, acceptance_by_depth: Sequence[float]) -> dict[str, Any]:
    """Statistics with the total time of each part over all rounds, and acceptance by depth."""
    parts = {part: {"total_seconds": part_seconds, "p50_seconds": part_seconds / base["rounds"]} for part in PARTS}
    return base | {"round_parts": parts, "acceptance_by_depth": list(acceptance_by_depth)}


def new_report(command: str, runs: Sequence[Run], *, dtype: str = "float32", **changes: Any) -> Report:
    """A record whose target reads 40 MB of weights at 10 GB/s."""
    model = {
        "dtype": dtype,
        "device": "cpu",
        "parameters": 7,
        "version": "1",
        "architecture": "GPTNeoXForCausalLM",
        "context_length": 2048,
    }
    report = {
        "schema_version": 2,
        "command": command,
        "started": "2026-01-02T03:04:05+00:00",
        "complete": True,
        "versions": {"dynatree": "1", "torch": None, "transformers": None, "python": "3"},
        "git": {"commit": "0123456789abcdef", "modified": True},
        "machine": {
            "platform": "Linux",
            "cpu_count": 2,
            "cpu": "a processor",
            "memory_bytes": 8_000_000_000,
            "threads": 1,
            "read_bandwidth": 10e9,
        },
        "models": {
            "target": model | {"name": "large", "weight_bytes": 40_000_000},
            "draft": model | {"name": "small", "weight_bytes": 4_000_000},
        },
        "prompts": {"file": "a.txt", "sha256": "0", "field": None, "count": 2, "tokens": [4, 4], "data_set": "tales"},
        "options": {
            "max_new_tokens": 20,
            "prompt_tokens": 4,
            "seed": 0,
            "repetitions": 1,
            "warmup": 0,
            "ignore_eos": True,
        },
        "skipped": [],
        "runs": list(runs),
    }
    return cast(Report, report | changes)


def load_report(**changes: Any) -> Report:
    """A record of `dynatree bench load`: two clients under plain decoding and a policy, and a request every 2 seconds.

    In the closed loop of 40 tokens, plain decoding makes 10 tokens per second in the first repetition and 20 in the
    second; the policy makes 40.
    """
    shared = {"sessions_per_pass": 1.5, "rows_per_pass": 3.0, "trimmed_n": 8, "cached_tokens": 0}

    def loaded(label: str, seconds: float, *, start: float = 0.0, queue: float = 0.0, **where: Any) -> Run:
        base = STATISTICS if label == "autoregressive" else DRAFTED
        place = {"clients": None, "rate": None, "client": None} | where.pop("load") | {"start_seconds": start}
        statistics = base | shared | {"queue_seconds": queue}
        return new_run(label, seconds, load=place, statistics=statistics, peak_memory=None, **where)

    closed = [{"clients": 2, "client": client} for client in range(2)]
    at_rate = {"rate": 0.5}
    refused = {
        "label": "linear",
        "prompt": 1,
        "repetition": 0,
        "load": {"clients": None, "rate": 0.5, "client": None, "start_seconds": 2.0},
        "seconds": 0.01,
        "tokens": 0,
        "code": "RESOURCE_EXHAUSTED",
        "details": "every session is in use",
    }
    runs = [
        loaded("autoregressive", 2.0, load=closed[0]),
        loaded("autoregressive", 4.0, load=closed[1], queue=1.0, prompt=1),
        loaded("linear", 1.0, load=closed[0]),
        loaded("linear", 1.0, load=closed[1], prompt=1),
        loaded("linear", 1.0, load=closed[0], repetition=1),
        loaded("linear", 1.0, load=closed[1], repetition=1, prompt=1),
        loaded("autoregressive", 2.0, load=closed[0], repetition=1),
        loaded("autoregressive", 2.0, load=closed[1], repetition=1, prompt=1),
        loaded("autoregressive", 2.0, load=at_rate),
        loaded("autoregressive", 4.0, load=at_rate, start=2.0, prompt=1),
        loaded("linear", 1.0, load=at_rate),
    ]
    return new_report("load", runs, **{"failures": [refused]} | changes)


def costs_report(**changes: Any) -> Report:
    """A record of `dynatree bench costs`: a plain step of 10 ms, with a floor of 4 ms."""
    curves = {
        "nodes": [(0, 128, 1), (15, 128, 1), (255, 128, 1)],
        "context": [(0, 128, 1), (15, 128, 1), (0, 512, 1), (15, 512, 1)],
        "sessions": [(15, 128, 1), (15, 128, 2)],
        "draft": [(1, 128, 1), (8, 128, 1)],
    }
    points = [
        {
            "curve": curve,
            "nodes": nodes,
            "context": context,
            "sessions": sessions,
            "seconds": [0.010 + 0.0001 * nodes, 0.012 + 0.0001 * nodes, 0.014 + 0.0001 * nodes],
            "forward_seconds": [0.009 + 0.0001 * nodes],
        }
        for curve, places in curves.items()
        for nodes, context, sessions in places
    ]
    costs = {
        "plain_seconds": [0.009, 0.010, 0.012],
        "points": points,
        "floor": {"weight_bytes": 40_000_000, "read_bandwidth": 10e9, "seconds": 0.004},
    }
    return new_report("costs", [], **{"costs": costs} | changes)
