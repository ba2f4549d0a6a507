"""The bytes that each token adds to a text, found by the tokenizer's `decode`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a token of byte fallback
_PAIRS = 2**14  # cached pairs of a context and a token, about 4 MB
_EMPTY = 8  # most tokens of a context that have added no bytes yet
# A text that `clean_up_tokenization` changes: it has spaces before punctuation and before English contractions.
_UNCLEAN = "a . b , c ? d ! e ' f do n't I 'm it 's we 've you 're"

Context = tuple[int, ...]


class Vocabulary:
    """The bytes that each token adds to a text, found by decoding the token after a context.

    Decoders work token by token. They treat the first token of a text specially (a leading space is dropped), and some
    look at the previous token (an end-of-word suffix becomes a space). So a context consists of the previous token and,
    before it, an anchor: an ordinary token that puts the pair in the middle of a text. The context at the beginning of
    a text is empty.

    Decoded text does not show bytes that are only part of a character. Those bytes are read from the token's spelling
    in a byte-level tokenizer (one character for each byte) or in byte fallback (`<0xE2>`). A context never ends in such
    a token, so the bytes that a token adds do not depend on whether the bytes before it are valid.

    Args:
        tokenizer: The tokenizer.
        special_tokens: Whether texts include the names of special tokens; else special tokens add nothing.

    Attributes:
        anchor: The context in the middle of a text, after no particular token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._special_tokens = special_tokens
        self._skipped = frozenset() if special_tokens else frozenset(special_ids(tokenizer))
        characters: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
        self._spelling = {character: byte for byte, character in characters.items()}
        self.anchor: Context = next(((id_,) for id_ in range(len(tokenizer)) if self._is_ordinary(id_)), ())
        self.added = lru_cache(_PAIRS)(self._added)
        self._decoded = lru_cache(_EMPTY)(self._decode)  # a vocabulary is read after one context

    def behind(self, token_ids: Sequence[int]) -> Context:
        """The context after a text of these tokens; empty if the tokens have no text."""
        added = (self.added(self.anchor, id_) for id_ in reversed(token_ids))
        return next((context for data, context in added if data), ())

    def text(self, token_id: int) -> str:
        """The text of a single token in the middle of a text; incomplete characters become replacement characters."""
        return self.added(self.anchor, token_id)[0].decode(errors="replace")

    def text_behind(self, token_ids: Sequence[int]) -> str:
        """The text of several tokens in the middle of a text."""
        return self._decode((*self.anchor, *token_ids))[len(self._decode(self.anchor)) :]

    def _added(self, context: Context, token_id: int) -> tuple[bytes, Context]:
        """Return the bytes that a token adds after a context, and the context after the token."""
        if token_id in self._skipped:
            return b"", context
        added = self._decode((*context, token_id))[len(self._decoded(context)) :]
        if REPLACEMENT in added:
            spelt = self._spelt(token_id)
            if spelt.decode(errors="replace") == added:
                return spelt, self.anchor
        if not added:  # no bytes yet: the token's bytes come with a later token
            return b"", (*context[:1], *(*context[1:], token_id)[-_EMPTY:])
        return added.encode(), (*self.anchor, token_id)

    def _decode(self, token_ids: Context) -> str:
        text = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=not self._special_tokens, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def _spelt(self, token_id: int) -> bytes:
        token = str(self._tokenizer.convert_ids_to_tokens(token_id))
        if match := _BYTE.fullmatch(token):
            return bytes.fromhex(match[1])
        return bytes(self._spelling[character] for character in token if character in self._spelling)

    def _is_ordinary(self, token_id: int) -> bool:
        token = str(self._tokenizer.convert_ids_to_tokens(token_id))
        return token_id not in self._skipped and not _BYTE.fullmatch(token) and self._decode((token_id,)).isalnum()


def special_ids(tokenizer: PreTrainedTokenizerBase) -> Iterable[int]:
    """The tokens that `decode` omits with `skip_special_tokens`."""
    if not tokenizer.is_fast:
        return tokenizer.all_special_ids
    return [id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special]


@lru_cache(maxsize=8)
def vocabulary_of(tokenizer: PreTrainedTokenizerBase, *, special_tokens: bool = False) -> Vocabulary:
    """The cached vocabulary of a tokenizer."""
    return Vocabulary(tokenizer, special_tokens=special_tokens)


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    """The bytes that each token adds in the middle of a text, by token id; empty if no token has the id.

    A special token adds the bytes of its name.
    """
    vocabulary = vocabulary_of(tokenizer, special_tokens=True)
    tokens = [b""] * (max(tokenizer.get_vocab().values()) + 1)
    for id_ in tokenizer.get_vocab().values():
        tokens[id_] = vocabulary.added(vocabulary.anchor, id_)[0]
    return tokens


@lru_cache(maxsize=8)
def cleans_up(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether `decode` removes spaces before punctuation by default; found by trying.

    The tokenizer's setting alone is not enough: transformers ignores it for BPE tokenizers.
    """
    if not tokenizer.clean_up_tokenization_spaces:
        return False
    ids = tokenizer(_UNCLEAN, verbose=False)["input_ids"]
    return bool(tokenizer.decode(ids) != tokenizer.decode(ids, clean_up_tokenization_spaces=False))
