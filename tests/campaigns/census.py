"""Which families are served, and with the right tokens? `python -m tests.campaigns.census [FAMILY ...]`.

A tiny model of every family in the installed transformers is loaded as real models are, and its next tokens are
compared with transformers' own. `--write` puts the results into docs/reference/families.md. With `--services`, text of
the families that the page lists as served comes from both services, and is compared with that of `generate()`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from dynatree.client import Client
from dynatree.engine.adapters.registry import RECURRENT
from dynatree.engine.model.composite import loader_of
from tests.support.census import DTYPES, outcomes, row_of, shown, write
from tests.support.door import saved
from tests.support.families import FAMILIES, VOCAB_SIZE, tiny_config, tiny_model
from tests.support.model_zoo import add_noise
from tests.support.services import running_services

POLICIES = {"fixed": {"depth": 7, "breadth": 2, "tau": 0}, "dynatree": {"tau": 0, "rho_stop": 1e-9, "rho_deep": 1e-6}}
NOISE = 0.05  # of the draft; it guesses most tokens of most families
PROMPT, NEW = 40, 60  # tokens; windows, chunks and selected keys of tiny models have 16 to 32


def load_all(families: Sequence[str], dtypes: Sequence[str], writes: bool) -> bool:
    """Load the families in each dtype; return whether all tokens are right."""
    rows = {}
    counts: Counter[str] = Counter()
    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            for dtype, found in outcomes(family, Path(folder), dtypes):
                rows.setdefault(family, row_of(found))
                how = "wrong" if found.wrong else "served" if found.refusal is None else "refused"
                counts[how] += 1
                tokens = f"{found.wrong} of {found.compared} tokens wrong"
                print(f"{family} {dtype}: {how}, {found.refusal or tokens}", flush=True)
    print(", ".join(f"{count} {how}" for how, count in sorted(counts.items())))
    if writes:
        write(rows if set(families) == set(FAMILIES) else shown() | rows)
    return not counts["wrong"]


def through_services(family: str, folder: Path) -> dict[str, Any]:
    """Compare text of a family's tiny model, drafted by a noisy copy, with that of `generate()`.

    A model with recurrent layers is no draft: another one guesses, which is seldom right (but see `recurrent_matrix`).
    """
    began = time.monotonic()
    config = tiny_config(family)
    for each in (config, config.get_text_config()):  # tied ones would follow most tokens by the same one
        each.tie_word_embeddings = False
    model = tiny_model(config)
    target = saved(model, folder / "target")
    if config.get_text_config().model_type in RECURRENT:
        model = tiny_model(tiny_config("llama"))
    else:
        add_noise(model, seed=2, noise=NOISE)
    draft = saved(model, folder / "draft")
    plain = loader_of(config).from_pretrained(target, dtype=torch.float32, attn_implementation="eager").eval()
    prompt = random.Random(family).choices(range(2, VOCAB_SIZE), k=PROMPT)
    right = generated(plain, prompt)
    result: dict[str, Any] = {"family": family, "tokens": 0, "equal": True, "distinct": len(set(right)), "accepted": 0}
    with (
        running_services(folder, target, draft, dtype="float32", sessions=1) as services,
        Client(services.draft_address) as client,
    ):
        for policy, settings in POLICIES.items():
            completion = client.generate(
                prompt, max_new_tokens=NEW, policy=policy, policy_settings=settings, ignore_eos=True
            )
            ours = list(completion.token_ids)
            result["tokens"] += len(right)
            result["accepted"] += completion.stats.draft_n_accepted
            if ours != right:
                result["equal"] = False
                result[policy] = difference(plain, prompt, ours, right)
    return result | {"seconds": round(time.monotonic() - began, 1)}


@torch.inference_mode()
def generated(model: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    """Return the greedy text of transformers, beyond any end token."""
    ids = torch.tensor([prompt])
    model.generation_config.eos_token_id = None
    text = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW)  # type: ignore[operator]
    return text[0, len(prompt) :].tolist()


@torch.inference_mode()
def difference(model: PreTrainedModel, prompt: Sequence[int], ours: Sequence[int], right: Sequence[int]) -> str:
    """Say where two texts part, and how far apart the whole sequence's logits of both tokens are."""
    where = next((place for place, pair in enumerate(zip(ours, right, strict=False)) if len(set(pair)) > 1), None)
    if where is None:
        return f"{len(ours)} tokens, expected {len(right)}"
    logits = model(torch.tensor([[*prompt, *right[:where]]]), use_cache=False).logits[0, -1]
    apart = (logits[right[where]] - logits[ours[where]]).item()
    return f"token {where}: {ours[where]}, expected {right[where]}, whose logit is {apart:.3g} higher"


def serve_all(families: Sequence[str]) -> bool:
    """Print a JSON line for each family, and one of counts; return whether all texts are equal."""
    counts: Counter[str] = Counter()
    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            result = through_services(family, Path(folder))
        print(json.dumps(result), flush=True)
        counts += Counter(families=1, equal=int(result["equal"]), tokens=result["tokens"])
    print(json.dumps(counts))
    return counts["equal"] == counts["families"]


def main() -> int:
    """Take the census; return 1 if any token is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="default: all")
    parser.add_argument("--dtype", choices=DTYPES, help="default: both")
    parser.add_argument("--write", action="store_true", help="put the table into docs/reference/families.md")
    parser.add_argument("--services", action="store_true", help="compare text of both services, in float32")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the models are too small for more
    if options.services:
        served = [family for family, row in sorted(shown().items()) if not row.reason]
        return int(not serve_all(options.families or served))
    return int(not load_all(options.families or FAMILIES, [options.dtype] if options.dtype else DTYPES, options.write))


if __name__ == "__main__":
    sys.exit(main())
