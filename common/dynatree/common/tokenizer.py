"""Tokenizers: loading, and the fingerprint by which two services know that they share one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dynatree.common.errors import StartupError


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a hub name or local path.

    Raises:
        StartupError: There is none, or it cannot be read.
    """
    check_folder(model)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and its backends' own types here
        raise StartupError(f"no tokenizer could be loaded for model {model!r}: {first_line(error)}") from error
    return tokenizer


def check_folder(model: str) -> None:
    """Refuse a path at which nothing is, before it is taken for a name on the hub (`NAME` or `OWNER/NAME`).

    Raises:
        StartupError: Nothing is there.
    """
    path = Path(model)
    if (path.is_absolute() or model.startswith((".", "~")) or len(path.parts) > 2) and not path.exists():
        raise StartupError(f"there is no model at {model}")


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256, in hexadecimal, over the sorted (token, id) pairs, added tokens included."""
    pairs = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(pairs, ensure_ascii=True).encode()).hexdigest()


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
