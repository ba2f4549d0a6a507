"""`dynatree audit`: greedy output of the two services against transformers' own `generate()`, token for token."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from dynatree.cli.arguments import add_policy_settings
from dynatree.cli.service_pair import service_pair
from dynatree.common import embedded
from dynatree.common.command import positive

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dynatree audit`."""
    parser.add_argument("--target-model", required=True, metavar="embedded|PATH|HUB_ID")
    parser.add_argument("--draft-model", required=True, metavar="embedded|PATH|HUB_ID")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="one prompt a line, UTF-8 (default: a few of ours)"
    )
    parser.add_argument("--max-new-tokens", type=positive, default=128, metavar="N", help="default: %(default)s")
    parser.add_argument("--policy", help="how trees are grown (default: the service's)")
    add_policy_settings(parser)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="auto", help="as for the services (default: a GPU if any)")


@dataclass(frozen=True)
class Divergence:
    """Where two greedy outputs part: `position` counts new tokens from 0, `margin` is the logits' top-2 gap there."""

    position: int
    ours: int | None
    theirs: int | None
    margin: float


def run(options: argparse.Namespace) -> int:
    """Compare prompt after prompt; exit status 1 at the first divergence."""
    prompts = _prompts(options.prompts)
    flags = ["--dtype", options.dtype, "--device", options.device, "--max-sessions", "1"]
    tokens = 0
    with service_pair(options.target_model, options.draft_model, flags) as pair:
        client = pair.client
        reference = Reference(options.target_model, client.model_info().target.dtype, client.model_info().target.device)
        for number, prompt in enumerate(track(prompts, "prompts", disable=not sys.stdout.isatty()), start=1):
            prompt_ids = reference.encode(prompt)
            count = min(options.max_new_tokens, reference.context - len(prompt_ids))
            if count < 1:
                raise SystemExit(f"prompt {number} has {len(prompt_ids)} tokens, which fills the target's context")
            theirs = reference.generate(prompt_ids, count)
            ours = client.generate(
                prompt_ids, max_new_tokens=count, policy=options.policy, policy_settings=options.policy_settings
            ).token_ids
            divergence = reference.divergence(prompt_ids, ours, theirs)
            if divergence:
                print(f"DIFFERENT at new token {divergence.position} of prompt {number} of {len(prompts)}: {prompt!r}")
                print(f"  DynaTree      {reference.describe(divergence.ours)}")
                print(f"  transformers  {reference.describe(divergence.theirs)}")
                print(f"  top-2 margin of transformers' logits there: {divergence.margin:.3g}")
                return 1
            tokens += len(theirs)
    print(f"EQUAL: {len(prompts)} prompts, {tokens} tokens, no divergence")
    return 0


class Reference:
    """The target as transformers runs it by itself."""

    def __init__(self, model: str, dtype: str, device: str) -> None:
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        path = str(embedded.target_path()) if model == embedded.NAME else model
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path)
        loader: Any = AutoModelForCausalLM  # its annotations do not admit what from_pretrained returns
        self._model = loader.from_pretrained(path, dtype=getattr(torch, dtype)).to(device)
        self.context: int = self._model.config.get_text_config().max_position_embeddings

    def encode(self, prompt: str) -> list[int]:
        """The prompt's token ids."""
        ids: list[int] = self._tokenizer(prompt)["input_ids"]
        return ids

    @torch.inference_mode()
    def generate(self, prompt_ids: Sequence[int], count: int) -> list[int]:
        """`generate(do_sample=False)`: the new tokens."""
        prompt = torch.tensor([list(prompt_ids)], device=self._model.device)
        output = self._model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=count, pad_token_id=0
        )
        tokens: list[int] = output[0, len(prompt_ids) :].tolist()
        return tokens

    @torch.inference_mode()
    def divergence(self, prompt_ids: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> Divergence | None:
        """The first position at which two outputs differ, if any."""
        length = min(len(ours), len(theirs))
        position = next((i for i in range(length) if ours[i] != theirs[i]), length)
        if position == len(ours) == len(theirs):
            return None
        context = torch.tensor([[*prompt_ids, *theirs[:position]]], device=self._model.device)
        top = self._model(context).logits[0, -1].float().topk(2).values
        token = [output[position] if position < len(output) else None for output in (ours, theirs)]
        return Divergence(position, token[0], token[1], (top[0] - top[1]).item())

    def describe(self, token: int | None) -> str:
        """A token's id and text."""
        return "ended" if token is None else f"{token} {self._tokenizer.decode([token])!r}"


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
