"""Drafts of a tokenizer that is not the target's."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dynatree.draft.text.translation import Overlap, Translation


class Letters:
    """Stands in for a tokenizer whose tokens are single letters; the last one stands for all others."""

    def __init__(self, letters: str) -> None:
        self._letters = letters

    def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
        unknown = len(self._letters) - 1
        return {"input_ids": [self._letters.find(letter) % (unknown + 1) for letter in text]}

    @staticmethod
    def translation(target: str, draft: str) -> Translation:
        """Return the translation between a target's and a draft's tokenizer, each given by its letters."""
        return Translation(
            draft_ids=[draft.find(letter) for letter in target],
            target_bytes=[letter.encode() for letter in target],
            draft_bytes=[letter.encode() for letter in draft],
            special={},
            begin=None,
            drops_space=False,
            adds_space=False,
            prefix=(),
            first=0,
            overlap=Overlap(1.0, 1.0),
            target=Letters(target),
            fingerprint="",
            _draft=Letters(draft),
            _byte_ids={},
        )


def save_renumbered(folder: Path, model: Path, *, dropped: int, seed: int = 1) -> Path:
    """Save a model whose ordinary tokens have other ids, and whose tokenizer lacks the `dropped` last merges."""
    copy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    PreTrainedTokenizerFast.from_pretrained(model).save_pretrained(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    bpe, special = content["model"], {each["id"] for each in content["added_tokens"]}
    ordinary = [id_ for id_ in bpe["vocab"].values() if id_ not in special]
    moved = dict(zip(ordinary, random.Random(seed).sample(ordinary, len(ordinary)), strict=True))
    kept = len(bpe["merges"]) - dropped
    missing = {"".join(pair) for pair in bpe["merges"][kept:]}
    bpe["merges"] = bpe["merges"][:kept]
    bpe["vocab"] = {token: moved.get(id_, id_) for token, id_ in bpe["vocab"].items() if token not in missing}
    file.write_text(json.dumps(content))
    with torch.no_grad():
        for weight in {each.weight for each in (copy.get_input_embeddings(), copy.get_output_embeddings())}:
            weight[list(moved.values())] = weight[list(moved.keys())].clone()
    copy.save_pretrained(folder)
    return folder


def save_with_tokenizer(folder: Path, model: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Save a model, whose vocabulary is large enough, with a tokenizer."""
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
