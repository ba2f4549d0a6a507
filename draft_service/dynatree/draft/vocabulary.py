"""What tokens add to a text, in bytes: the tokenizer's `decode`, token by token."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a token of byte fallback
_PAIRS = 2**14  # tokens behind others whose bytes are kept: about 4 MB
_EMPTY = 8  # tokens that have added nothing yet and that a context has at most
# Text that `clean_up_tokenization` changes: it has spaces before punctuation and before English contractions.
_UNCLEAN = "a . b , c ? d ! e ' f do n't I 'm it 's we 've you 're"

Context = tuple[int, ...]


class Vocabulary:
    """The bytes that each token adds to a text, by what `decode` makes of it behind a context.

    Decoders work token by token. They treat the first token of a text in its own way (a leading space is dropped), and
    some look at the token before (an end-of-word suffix becomes a space). So a context is the token before and, ahead
    of it, an anchor: an ordinary token that makes it the middle of a text. The context of a text's beginning is empty.

    Bytes that are a part of a character cannot be seen in decoded text. They are read from the token's spelling, which
    is that of a byte-level tokenizer (one character for each byte) or of byte fallback (`<0xE2>`). A context never ends
    in such a token, so what a token adds does not depend on whether the bytes before it are valid.

    Args:
        tokenizer: The tokenizer.
        special_tokens: Whether texts have the names of special tokens; else these add nothing.

    Attributes:
        anchor: The context of a text's middle, behind no token in particular.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._special_tokens = special_tokens
        self._skipped = frozenset() if special_tokens else frozenset(_special_ids(tokenizer))
        characters: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
        self._spelling = {character: byte for byte, character in characters.items()}
        self.anchor: Context = next(((id_,) for id_ in range(len(tokenizer)) if self._is_ordinary(id_)), ())
        self.added = lru_cache(_PAIRS)(self._added)

    def behind(self, token_ids: Sequence[int]) -> Context:
        """The context behind a text of these tokens; empty where they have no text."""
        added = (self.added(self.anchor, id_) for id_ in reversed(token_ids))
        return next((context for data, context in added if data), ())

    def text(self, token_id: int) -> str:
        """A token's own text in the middle of a text; not always whole characters."""
        return self.added(self.anchor, token_id)[0].decode(errors="replace")

    def _added(self, context: Context, token_id: int) -> tuple[bytes, Context]:
        """The bytes that a token adds behind a context, and the context behind it."""
        if token_id in self._skipped:
            return b"", context
        added = self._decode((*context, token_id))[len(self._decode(context)) :]
        if REPLACEMENT in added:
            spelt = self._spelt(token_id)
            if spelt.decode(errors="replace") == added:
                return spelt, self.anchor
        if not added:  # nothing yet: the token counts once the next is there
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


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> Iterable[int]:
    """The tokens that `decode` leaves out with `skip_special_tokens`."""
    if not tokenizer.is_fast:
        return tokenizer.all_special_ids
    return [id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special]


@lru_cache(maxsize=8)
def vocabulary_of(tokenizer: PreTrainedTokenizerBase, *, special_tokens: bool = False) -> Vocabulary:
    """The vocabulary of a tokenizer, made once."""
    return Vocabulary(tokenizer, special_tokens=special_tokens)


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    """The bytes that each token adds in the middle of a text, by its id; empty where no token has the id.

    A special token's are those of its name.
    """
    vocabulary = vocabulary_of(tokenizer, special_tokens=True)
    tokens = [b""] * (max(tokenizer.get_vocab().values()) + 1)
    for id_ in tokenizer.get_vocab().values():
        tokens[id_] = vocabulary.added(vocabulary.anchor, id_)[0]
    return tokens


@lru_cache(maxsize=8)
def cleans_up(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether `decode` removes spaces before punctuation unless it is told not to; found by trying.

    The tokenizer's setting alone does not tell: transformers ignores it for BPE tokenizers.
    """
    if not tokenizer.clean_up_tokenization_spaces:
        return False
    ids = tokenizer(_UNCLEAN, verbose=False)["input_ids"]
    return bool(tokenizer.decode(ids) != tokenizer.decode(ids, clean_up_tokenization_spaces=False))
