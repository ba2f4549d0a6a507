"""Tests of models whose attention is more than softmax over all earlier tokens, through both services."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from dynatree.client import Client
from tests.support.door import saved
from tests.support.families import tiny_config, tiny_model
from tests.support.processes import wait_until
from tests.support.services import running_services

# Windows and chunks are shorter than the trees are deep, so that a node does not see all of its ancestors.
MODELS = {
    "sinks and windows": ("gpt_oss", {"sliding_window": 4}),
    "chunks": ("llama4_text", {"attention_chunk_size": 5}),
    "capped scores": ("gemma2", {"sliding_window": 5}),
    "layers of different sizes": ("gemma4_text", {"sliding_window": 6, "num_kv_shared_layers": 2}),
    "keys and values of different sizes": ("deepseek_v3", {}),
}
POLICIES = (
    ("fixed", {"depth": 7, "breadth": 2, "tau": 0}),
    ("dynatree", {"tau": 0, "rho_stop": 1e-9, "rho_deep": 1e-6}),
)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each == "sinks and windows" else pytest.mark.long) for each in MODELS]
)
def test_output_equals_that_of_generate(tmp_path, name):
    family, changes = MODELS[name]
    path = saved(tiny_model(tiny_config(family, **changes)), tmp_path / "model")
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    chooser = random.Random(0)
    with running_services(tmp_path, path, path, dtype="float32") as services, Client(services.draft_address) as client:
        for length, count in ((3, 40), (120, 30)):
            prompt = chooser.choices(range(2, 2000), k=length)
            with torch.inference_mode():
                ids = torch.tensor([prompt])
                right = plain.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
            for policy, settings in POLICIES:
                completion = client.generate(
                    prompt, max_new_tokens=count, policy=policy, policy_settings=settings, ignore_eos=True, trace=True
                )
                assert list(completion.token_ids) == right[0, length:].tolist()
                assert len(completion.trace) < count / 3, "the draft is the target, so most of its guesses are right"


@pytest.mark.long
def test_output_far_beyond_a_window_equals_that_of_generate(tmp_path):
    """The memory of what lies below the windows is returned, and prefixes of earlier requests are reused or not."""
    config = tiny_config("gemma3_text", sliding_window=24, max_position_embeddings=2048)
    path = saved(tiny_model(config), tmp_path / "model")
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    chooser = random.Random(1)
    prompt = chooser.choices(range(2, 2000), k=700)
    with running_services(tmp_path, path, path, dtype="float32") as services, Client(services.draft_address) as client:
        for _ in range(3):
            with torch.inference_mode():
                ids = torch.tensor([prompt])
                right = plain.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=330)
            completion = client.generate(prompt, max_new_tokens=330, ignore_eos=True)
            assert list(completion.token_ids) == right[0, len(prompt) :].tolist()
            # the next turn of this conversation; at last, another one from the middle of the first prompt
            turn = chooser.choices(range(2, 2000), k=9)
            prompt = [*prompt, *completion.token_ids, *turn] if len(prompt) == 700 else [*prompt[:400], *turn]


def test_the_prompt_of_a_long_answer_is_reused(tmp_path):
    """In 16 bits, where passes of other sizes may have other bits, sessions leave their prompts alone to others."""
    config = tiny_config("olmo3", sliding_window=24, max_position_embeddings=2048)
    path = saved(tiny_model(config), tmp_path / "model")
    prompt = random.Random(1).choices(range(2, 2000), k=400)
    with running_services(tmp_path, path, path, dtype="bfloat16") as services, Client(services.draft_address) as client:
        first = client.generate(prompt, max_new_tokens=330, ignore_eos=True)
        wait_until(lambda: services.sessions == 0)
        turn = client.generate([*prompt, *first.token_ids, 7], max_new_tokens=5, ignore_eos=True)
    assert turn.stats.cached_tokens >= 399
