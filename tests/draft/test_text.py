"""Tests text from tokens: whole characters only, the same text as decoding at once, and stop strings at any place."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dynatree import embedded
from dynatree.draft.completion.generation import TextStream
from dynatree.draft.text.detokenizer import Detokenizer, SpaceCleaner
from dynatree.draft.text.stop_strings import StopStrings
from dynatree.engine.model.vocabulary import REPLACEMENT

TOKENIZER = AutoTokenizer.from_pretrained(embedded.target_path())


def pieces(token_ids, prompt=(), size=1, tokenizer=TOKENIZER):
    detokenizer = Detokenizer(tokenizer, prompt)
    out = [detokenizer.push(token_ids[i : i + size]) for i in range(0, len(token_ids), size)]
    return [*out, detokenizer.flush()]


@settings(deadline=None, max_examples=50)
@given(st.text(min_size=1, max_size=40), st.integers(1, 5))
def test_pieces_join_to_the_whole_text(text, size):
    token_ids = TOKENIZER(text)["input_ids"]
    assert "".join(pieces(token_ids, size=size)) == TOKENIZER.decode(token_ids, skip_special_tokens=True)


WORDS = ["a", "##n", "n", "it", "do", "t", "m", "s", "ve", "re", "##s", ".", "?", "!", ",", "'", "''", "[UNK]", "é"]


def word_piece(clean_up):
    """A tokenizer whose `decode` puts a space before every word, and removes some of them if `clean_up` is set."""
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", clean_up_tokenization_spaces=clean_up)


TIDY, UNTIDY = word_piece(True), word_piece(False)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(0, len(WORDS) - 1), min_size=1, max_size=20), st.integers(1, 4))
def test_pieces_join_to_what_the_tokenizers_own_setting_gives(token_ids, size):
    for tokenizer in (TIDY, UNTIDY):
        whole = tokenizer.decode(token_ids, skip_special_tokens=True)
        assert "".join(pieces(token_ids, size=size, tokenizer=tokenizer)) == whole


def test_spaces_that_the_tokenizer_cleans_up_are_gone_and_no_others():
    token_ids = TIDY("it 's a . do n't", verbose=False)["input_ids"]
    assert "".join(pieces(token_ids, tokenizer=UNTIDY)) == "it ' s a . do n ' t"
    assert "".join(pieces(token_ids, tokenizer=TIDY)) == "it's a. don't"
    assert pieces(token_ids[:3], tokenizer=TIDY)[:2] == ["it", ""], "what may yet be cleaned up is held back"


@given(st.text(" 'ntmsver.?!,ab", max_size=30), st.integers(1, 3))
def test_cleaning_a_stream_is_cleaning_the_whole(text, size):
    cleaner = SpaceCleaner(TIDY.clean_up_tokenization)
    out = [cleaner.push(text[start : start + size]) for start in range(0, len(text), size)]
    assert "".join([*out, cleaner.flush()]) == TIDY.clean_up_tokenization(text)


@pytest.mark.parametrize("clean_up", [True, False])
def test_a_byte_level_tokenizer_keeps_its_spaces_whatever_its_setting(clean_up):
    """Transformers ignores the setting for BPE, so the text equals `decode`."""
    tokenizer = AutoTokenizer.from_pretrained(embedded.target_path(), clean_up_tokenization_spaces=clean_up)
    token_ids = tokenizer("Well , he did n't !")["input_ids"]
    assert tokenizer.clean_up_tokenization_spaces == clean_up
    assert "".join(pieces(token_ids, tokenizer=tokenizer)) == tokenizer.decode(token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("character", ["é", "“", "漢", "🙂"])
def test_a_character_split_over_tokens_is_never_emitted_broken(character):
    token_ids = TOKENIZER("a" + character + "b")["input_ids"]
    out = pieces(token_ids)
    assert all(REPLACEMENT not in piece for piece in out)
    assert "".join(out) == "a" + character + "b"


def test_an_unfinished_character_comes_out_at_the_end():
    token_ids = TOKENIZER("a🙂")["input_ids"][:-1]
    assert len(token_ids) >= 2
    out = pieces(token_ids)
    assert "".join(out[:-1]) == "a"
    assert out[-1].startswith(REPLACEMENT)


def test_a_broken_byte_in_the_middle_does_not_hold_text_back():
    broken = TOKENIZER("🙂")["input_ids"][:1]
    token_ids = [*broken, *TOKENIZER(" and then the rest")["input_ids"]]
    detokenizer = Detokenizer(TOKENIZER, ())
    assert "".join(detokenizer.push([token]) for token in token_ids).endswith(" and then the rest")


def run(stops, parts):
    matcher = StopStrings(stops)
    out = []
    for part in parts:
        out.append(matcher.push(part))
        if matcher.found:
            return "".join(out), True
    return "".join([*out, matcher.flush()]), False


@pytest.mark.parametrize(
    ("stops", "parts", "expected"),
    [
        (["END"], ["one EN", "D two"], ("one ", True)),
        (["END"], ["one EN", "TER"], ("one ENTER", False)),
        (["END"], ["one E", "N"], ("one EN", False)),
        (["b", "ab"], ["xxab"], ("xx", True)),
        (["aab"], ["aa", "ab", "c"], ("a", True)),
        (["\n\n"], ["a\n", "b\n", "\nc"], ("a\nb", True)),
        ([], ["anything"], ("anything", False)),
    ],
)
def test_stop_strings_end_the_text_wherever_they_fall(stops, parts, expected):
    assert run(stops, parts) == expected


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_streaming_finds_what_a_whole_search_finds(text, stops):
    at = min((i for stop in stops if (i := text.find(stop)) >= 0), default=None)
    streamed, found = run(stops, list(text))
    assert found == (at is not None)
    if not found:
        assert streamed == text
    else:  # character by character, the first stop string to be complete ends the text
        first = min(text.find(stop) + len(stop) for stop in stops if stop in text)
        cut = min(i for stop in stops if (i := text[:first].find(stop)) >= 0)
        assert streamed == text[:cut]


def test_the_token_that_completes_a_stop_string_is_the_last():
    token_ids = TOKENIZER("He said so. And then he went.")["input_ids"]
    stream = TextStream(Detokenizer(TOKENIZER, ()), StopStrings([". And"]))
    text, kept = stream.push(token_ids)
    assert stream.stopped
    assert text == "He said so"
    assert TOKENIZER.decode(kept).startswith("He said so. And"[:-1])
    assert kept == token_ids[: len(kept)]
    assert len(kept) < len(token_ids)
    assert stream.flush() == ""


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    st.lists(st.text("ab", max_size=4), max_size=8),
)
def test_stop_strings_by_their_definition(stops, parts):
    """The shown text lacks the longest end that may become a stop string, and ends before a whole one."""
    matcher, shown = StopStrings(stops), ""
    for count in range(1, len(parts) + 1):
        shown += matcher.push(parts[count - 1])
        text = "".join(parts[:count])
        ends = [text.find(stop) for stop in stops if stop in text]
        assert matcher.found == bool(ends)
        begun = [n for n in range(len(text) + 1) if any(stop.startswith(text[n:]) for stop in stops)]
        if ends:
            assert shown == text[: min(ends)]
            break
        assert shown == text[: min(begun)]
    if matcher.found:
        assert (matcher.push("ab"), matcher.flush()) == ("", "")
    else:
        assert shown + matcher.flush() == "".join(parts)
        assert matcher.flush() == ""
