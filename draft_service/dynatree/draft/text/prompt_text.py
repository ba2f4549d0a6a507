"""The text of a prompt, with the offset of each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from transformers import PreTrainedTokenizerBase

from dynatree.draft.text.detokenizer import Detokenizer


@dataclass(frozen=True)
class PromptText:
    """A prompt's text, and the offset of each of its tokens, in characters."""

    text: str = ""
    offsets: tuple[int, ...] = ()


def decoded(tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> PromptText:
    """Decode token ids to text and offsets, with the names of special tokens."""
    detokenizer = Detokenizer(tokenizer, (), special_tokens=True)
    text, offsets = "", []
    for token_id in prompt_ids:
        text += detokenizer.push([token_id])
        offsets.append(detokenizer.offset)
    return PromptText(text + detokenizer.flush(), tuple(offsets))


def written(
    tokenizer: PreTrainedTokenizerBase, text: str, prompt_ids: Sequence[int], *, special_tokens: bool
) -> PromptText:
    """Pair a text with the offsets of the tokens `prompt_ids` that it was encoded to.

    The tokenizer may have added special tokens before and after the text's own, which are not in the text. If the
    tokenizer normalises texts before it encodes them, for example to lower case, its own offset mapping is used.
    """
    encoding = tokenizer(
        text,
        add_special_tokens=False,
        split_special_tokens=not special_tokens,
        return_offsets_mapping=tokenizer.is_fast,
        verbose=False,
    )
    ids = tuple(encoding["input_ids"])
    begin = next(
        (at for at in range(len(prompt_ids) - len(ids) + 1) if tuple(prompt_ids[at : at + len(ids)]) == ids), 0
    )
    found = decoded(tokenizer, ids)
    offsets = found.offsets
    if found.text != text and tokenizer.is_fast:
        offsets = tuple(accumulate((place for place, _ in encoding["offset_mapping"]), max))
    behind = len(prompt_ids) - begin - len(ids)
    return PromptText(text, (*(0,) * begin, *(min(place, len(text)) for place in offsets), *(len(text),) * behind))
