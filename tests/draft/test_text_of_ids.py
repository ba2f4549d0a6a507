"""Tests that text depends only on the ids: not on the tokenizer, the script, the prompt, or the ids' grouping."""

from __future__ import annotations

import random
from functools import cache

import pytest
from tokenizers import normalizers
from transformers import PreTrainedTokenizerBase

from dynatree.draft.text.detokenizer import Detokenizer
from dynatree.draft.text.prompt_text import PromptText, decoded, written
from dynatree.engine.model.vocabulary import REPLACEMENT, token_bytes
from tests.support.tokenizer_zoo import TEXTS, TOKENIZERS, bytes_of

BYTE_FALLBACK = ("llama 2", "phi 3", "gemma", "unigram")
tokenizer_of = cache(lambda name: TOKENIZERS[name]())


def whole(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def in_parts(rng: random.Random, tokenizer: PreTrainedTokenizerBase, prompt: list[int], ids: list[int]) -> str:
    """Return the text of ids that arrive in parts of random sizes."""
    detokenizer = Detokenizer(tokenizer, prompt)
    text, most = "", rng.choice([1, 2, 4, 16, len(ids) + 1])
    while ids:
        count = rng.randint(1, most)
        text += detokenizer.push(ids[:count])
        ids = ids[count:]
    return text + detokenizer.flush()


def sentence(rng: random.Random, script: str) -> str:
    """Return pieces of text, mostly in one script, some of them far longer than any window."""
    scripts = [rng.choice([script, script, *TEXTS]) for _ in range(rng.randint(1, 6))]
    ends = [sorted(rng.choices(range(len(TEXTS[each]) + 1), k=2)) for each in scripts]
    return rng.choice(["", " "]).join(TEXTS[each][a:b] for each, (a, b) in zip(scripts, ends, strict=True))


@pytest.mark.parametrize("script", TEXTS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_text_is_decode_in_every_partition_and_behind_every_prompt(name: str, script: str) -> None:
    tokenizer, rng = tokenizer_of(name), random.Random(f"{name} {script}")
    for _ in range(8):
        prompt, ids = (encode(tokenizer, sentence(rng, script)) for _ in range(2))
        prompt = prompt if rng.random() < 0.7 else []
        no_text = [*tokenizer.all_special_ids, *([len(tokenizer) + 7] if tokenizer.is_fast else [])]
        for id_ in rng.choices(no_text, k=rng.choice([0, 0, 1, 12])):
            rng.choice([prompt, ids]).insert(rng.choice([0, rng.randrange(len(ids) + 1)]), id_)
        text = in_parts(rng, tokenizer, prompt, ids)
        if tokenizer.clean_up_tokenization_spaces:  # the end of the prompt is not cleaned up any more
            prompt = []
            text = in_parts(rng, tokenizer, prompt, ids)
        assert whole(tokenizer, prompt) + text == whole(tokenizer, prompt + ids)


@pytest.mark.parametrize("script", TEXTS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_limit_that_cuts_a_character_leaves_the_others(name: str, script: str) -> None:
    tokenizer, rng = tokenizer_of(name), random.Random(f"{name} {script}")
    for _ in range(8):
        ids = encode(tokenizer, sentence(rng, script))
        cut = rng.randint(0, len(ids))
        text = in_parts(rng, tokenizer, [], ids[:cut])
        assert text == in_parts(rng, tokenizer, [], ids[:cut])
        decoded = whole(tokenizer, ids[:cut])
        if REPLACEMENT not in decoded:
            assert text == decoded
            continue
        complete = next(count for count in range(cut, -1, -1) if REPLACEMENT not in whole(tokenizer, ids[:count]))
        assert text.endswith(REPLACEMENT)
        assert text.startswith(whole(tokenizer, ids[:complete]))
        assert whole(tokenizer, ids).startswith(text[:-1])


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_of_any_kind(name: str) -> None:
    """Bytes that form no character become what an incremental decoder gives, wherever they are."""
    tokenizer, rng = tokenizer_of(name), random.Random(name)
    fragments = [id_ for id_ in range(len(tokenizer)) if REPLACEMENT in whole(tokenizer, [id_])] or [0]
    for _ in range(100):
        ids = [rng.choice([rng.randrange(len(tokenizer)), rng.choice(fragments)]) for _ in range(rng.randint(1, 60))]
        text = in_parts(rng, tokenizer, [], ids)
        assert text == in_parts(rng, tokenizer, [], ids)
        if name in BYTE_FALLBACK:
            first = next((id_ for id_ in ids if id_ not in tokenizer.all_special_ids), None)
            data = b"".join(bytes_of(tokenizer, id_) for id_ in ids)
            if name == "unigram":  # it drops all spaces of the first token
                start = bytes_of(tokenizer, first).lstrip(b" ") if first is not None else b""
                data = start + data[len(bytes_of(tokenizer, first)) :] if first is not None else data
            elif name != "gemma" and data.startswith(b" "):
                data = data[1:]
            assert text == data.decode(errors="replace")
        elif name != "bytes":
            assert text == whole(tokenizer, ids)


def check_offsets(tokenizer: PreTrainedTokenizerBase, ids: list[int], found: PromptText) -> None:
    """Check that every token begins where its text does, up to a lost first space and special tokens without text."""
    names, text = token_bytes(tokenizer), found.text
    assert len(found.offsets) == len(ids)
    assert list(found.offsets) == sorted(found.offsets)
    for id_, offset in zip(ids, found.offsets, strict=True):
        name = names[id_].decode(errors="replace")
        if not text[offset:].startswith(name) and id_ not in tokenizer.all_special_ids:
            assert REPLACEMENT in name or (offset == 0 and text.startswith(tokenizer.decode([id_])))


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if name not in ("suffixes", "tidy word piece", "bytes")])
def test_every_token_begins_where_its_text_does(name: str) -> None:
    """Offsets are right in prompts as written, in decoded ids, and around and within special tokens."""
    tokenizer, rng = tokenizer_of(name), random.Random(name)
    special = tokenizer.all_special_ids
    unknown = tokenizer.unk_token_id
    for script in TEXTS:
        for _ in range(8):
            text = sentence(rng, script)
            ids = encode(tokenizer, text)
            if unknown not in ids and decoded(tokenizer, ids).text == text:
                behind = rng.choices(special, k=rng.randint(0, 2))
                ahead = rng.choices(special, k=rng.randint(0, 2))
                found = written(tokenizer, text, [*ahead, *ids, *behind], special_tokens=False)
                assert found.text == text
                check_offsets(tokenizer, [*ahead, *ids, *behind], found)
            ids.insert(rng.randint(0, len(ids)), rng.choice(special))
            ids.insert(rng.randint(0, len(ids)), rng.randrange(len(tokenizer)))
            found = decoded(tokenizer, ids)
            check_offsets(tokenizer, ids, found)
            plain = str(tokenizer.decode(ids))
            assert found.text == plain or REPLACEMENT in plain


def test_a_text_that_the_tokenizer_changes_keeps_its_places() -> None:
    """`Prepend` puts a space after a special token, and a normaliser changes the case; offsets are still right."""
    tokenizer = tokenizer_of("llama 2")
    ids = tokenizer("<|im_start|>he said")["input_ids"]
    assert written(tokenizer, "<|im_start|>he said", ids, special_tokens=True).offsets == (0, 0, 12, 12, 14)
    lower = tokenizer_of("byte level")
    lower.backend_tokenizer.normalizer = normalizers.Lowercase()
    try:
        ids = lower("HE SAID")["input_ids"]
        places = written(lower, "HE SAID", ids, special_tokens=False).offsets
    finally:
        lower.backend_tokenizer.normalizer = None
    assert len(places) == len(ids)
    assert list(places) == sorted(places)
    assert places[-1] == 6
