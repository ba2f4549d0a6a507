"""The committed text of one session, in the tokens of a draft model with another tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from dynatree.draft.text.translation import NONE, Translation

LOOKBACK = 32  # tokens before the end of a text in which a word is looked for that begins there


class TranslatedContext:
    """The draft's tokens of the target's committed tokens.

    Bytes that are committed are encoded together with the end of the text before them, from the beginning of the last
    word on. So a context that grows keeps its tokens up to that word, and with them their keys and values. A text may
    end inside a character or a word: its last tokens are then replaced when it goes on.

    Args:
        translation: The tokens of both models.
        token_ids: The first tokens of the target.

    Attributes:
        translation: The tokens of both models.
        token_ids: The draft's tokens; never empty.
    """

    def __init__(self, translation: Translation, token_ids: Sequence[int]) -> None:
        self.translation = translation
        self._text = bytearray()
        self.token_ids = list(translation.prefix)
        self._ends = [0] * len(self.token_ids)  # offset in the text at which each token ends, or NONE
        self._fixed = self._kept = len(self.token_ids)  # the tokens before `_fixed` are never replaced
        self.push(token_ids[1:] if token_ids[0] == translation.begin else token_ids)
        if not self.token_ids:
            self._append_special(translation.first)

    def push(self, token_ids: Sequence[int]) -> int:
        """Append committed tokens of the target.

        Returns:
            How many of the draft's tokens are those before the call, followed by the counterparts of `token_ids`.
        """
        translation = self.translation
        expected = [*self.token_ids, *map(translation.draft_id, token_ids)]
        self._kept = len(self.token_ids)
        data = bytearray()
        for token in token_ids:
            special = translation.special.get(token)
            if special is None:
                data += translation.bytes_of(token)
            elif special != NONE:
                self._write(bytes(data))
                data.clear()
                self._append_special(special)
        self._write(bytes(data))
        same = self._kept
        while same < min(len(expected), len(self.token_ids)) and expected[same] == self.token_ids[same]:
            same += 1
        return same

    def _append_special(self, token: int) -> None:
        self.token_ids.append(token)
        self._ends.append(len(self._text))
        self._fixed = len(self.token_ids)

    def _write(self, data: bytes) -> None:
        """Append bytes to the text, and encode them with its last word."""
        if not self._text and self.translation.drops_space:
            data = data.removeprefix(b" ")
        if not data:
            return
        self._text += data
        kept = self._restart()
        start = self._ends[kept - 1] if kept else 0
        found = self.translation.encoded(bytes(self._text[start:]), start, begins=kept == self._fixed)
        self.token_ids[kept:] = found.token_ids
        self._ends[kept:] = found.ends
        self._kept = min(self._kept, kept)

    def _restart(self) -> int:
        """Number of tokens to keep: up to the beginning of the last word, or `LOOKBACK` tokens."""
        text, count = self._text, len(self.token_ids)
        for kept in range(count, self._fixed, -1):
            end = self._ends[kept - 1]
            if end == NONE or end >= len(text):
                continue
            begins_word = text[end] == ord(" ") and not text[end - 1 : end].isspace()
            inside = text[end] & 0xC0 == 0x80  # the byte continues a character
            if begins_word or (kept <= count - LOOKBACK and not inside):
                return kept
        return self._fixed


def aligned(translation: Translation, token_ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Encode a text of the target's tokens for the draft, and find where both tokenizers have a boundary.

    Returns:
        The draft's tokens of the whole text; and, for each of `token_ids`, how many of them are the draft's context if
        the text ends behind it, or 0 if that context is not their beginning.
    """
    context = TranslatedContext(translation, token_ids[:1])
    ends = [len(context.token_ids)]
    for token in token_ids[1:]:
        same = context.push([token])
        ends = [end if end <= same else 0 for end in ends]
        ends.append(len(context.token_ids))
    return context.token_ids, ends
