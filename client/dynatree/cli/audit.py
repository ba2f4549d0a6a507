"""`dynatree audit`: compares the services' greedy output with a reference, token by token.

The reference is transformers' own `generate()`. For a target with quantised weights, the reference is plain decoding
through the services, and the distance from the dequantised weights in float32 is reported.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynatree.cli.arguments import add_policy_settings, device, positive
from dynatree.cli.checks import check_pair, check_policy
from dynatree.cli.gpus import check_device
from dynatree.cli.service_arguments import add_draft_weights, context
from dynatree.common.model_info import NO_MODEL
from dynatree.engine.settings import DTYPES, WEIGHTS

if TYPE_CHECKING:
    from dynatree.cli.reference import Reference
    from dynatree.client import Client

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
    metavar = "embedded|PATH|HUB_ID"
    parser.add_argument("--target-model", required=True, metavar=metavar, help="large model, whose output is checked")
    parser.add_argument("--draft-model", required=True, metavar=f"{metavar}|none", help="small model, which drafts")
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
        "--weights",
        default="auto",
        choices=["auto", *WEIGHTS],
        help="round both models' weights to 8 or 4 bits (default: auto, as the checkpoints have them)",
    )
    add_draft_weights(parser)
    parser.add_argument("--max-context", type=context, metavar="N", help="longest context to serve, in tokens")
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

    chosen = {name: getattr(options, name) for name in ("dtype", "weights", "draft_weights", "device", "max_context")}
    # each prompt is completed several times, and only the first time would have trees of the draft model
    chosen |= {"max_sessions": 1, "history_tokens": 0}
    settings = pair_settings(options.target_model, options.draft_model, **chosen)
    audit = _Audit(options, len(prompts) + (options.prompts is None))
    with service_pair(*settings) as pair:
        info = pair.client.model_info().target
        reference = Reference(settings[0].model, info.dtype, info.device)
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
            if not audit.compare(pair.client, reference, number, prompt_ids, count):
                return 1
    audit.report()
    return 0


class _Audit:
    """The comparisons of all prompts.

    Args:
        options: Options of the command.
        prompts: Number of prompts.
    """

    def __init__(self, options: argparse.Namespace, prompts: int) -> None:
        self._options = options
        self._prompts = prompts
        self._tokens = 0
        self._distances: list[float] = []  # of log-probabilities from those of the dequantised weights
        self._parted: list[str] = []  # where outputs part from those of the dequantised weights

    def compare(self, client: Client, reference: Reference, number: int, prompt_ids: Sequence[int], count: int) -> bool:
        """Complete a prompt and compare the output; print a divergence, and return whether there is none."""
        chosen: dict[str, Any] = {"policy": self._options.policy, "policy_settings": self._options.policy_settings}
        ours = client.generate(prompt_ids, max_new_tokens=count, **chosen).token_ids
        theirs: Sequence[int] = reference.generate(prompt_ids, count)
        program = "transformers"
        if reference.dequantised:
            plain = client.generate(prompt_ids, max_new_tokens=count, policy="autoregressive", log_probs=True)
            pairs = zip(plain.log_probs, reference.log_probs(prompt_ids, plain.token_ids), strict=True)
            self._distances += [abs(one - other) for one, other in pairs]
            if parting := reference.divergence(prompt_ids, plain.token_ids, theirs):
                margin = f"margin {parting.margin:.3g}"
                self._parted.append(f"new token {parting.position} of prompt {number} ({margin})")
            theirs, program = plain.token_ids, "plain decoding"
        self._tokens += len(theirs)
        divergence = reference.divergence(prompt_ids, ours, theirs)
        if divergence is None:
            return True
        print(
            f"DIFFERENT at new token {divergence.position} of prompt {number} of {self._prompts}: "
            f"{reference.text(prompt_ids)!r}"
        )
        width = max(len("DynaTree"), len(program))
        print(f"  {'DynaTree':{width}}  {reference.describe(divergence.ours)}")
        print(f"  {program:{width}}  {reference.describe(divergence.theirs)}")
        print(f"  top-2 margin of transformers' logits there: {divergence.margin:.3g}")
        return False

    def report(self) -> None:
        """Print the result of prompts that were all equal."""
        print(f"EQUAL: {self._prompts} prompts, {self._tokens} tokens, no divergence")
        if self._distances:
            mean, most = sum(self._distances) / len(self._distances), max(self._distances)
            first = f"; the first at {self._parted[0]}" if self._parted else ""
            print(
                f"dequantised weights in float32: log-probabilities differ by {mean:.2g} on average, at most "
                f"{most:.2g}; {len(self._parted)} of {self._prompts} outputs part{first}"
            )


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
