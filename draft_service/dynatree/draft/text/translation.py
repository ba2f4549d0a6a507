"""The tokens that a target and a draft model of another tokenizer share, matched by their bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

from transformers import PreTrainedTokenizerBase

from dynatree.common.errors import StartupError
from dynatree.engine.model.tokenizer import fingerprint
from dynatree.engine.model.vocabulary import special_ids, token_bytes, vocabulary_of

NONE = -1  # in place of the draft's token, for a token of the target that has none
LEAST_SHARE = 0.5  # share of the target's vocabulary below which the pair is doubtful
_PROBE = "Hello, World! I don't\n\tcount 12  or 3.5: naïve 日本語 🙂"
_SAMPLE = """The committee's report, which was published on Tuesday, says that prices rose by 3.4% in a year.
"I don't think so," she answered; nobody had asked for the key, and the door stayed shut all winter.
def mean(values: list[float]) -> float:
    return sum(values) / len(values)  # the values must not be empty
"""
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # a token of byte fallback
_INVALID = re.compile("([\udc80-\udcff]+)")  # bytes that are not UTF-8, as `surrogateescape` decodes them


@dataclass(frozen=True)
class Encoded:
    """Tokens of the draft, and the offset in the text at which each ends; NONE if it is not known."""

    token_ids: list[int]
    ends: list[int]


@dataclass(frozen=True)
class Overlap:
    """Shares of the target's tokens that are tokens of the draft: of its vocabulary, and of the tokens of a sample."""

    vocabulary: float
    sample: float

    @property
    def small(self) -> bool:
        """Whether so few tokens are shared that the pair is doubtful."""
        return self.vocabulary < LEAST_SHARE

    def __str__(self) -> str:
        return (
            f"{self.vocabulary:.0%} of the target's tokens, and {self.sample:.0%} of a sample's, are the draft's too; "
            f"only those are drafted{': expect few accepted tokens' if self.small else ''}"
        )


