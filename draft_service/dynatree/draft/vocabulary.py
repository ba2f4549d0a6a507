"""The bytes of every token: what a client needs to write tokens down one by one."""

from __future__ import annotations

import json
import re

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a token of byte fallback


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    """The bytes that each token adds to a text, by its id; empty where no token has the id.

    A special token's are those of its name. A byte-level tokenizer's tokens are spelt in characters that stand for
    bytes; any other's text is what decoding it behind another token adds.
    """
    vocabulary = tokenizer.get_vocab()
    added = {id_: token.content for id_, token in tokenizer.added_tokens_decoder.items()}
    spelt = _byte_spelling() if _is_byte_level(tokenizer) else None
    anchor = next((id_ for token, id_ in vocabulary.items() if token.isalpha() and token.isascii()), None)
    tokens = [b""] * (max(vocabulary.values()) + 1)
    for token, id_ in vocabulary.items():
        if id_ in added:
            tokens[id_] = added[id_].encode()
        elif spelt is not None and all(character in spelt for character in token):
            tokens[id_] = bytes(spelt[character] for character in token)
        elif match := _BYTE.fullmatch(token):
            tokens[id_] = bytes.fromhex(match[1])
        else:
            tokens[id_] = _text_behind(tokenizer, anchor, id_).encode()
    return tokens


def _byte_spelling() -> dict[str, int]:
    """The byte that each character stands for in a byte-level tokenizer's tokens."""
    characters: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
    return {character: byte for byte, character in characters.items()}


def _is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is not None and '"ByteLevel"' in json.dumps(json.loads(backend.to_str())["decoder"])


def _text_behind(tokenizer: PreTrainedTokenizerBase, anchor: int | None, id_: int) -> str:
    """The text of a token that does not begin the text, where tokenizers leave a space out."""
    before = [] if anchor is None else [anchor]
    start = str(tokenizer.decode(before, clean_up_tokenization_spaces=False))
    text = str(tokenizer.decode([*before, id_], clean_up_tokenization_spaces=False))
    return text[len(start) :] if text.startswith(start) else str(tokenizer.decode([id_]))
