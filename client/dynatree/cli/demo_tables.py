"""The tables of `dynatree demo`: the comparison with plain decoding, and the time of a round by part."""

from __future__ import annotations

from rich.table import Table

from dynatree.client import Completion, Statistics

PARTS = {
    "draft_forward": "draft forwards",
    "verify_forward": "verify forward",
    "grow": "grow bookkeeping",
    "wire": "wire",
    "accept": "acceptance",
    "commit": "commit",
    "detokenize": "detokenize (off the critical path)",
}
FORWARDS = ("draft_forward", "verify_forward")


def summary(drafted: Completion, plain: Completion) -> Table:
    """Build the table that compares a completion with plain decoding."""
    ours, base = drafted.stats, plain.stats
    table = Table(title=f"{ours.generated_tokens} tokens, greedy")
    table.add_column("")
    table.add_column("DynaTree", justify="right")
    table.add_column("plain decoding", justify="right")
    rows = {
        "tokens/s": (_rate(ours), _rate(base), ".1f"),
        "speedup": (base.total_seconds / ours.total_seconds, 1.0, ".2f"),
        "tokens per round": (ours.tokens_per_round, base.tokens_per_round, ".2f"),
        "acceptance": (100 * ours.acceptance_rate, None, ".0f"),
        "round cost (plain steps)": (_round_seconds(ours) / _round_seconds(base), 1.0, ".2f"),
        "time to first token (ms)": (
            1000 * ours.time_to_first_token_seconds,
            1000 * base.time_to_first_token_seconds,
            ".1f",
        ),
    }
    for name, (value, baseline, style) in rows.items():
        unit = " %" if name == "acceptance" else ""
        table.add_row(name, f"{value:{style}}{unit}", "-" if baseline is None else f"{baseline:{style}}")
    table.add_row("same tokens", "yes" if drafted.token_ids == plain.token_ids else "NO", "")
    return table


def _rate(stats: Statistics) -> float:
    return stats.generated_tokens / stats.total_seconds


def _round_seconds(stats: Statistics) -> float:
    """Mean seconds of a round between the first and the last token."""
    return (stats.total_seconds - stats.time_to_first_token_seconds) / max(1, stats.rounds)


def breakdown(stats: Statistics) -> Table:
    """Build the table of a round's time by part."""
    table = Table(title=f"time per round, rounds: {stats.rounds}")
    for heading in ("part", "p50 (ms)", "mean (ms)"):
        table.add_column(heading, justify="left" if heading == "part" else "right")
    parts = stats.round_parts
    for name, label in PARTS.items():
        part = parts[name]
        table.add_row(label, f"{1000 * part.p50_seconds:.3f}", f"{1000 * part.total_seconds / stats.rounds:.3f}")
    round_ms = 1000 * _round_seconds(stats)
    forwards_ms = 1000 * sum(parts[name].total_seconds for name in FORWARDS) / stats.rounds
    table.add_section()
    table.add_row("a round, measured from outside", "", f"{round_ms:.3f}")
    table.add_row("everything outside the forwards", "", f"{round_ms - forwards_ms:.3f}")
    return table
