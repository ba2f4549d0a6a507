"""`dynatree audit`: compares the services' greedy output with transformers' own `generate()`, token by token."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dynatree.cli.arguments import add_policy_settings, device, positive
from dynatree.cli.checks import check_pair, check_policy
from dynatree.cli.gpus import check_device
from dynatree.common.model_info import NO_MODEL
from dynatree.engine.settings import DTYPES

if TYPE_CHECKING:
    from dynatree.cli.reference import Reference

PROMPTS = (
    "It was a dark and stormy night, and the captain",
    "My dear sister, I write to you in haste, for",
    "The origin of the species that we find upon these islands",
    "“I cannot allow it,” said the doctor;",
    "Chapter the first, in which",
    "There was no possibility of",
    "The",
    "1, 2, 3, 4, 5,",
)

EXAMPLE = "dynatree audit --target-model ~/models/llama-8b --draft-model ~/models/llama-1b"

# The fewest and the most tokens of the long prompt. To test a longer attention window, give a file of longer prompts.
LONG_TOKENS = (300, 2048)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dynatree audit`."""
    for role, what in (("target", "large model, whose output is checked"), ("draft", "small model, which drafts")):
        parser.add_argument(f"--{role}-model", required=True, metavar="embedded|PATH|HUB_ID", help=what)
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="UTF-8 file of prompts, one per line (default: built-in prompts)"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=positive,
        default=128,
        metavar="N",
        help="number of tokens to compare for each prompt (default: %(default)s)",
    )
    parser.add_argument("--policy", metavar="NAME", help="policy that grows the trees (default: the service's)")
    add_policy_settings(parser)
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", *DTYPES],
        help="data type of both models, in the services and in transformers (default: the checkpoint's)",
    )
    parser.add_argument(
        "--device", type=device, default="auto", help="torch device; auto is a GPU if there is one (default: auto)"
    )


def run(options: argparse.Namespace) -> int:
    """Compare the outputs of all prompts; return the exit status, which is 1 at the first divergence.

    Raises:
        StartupError: The command line is wrong, as found before the models load.
    """
    prompts = _prompts(options.prompts)
    check_policy(options.policy, options.policy_settings, has_model=options.draft_model != NO_MODEL)
    check_device("--device", options.device)
    check_pair(options.target_model, options.draft_model)

    from rich.progress import track

    from dynatree.cli.reference import Reference
    from dynatree.cli.serve import pair_settings
    from dynatree.cli.service_pair import service_pair

    models = options.target_model, options.draft_model
    settings = pair_settings(*models, dtype=options.dtype, device=options.device, max_sessions=1)
    tokens = 0
    with service_pair(*settings) as pair:
        client = pair.client
        reference = Reference(options.target_model, client.model_info().target.dtype, client.model_info().target.device)
        encoded = [reference.encode(prompt) for prompt in prompts]
        if options.prompts is None:
            encoded.append(_long_prompt(encoded, reference))
        for number, prompt_ids in enumerate(track(encoded, "prompts", disable=not sys.stdout.isatty()), start=1):
            count = min(options.max_new_tokens, reference.context - len(prompt_ids))
            if count < 1:
                raise SystemExit(
                    f"prompt {number} has {len(prompt_ids)} tokens, "
                    f"expected fewer than the target's context of {reference.context}"
                )
            theirs = reference.generate(prompt_ids, count)
            ours = client.generate(
                prompt_ids, max_new_tokens=count, policy=options.policy, policy_settings=options.policy_settings
            ).token_ids
            divergence = reference.divergence(prompt_ids, ours, theirs)
            if divergence:
                prompt = reference.text(prompt_ids)
                print(f"DIFFERENT at new token {divergence.position} of prompt {number} of {len(encoded)}: {prompt!r}")
                print(f"  DynaTree      {reference.describe(divergence.ours)}")
                print(f"  transformers  {reference.describe(divergence.theirs)}")
                print(f"  top-2 margin of transformers' logits there: {divergence.margin:.3g}")
                return 1
            tokens += len(theirs)
    print(f"EQUAL: {len(encoded)} prompts, {tokens} tokens, no divergence")
    return 0


def _long_prompt(encoded: Sequence[Sequence[int]], reference: Reference) -> list[int]:
    """Repeat the short prompts beyond every attention window of the target's configuration, within `LONG_TOKENS`."""
    together = [token for prompt in encoded for token in prompt]
    longest = max([LONG_TOKENS[0], *reference.spans])
    length = min(longest, LONG_TOKENS[1], reference.context // 2) + 1
    return (together * (length // len(together) + 1))[:length]


def _prompts(file: Path | None) -> Sequence[str]:
    if file is None:
        return PROMPTS
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise SystemExit(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SystemExit(f"{file} is not UTF-8: {error.reason} at byte {error.start}") from None
    if not lines:
        raise SystemExit(f"{file} has no prompts; expected one on each line")
    return lines
