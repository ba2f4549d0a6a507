"""Models with recurrent layers under all policies, against `generate()`: `python -m tests.campaigns.recurrent_matrix`.

A tiny model of each family is served in float32 through both services. Its draft attends, and proposes four tokens, as
half of the requests ask, so that trees of every form are accepted and rejected. Prints a JSON line for each family.
With `--int8`, the target has rounded weights in bfloat16, and its own plain decoding stands for `generate()`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessor, PreTrainedModel

from dynatree.client import Client
from dynatree.draft.policies import policy_names
from dynatree.engine.adapters.registry import RECURRENT
from dynatree.engine.sampling.gumbel import gumbel
from tests.support.door import saved
from tests.support.families import VOCAB_SIZE, tiny_config, tiny_model
from tests.support.services import running_services

FEW = {token: 12.0 + token % 2 for token in range(100, 104)}  # bias towards four tokens, which drafts then often guess
PROMPTS, NEW = 12, 60  # tokens; the context of a tiny model is 256
LENGTHS = (1, 2, 3, 5, 17, 40, 63, 64, 65, 90, 129, 190)  # around the chunk of 64 tokens
SMALL = {"max_nodes": 24.0}
SETTINGS: dict[str, dict[str, float]] = {
    "fixed": {"depth": 4, "breadth": 3, "tau": 0},
    "linear": {"depth": 6},
    "ngram": {"shortest": 1},
    "throughput": {"shortest": 1},
    "hybrid": {"shortest": 1, **SMALL},
    **dict.fromkeys(("dyspec", "dyspec-threshold", "opt-tree", "sequoia"), SMALL),
}


class _Noise(LogitsProcessor):
    """Adds the noise of a seed, so that the likeliest token is the sampled one."""

    def __init__(self, seed: int, temperature: float) -> None:
        self._seed, self._temperature = seed, temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores / self._temperature + gumbel(self._seed, input_ids.shape[1], VOCAB_SIZE)


def requests(count: int) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Yield prompts with the client's options: greedy and seeded, of all tokens and of few."""
    for number in range(count):
        chooser = random.Random(number)
        few = number % 2 == 0
        prompt = chooser.choices(list(FEW) if few else range(2, VOCAB_SIZE), k=LENGTHS[number % len(LENGTHS)])
        options: dict[str, Any] = {"logit_bias": FEW} if few else {}
        if number % 4 > 1:
            options |= {"temperature": chooser.choice([0.5, 1.0]), "seed": chooser.getrandbits(64)}
        yield prompt, options


@torch.inference_mode()
def generated(
    model: PreTrainedModel,
    prompt: Sequence[int],
    new: int = NEW,
    *,
    logit_bias: dict[int, float] | None = None,
    temperature: float = 0.0,
    seed: int = 0,
) -> tuple[int, ...]:
    """Return the new tokens of `generate()`, beyond any end token."""
    ids = torch.tensor([prompt])
    model.generation_config.eos_token_id = None
    options: dict[str, Any] = {"logits_processor": [_Noise(seed, temperature)] if temperature else []}
    if logit_bias:
        options["sequence_bias"] = {(token,): bias for token, bias in logit_bias.items()}
    generate: Callable[..., Tensor] = model.generate  # type: ignore[assignment]
    text = generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, pad_token_id=0, **options
    )
    return tuple(text[0, len(prompt) :].tolist())


def saved_pair(family: str, folder: Path) -> tuple[Path, Path]:
    """Save a tiny target of a family, and a draft that attends."""
    models = []
    for name, seed in ((family, 0), ("llama", 1)):
        config = tiny_config(name)
        for each in (config, config.get_text_config()):  # tied ones would follow most tokens by the same one
            each.tie_word_embeddings = False
        models.append(saved(tiny_model(config, seed), folder / name))
    return models[0], models[1]


def compare(
    family: str, folder: Path, policies: Sequence[str], prompts: int, new: int = NEW, *, int8: bool = False
) -> dict[str, Any]:
    """Compare the tokens of a family's tiny model under policies with those of `generate()`.

    With `int8`, compare rounded weights in bfloat16 with plain decoding by the same services.
    """
    target, draft = saved_pair(family, folder)
    every = list(requests(prompts))
    dtype, weights = ("bfloat16", "int8") if int8 else ("float32", "auto")
    right: list[tuple[int, ...]] = []
    if not int8:
        plain = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager")
        right = [generated(plain, prompt, new, **options) for prompt, options in every]
    result: dict[str, Any] = {"family": family, "completions": 0, "tokens": 0, "wrong": [], "distinct": 0}
    result["accepted"] = dict.fromkeys(policies, 0)
    with (
        running_services(folder, target, draft, dtype=dtype, weights=weights, prefix_cache=False) as services,
        Client(services.draft_address) as client,
    ):
        right = right or [
            tuple(
                client.generate(
                    prompt, max_new_tokens=new, policy="autoregressive", ignore_eos=True, **options
                ).token_ids
            )
            for prompt, options in every
        ]
        result["distinct"] = len({token for text in right for token in text})
        for policy in policies:
            for number, ((prompt, options), expected) in enumerate(zip(every, right, strict=True)):
                completion = client.generate(
                    prompt,
                    max_new_tokens=new,
                    policy=policy,
                    policy_settings=SETTINGS.get(policy),
                    ignore_eos=True,
                    **options,
                )
                result["completions"] += 1
                result["tokens"] += len(expected)
                result["accepted"][policy] += completion.stats.draft_n_accepted
                if completion.token_ids != expected:
                    pairs = enumerate(zip(completion.token_ids, expected, strict=False))
                    place = next((place for place, (a, b) in pairs if a != b), len(completion.token_ids))
                    result["wrong"].append(f"{policy}, prompt {number}: from token {place} on")
    return result


def main() -> int:
    """Compare all families; return 1 if any token is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="default: all with recurrent layers")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="default: %(default)s")
    parser.add_argument("--int8", action="store_true", help="round the targets' weights to 8 bits")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the models are too small for more
    wrong = 0
    for family in options.families or sorted(RECURRENT):
        with tempfile.TemporaryDirectory() as folder:
            result = compare(family, Path(folder), policy_names(), options.prompts, int8=options.int8)
        print(json.dumps(result), flush=True)
        wrong += len(result["wrong"])
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
