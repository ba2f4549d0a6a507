"""`dynatree demo`: both services as child processes, one completion with live text, and what it was worth."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from dynatree.cli.arguments import add_policy_settings
from dynatree.cli.service_pair import service_pair
from dynatree.client import Client, Completion, Statistics

PROMPT = "It was a dark and stormy night, and the captain"
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dynatree demo`."""
    parser.add_argument("--prompt", default=PROMPT, help="default: %(default)r")
    parser.add_argument(
        "--max-new-tokens", type=_at_least_two, default=128, metavar="N", help="at least 2; default: %(default)s"
    )
    parser.add_argument("--target-model", default="embedded", metavar="embedded|PATH|HUB_ID", help="default: embedded")
    parser.add_argument("--draft-model", default="embedded", metavar="embedded|PATH|HUB_ID", help="default: embedded")
    parser.add_argument("--policy", help="how trees are grown (default: the service's)")
    add_policy_settings(parser)
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16", "float16"],
        help="as for the services (default: the checkpoint's own)",
    )
    parser.add_argument("--breakdown", action="store_true", help="also show where a round's time goes")


def _at_least_two(text: str) -> int:
    """The first token is the prompt's own forward; there is a round to measure from the second on."""
    number = int(text)
    if number < 2:
        raise argparse.ArgumentTypeError(f"{text} is not at least 2")
    return number


def run(options: argparse.Namespace) -> int:
    """Show one completion, and compare it with plain decoding; 1 if the two differ."""
    console = Console(highlight=False)
    with service_pair(options.target_model, options.draft_model, ["--dtype", options.dtype]) as pair:
        client = pair.client
        info = client.model_info()
        console.print(f"target {info.target.name}, draft {info.draft.name}, on {info.target.device}\n", markup=False)
        _complete(client, options, "autoregressive", {})  # warm-up of the target
        _complete(client, options, options.policy, options.policy_settings)  # and of the draft
        console.print(options.prompt, style="dim", end="", markup=False, soft_wrap=True)
        with client.stream(
            options.prompt,
            max_new_tokens=options.max_new_tokens,
            policy=options.policy,
            policy_settings=options.policy_settings,
            ignore_eos=True,
        ) as stream:
            for chunk in stream:
                console.print(chunk.text, end="", markup=False, soft_wrap=True)
        console.print("\n")
        drafted = stream.completion
        plain = _complete(client, options, "autoregressive", {})
    console.print(_summary(drafted, plain))
    if options.breakdown:
        console.print(_breakdown(drafted.stats))
    if drafted.token_ids != plain.token_ids:
        console.print("The two outputs differ. `dynatree audit` shows where and by what margin.", style="bold red")
        return 1
    return 0


def _complete(
    client: Client, options: argparse.Namespace, policy: str | None, settings: dict[str, float]
) -> Completion:
    return client.generate(
        options.prompt,
        max_new_tokens=options.max_new_tokens,
        policy=policy,
        policy_settings=settings,
        ignore_eos=True,
    )


def _summary(drafted: Completion, plain: Completion) -> Table:
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
    """Mean time of a round, from the first token to the last."""
    return (stats.total_seconds - stats.time_to_first_token_seconds) / max(1, stats.rounds)


def _breakdown(stats: Statistics) -> Table:
    table = Table(title=f"time per round, {stats.rounds} rounds")
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