@dataclass(frozen=True, eq=False)
class Translation:
    """The correspondence of a target's tokens and a draft's, and the draft's encoding of bytes.

    Two tokens correspond if they add the same bytes to a text; each token has at most one counterpart. Special tokens
    have none, except the end-of-text token: on both sides it means that nothing follows.

    Attributes:
        draft_ids: The draft's token for each token of the target, or NONE.
        target_bytes: Bytes of each token of the target.
        draft_bytes: Bytes of each token of the draft.
        special: The special tokens of the target, each with the draft's special token of the same name, or NONE.
        begin: The target's token at the beginning of texts, which the draft's `prefix` replaces; None if it has none.
        drops_space: Whether the target's decoder drops a space at the beginning of a text.
        adds_space: Whether the draft's tokenizer puts a space before each text.
        prefix: Tokens that the draft's tokenizer puts before a text.
        first: The token that the draft reads if a text is empty.
        overlap: Shares of tokens that have a counterpart.
        target: The target's tokenizer.
        fingerprint: Its fingerprint.
    """

    draft_ids: Sequence[int]
    target_bytes: Sequence[bytes]
    draft_bytes: Sequence[bytes]
    special: dict[int, int]
    begin: int | None
    drops_space: bool
    adds_space: bool
    prefix: tuple[int, ...]
    first: int
    overlap: Overlap
    target: PreTrainedTokenizerBase
    fingerprint: str
    _draft: PreTrainedTokenizerBase
    _byte_ids: dict[bytes, int]

    @classmethod
    def of(cls, target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, vocab_size: int) -> Self:
        """Match the tokens of two tokenizers.

        Args:
            target: The target's tokenizer.
            draft: The draft's tokenizer.
            vocab_size: Number of tokens that the draft model embeds.

        Raises:
            StartupError: The tokens of one of the tokenizers do not have the bytes of a text, or none is shared.
        """
        target_bytes, draft_bytes = _checked_bytes(target, "target"), _checked_bytes(draft, "draft")
        names, special = _special(target), _special(draft)
        by_name = {name: id_ for id_, name in special.items() if id_ < vocab_size}
        specials = {id_: by_name.get(name, NONE) for id_, name in names.items()}
        end, draft_end = target.eos_token_id, draft.eos_token_id
        if specials.get(end) == NONE and draft_end in by_name.values() and draft_end not in specials.values():
            specials[end] = draft_end
        of_draft = _by_bytes(draft, draft_bytes[:vocab_size], special.keys())
        draft_ids = [NONE] * len(target_bytes)
        ordinary = _by_bytes(target, target_bytes, names.keys())
        for data, id_ in ordinary.items():
            draft_ids[id_] = of_draft.get(data, NONE)
        shared = sum(id_ != NONE for id_ in draft_ids)
        if not shared:
            raise StartupError("the tokenizers of target and draft share no token; expected a draft for the same text")
        if end in specials:
            draft_ids[end] = specials[end]
        sample = target(_SAMPLE, add_special_tokens=False, verbose=False)["input_ids"]
        found = sum(draft_ids[id_] != NONE for id_ in sample)
        marked, plain = _ids(draft, "a", special_tokens=True), _ids(draft, "a")
        before = next((at for at in range(len(marked)) if marked[at : at + len(plain)] == plain), 0)
        first = next((id_ for id_ in (draft.bos_token_id, draft_end) if id_ is not None), 0)
        return cls(
            draft_ids=draft_ids,
            target_bytes=target_bytes,
            draft_bytes=draft_bytes,
            special=specials,
            begin=target.bos_token_id,
            drops_space=_drops_space(target, target_bytes),
            adds_space=b"".join(draft_bytes[id_] for id_ in plain) == b" a",
            prefix=tuple(marked[:before]),
            first=first,
            overlap=Overlap(shared / len(ordinary), found / len(sample)),
            target=target,
            fingerprint=fingerprint(target),
            _draft=draft,
            _byte_ids={data: id_ for data, id_ in of_draft.items() if len(data) == 1},
        )

    def draft_id(self, token: int) -> int:
        """Return the draft's token for a token of the target, or NONE."""
        return self.draft_ids[token] if token < len(self.draft_ids) else NONE

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token of the target; none for padding of its vocabulary."""
        return self.target_bytes[token] if token < len(self.target_bytes) else b""

    def encoded(self, data: bytes, start: int, *, begins: bool) -> Encoded:
        """Encode a piece of a text with the draft's tokenizer; bytes that are not UTF-8 become tokens of one byte each.

        Args:
            data: The piece.
            start: Its offset in the text.
            begins: Whether the text begins with the piece, so that a space that the tokenizer puts before it is kept.
        """
        token_ids: list[int] = []
        ends: list[int] = []
        for piece in filter(None, _INVALID.split(data.decode("utf-8", "surrogateescape"))):
            raw = piece.encode("utf-8", "surrogateescape")
            if _INVALID.match(piece):
                found = self._encoded_bytes(raw, start)
            else:
                found = self._encoded(piece, start, begins=begins)
            token_ids += found.token_ids
            ends += found.ends
            start, begins = start + len(raw), False
        return Encoded(token_ids, ends)

    def _encoded_bytes(self, data: bytes, start: int) -> Encoded:
        ids = [self._byte_ids.get(data[at : at + 1], NONE) for at in range(len(data))]
        known = [(id_, end) for end, id_ in enumerate(ids, start=start + 1) if id_ != NONE]
        return Encoded([id_ for id_, _ in known], [end for _, end in known])

    def _encoded(self, text: str, start: int, *, begins: bool) -> Encoded:
        data = text.encode()
        before = ""  # takes the space that the tokenizer puts before each text
        if self.adds_space and not begins:
            before = "x" if text[0] == "\n" else "\n"  # merges with no token that begins the text
        token_ids = _ids(self._draft, before + text)
        pieces = [self.draft_bytes[id_] for id_ in token_ids]
        spelt = b"".join(pieces)
        more = len(spelt) - len(data)
        if more >= 0 and spelt[more:] == data and spelt[:more].strip() == before.strip().encode():
            ends = list(accumulate(map(len, pieces), initial=start - more))[1:]
            drop = sum(end <= start for end in ends) if before else 0
            return Encoded(token_ids[drop:], ends[drop:])
        # a normaliser has changed the text: encode halves, so that the ends of most tokens are known
        cut = text.find(" ", max(len(text) // 2, 1))
        cut = cut if cut > 0 else text.rfind(" ", 1)
        if cut <= 0:
            return Encoded(token_ids, [*[NONE] * (len(token_ids) - 1), start + len(data)][: len(token_ids)])
        left, middle = text[:cut], start + len(text[:cut].encode())
        halves = self._encoded(left, start, begins=begins), self._encoded(text[cut:], middle, begins=False)
        return Encoded(halves[0].token_ids + halves[1].token_ids, halves[0].ends + halves[1].ends)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, *, special_tokens: bool = False) -> list[int]:
    """Encode a text; names of special tokens in it are text."""
    ids: list[int] = tokenizer(text, add_special_tokens=special_tokens, split_special_tokens=True, verbose=False)[
        "input_ids"
    ]
    return ids


def _special(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Return the names of a tokenizer's special tokens."""
    return {id_: str(tokenizer.convert_ids_to_tokens(id_)) for id_ in special_ids(tokenizer)}


def _checked_bytes(tokenizer: PreTrainedTokenizerBase, role: str) -> list[bytes]:
    """Return the bytes of each token.

    Raises:
        StartupError: A text is not the bytes of its tokens.
    """
    tokens = token_bytes(tokenizer)
    spelt = b"".join(tokens[id_] for id_ in _ids(tokenizer, _PROBE))
    if spelt.removeprefix(b" ") != _PROBE.encode():
        raise StartupError(
            f"the {role} model's tokenizer cannot be matched with another one, because its tokens do not have the "
            f"bytes of their text: {_PROBE!r} becomes {spelt.decode(errors='replace')!r}; expected byte-level tokens "
            "or byte fallback, or two models with the same tokenizer"
        )
    return tokens


def _by_bytes(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[bytes], special: Set[int]) -> dict[bytes, int]:
    """Return the ordinary token of each string of bytes; a token of byte fallback only if there is no other."""
    found: dict[bytes, int] = {}
    fallback: dict[bytes, int] = {}
    for id_, data in enumerate(tokens):
        if not data or id_ in special:
            continue
        byte = len(data) == 1 and _BYTE.fullmatch(str(tokenizer.convert_ids_to_tokens(id_)))
        (fallback if byte else found).setdefault(data, id_)
    return fallback | found


def _drops_space(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[bytes]) -> bool:
    """Whether decoding drops the space of the first token of a text."""
    spaced = next((id_ for id_, data in enumerate(tokens) if data[:1] == b" " and data.strip()), None)
    added = vocabulary_of(tokenizer, special_tokens=True).added
    return spaced is not None and added((), spaced)[0] != tokens[spaced]
