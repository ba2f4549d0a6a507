"""`dynatree demo`: starts both services, streams one completion, and compares it with plain decoding."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from dynatree.cli.arguments import add_policy_settings
from dynatree.cli.checks import check_pair, check_policy
from dynatree.common.model_info import NO_MODEL
from dynatree.engine.settings import DTYPES

if TYPE_CHECKING:
    from dynatree.client import Client, Completion

PROMPT = "It was a dark and stormy night, and the captain"

EXAMPLE = 'dynatree demo --prompt "Once upon a time" --breakdown'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dynatree demo`."""
    parser.add_argument("--prompt", default=PROMPT, help="prompt to complete (default: %(default)r)")
    parser.add_argument(
        "--max-new-tokens",
        type=_at_least_two,
        default=128,
        metavar="N",
        help="number of tokens to generate, at least 2 (default: %(default)s)",
    )
    for role, what in (("target", "large model, whose output is produced"), ("draft", "small model, which drafts")):
        parser.add_argument(
            f"--{role}-model",
            default="embedded",
            metavar="embedded|PATH|HUB_ID",
            help=f"{what} (default: %(default)s, the bundled one)",
        )
    parser.add_argument("--policy", metavar="NAME", help="policy that grows the trees (default: the service's)")
    add_policy_settings(parser)
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", *DTYPES],
        help="data type of both models (default: the checkpoint's)",
    )
    parser.add_argument("--breakdown", action="store_true", help="also show the time of each part of a round")


def _at_least_two(text: str) -> int:
    """An argparse type: a whole number of at least 2, since the prefill yields the first token without a round."""
    number = int(text)
    if number < 2:
        raise argparse.ArgumentTypeError(f"{text} is too small; expected at least 2")
    return number


def run(options: argparse.Namespace) -> int:
    """Show one completion, and compare it with plain decoding; return the exit status, 1 if the outputs differ.

    Raises:
        StartupError: The command line is wrong, as found before the models load.
    """
    check_policy(options.policy, options.policy_settings, has_model=options.draft_model != NO_MODEL)
    check_pair(options.target_model, options.draft_model)

    from rich.console import Console

    from dynatree.cli.demo_tables import breakdown, summary
    from dynatree.cli.serve import pair_settings
    from dynatree.cli.service_pair import service_pair

    console = Console(highlight=False)
    models = options.target_model, options.draft_model
    # the prompt is completed several times
    settings = pair_settings(*models, dtype=options.dtype, prefix_cache="off", history_tokens=0)
    with service_pair(*settings) as pair:
        client = pair.client
        info = client.model_info()
        console.print(f"target {info.target.name}, draft {info.draft.name}, on {info.target.device}\n", markup=False)
        _complete(client, options, "autoregressive", {})  # warm-up of the target
        _complete(client, options, options.policy, options.policy_settings)  # warm-up of the draft
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
    console.print(summary(drafted, plain))
    if options.breakdown:
        console.print(breakdown(drafted.stats))
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
