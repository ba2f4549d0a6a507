"""Checks from their files alone whether two checkpoints on this machine can share a tokenizer."""

from __future__ import annotations

import filecmp
import json
from pathlib import Path
from typing import Any

from dynatree import embedded
from dynatree.common.errors import StartupError
from dynatree.engine.model.files import folder_of

_FILE = "tokenizer.json"


def check_vocabularies(target: str, draft: str) -> None:
    """Refuse a draft whose vocabulary certainly differs. Uncertain cases are left to the tokenizer fingerprints.

    Raises:
        StartupError: A token of one model is unknown to the other model, or has a different id there.
    """
    folders = (
        embedded.target_path() if target == embedded.NAME else folder_of(target),
        embedded.draft_path() if draft == embedded.NAME else folder_of(draft),
    )
    targets, drafts = (folder / _FILE if folder else None for folder in folders)
    if not (targets and drafts and targets.exists() and drafts.exists()) or filecmp.cmp(targets, drafts, shallow=False):
        return
    try:
        (target_base, target_all), (draft_base, draft_all) = _vocabulary(targets), _vocabulary(drafts)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return
    other = next((token for token, id_ in target_base.items() if draft_all.get(token) != id_), None)
    if other is None:
        other = next((token for token, id_ in draft_base.items() if target_all.get(token) != id_), None)
    if other is not None:
        names = [each.resolve().parent.name for each in (drafts, targets)]
        raise StartupError(
            f"draft model {names[0]} and target model {names[1]} have different tokenizers: {other!r} is "
            f"{_id(target_all, other)} of the target and {_id(draft_all, other)} of the draft; expected a draft of "
            "the target's family"
        )


def _vocabulary(file: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Return the base vocabulary of a tokenizer, and the vocabulary with all added tokens, from its config file too."""
    content = json.loads(file.read_text(encoding="utf-8"))
    vocab: Any = content["model"]["vocab"]
    base = {token: id_ for id_, (token, _) in enumerate(vocab)} if isinstance(vocab, list) else dict(vocab)
    everything = base | {each["content"]: each["id"] for each in content.get("added_tokens", ())}
    beside = file.parent / "tokenizer_config.json"
    added = json.loads(beside.read_text(encoding="utf-8")).get("added_tokens_decoder", {}) if beside.exists() else {}
    return base, everything | {each["content"]: int(id_) for id_, each in added.items()}


def _id(vocabulary: dict[str, int], token: str) -> str:
    return f"token {vocabulary[token]}" if token in vocabulary else "no token"
