"""Tests of the localities that are found in the masks that models request."""

import pytest
import torch
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from dynatree.common.errors import StartupError
from dynatree.engine.forward.requested_mask import locality_of
from dynatree.engine.kv.locality import GLOBAL, Locality

CONTEXT = 300
NO_PADDING = torch.zeros(1, dtype=torch.int64)


def requested(shows):
    mask = torch.zeros(1, 1, 1, 1)
    mask.shows = shows
    return mask


@pytest.mark.parametrize("size", [1, 2, 16, 128, CONTEXT - 1, CONTEXT, CONTEXT + 1])
def test_windows_and_chunks_are_found_if_they_matter_within_the_context(size):
    window = locality_of(requested(sliding_window_causal_mask_function(size)), CONTEXT)
    chunk = locality_of(requested(chunked_causal_mask_function(size, NO_PADDING)), CONTEXT)
    assert window == (Locality(window=size) if size < CONTEXT else GLOBAL)
    of_one = Locality(window=1)  # a chunk of one token is a window of one
    assert chunk == (GLOBAL if size >= CONTEXT else of_one if size == 1 else Locality(chunk=size))


def shows_the_first(_, __, queries, keys):
    return keys < 2


def skips_the_second(_, __, queries, keys):
    return (keys != 1) | (queries < 200)


def narrows_at(position):
    return lambda _, __, queries, keys: (keys > queries - 16) | (queries != position)


OTHERS = {
    "the whole context": lambda _, __, queries, keys: keys >= 0,
    "the next token": lambda _, __, queries, keys: keys <= queries + 1,
    "not itself": lambda _, __, queries, keys: keys < queries,
    "a window and the first tokens": or_masks(
        and_masks(shows_the_first, causal_mask_function), sliding_window_causal_mask_function(16)
    ),
    "a window within chunks": and_masks(
        sliding_window_causal_mask_function(16), chunked_causal_mask_function(90, NO_PADDING)
    ),
    "chunks from the third token on": lambda _, __, queries, keys: (
        (keys <= queries) & ((keys + 61) // 64 == (queries + 61) // 64)
    ),
    "all but one of the tokens": and_masks(causal_mask_function, skips_the_second),
    "a window of one position": and_masks(causal_mask_function, narrows_at(137)),
    "every second token": lambda _, __, queries, keys: (keys <= queries) & ((queries - keys) % 2 == 0),
    "tokens by their number": lambda batch, __, queries, keys: torch.ones(1, 4, dtype=torch.bool)[batch, keys],
}


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_mask_is_refused(name):
    with pytest.raises(StartupError, match="shows neither every earlier token within 300 tokens, nor a sliding window"):
        locality_of(requested(OTHERS[name]), CONTEXT)


def test_a_mask_that_no_model_requested_is_refused():
    with pytest.raises(StartupError, match="a mask of the model's own"):
        locality_of(torch.zeros(1, 1, 4, 4), CONTEXT)
