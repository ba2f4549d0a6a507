"""Tests that a GGUF file's tokenizer gives the ids of the tokenizer that the file was made of."""

import json

import gguf
import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.tokenization_utils_base import generate_merges

from dynatree import embedded
from dynatree.common.errors import StartupError
from dynatree.engine.model.gguf_header import read_header
from dynatree.engine.model.gguf_tokenizer import check_split, end_tokens
from dynatree.engine.model.tokenizer import PROBES, files_of, fingerprint, load_tokenizer, tokenizer_of
from tests.support.paths import ROOT

# Control tokens of characters that stand for bytes and of others, and a usual token that is marked so by mistake.
CONTROL = ("<|im_start|>", "<|im_end|>", "<\uff5cUser\uff5c>", "<\uff5cbegin\u2581of\u2581sentence\uff5c>")
USER_DEFINED = ("<think>", "    ")  # GPT-NeoX's runs of spaces are such tokens
MISTAKE = "\u3002\uff5c"
LINES = (ROOT / "LICENSE").read_text().splitlines()
TEXTS = (*PROBES, *(f"a{token}b {token}  c\n\n1" for token in (*CONTROL, *USER_DEFINED)), "steps:\n\n1. a", "=  12")


def byte_level(split=None):
    digits = pre_tokenizers.Digits(individual_digits=True)
    first = digits if split is None else pre_tokenizers.Split(Regex(split), "isolated")
    return pre_tokenizers.Sequence([first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)])


KINDS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": byte_level(),
    "starcoder": byte_level(),
    "qwen2": byte_level(GGUF_PRE_TOKENIZER_SPLITS["qwen2"]),
    "deepseek-r1-qwen": byte_level(GGUF_PRE_TOKENIZER_SPLITS["qwen2"]),
    "stablelm2": byte_level(GGUF_PRE_TOKENIZER_SPLITS["qwen2"]),
    "llama-bpe": byte_level(GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"]),
    "tekken": byte_level(GGUF_PRE_TOKENIZER_SPLITS["tekken"]),
}
WHOLE = ("llama-bpe", "tekken")
COMPOSED = ("deepseek-r1-qwen", "qwen2")


def original(kind):
    """A tokenizer with more tokens than the embedded pair's, one of which no merges reach."""
    content = json.loads((embedded.target_path() / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    for token in ("\u0120Donaudampf", *CONTROL, *USER_DEFINED):
        vocabulary[token] = len(vocabulary)
    whole = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content["added_tokens"] = [
        {"id": vocabulary[token], "content": token, "special": token not in USER_DEFINED} | whole
        for token in (*(each["content"] for each in content["added_tokens"]), *CONTROL, *USER_DEFINED)
    ]
    content["model"]["ignore_merges"] = kind in WHOLE
    content["post_processor"] = None
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.pre_tokenizer = KINDS[kind]
    tokenizer.normalizer = normalizers.NFC() if kind in COMPOSED else None
    return tokenizer


def written(path, tokenizer, kind, **values):
    """Write a file as llama.cpp's converter writes a byte-level tokenizer."""
    content = json.loads(tokenizer.to_str())
    special = {each["content"]: 3 if each["special"] else 4 for each in content["added_tokens"]}
    tokens = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    values |= {
        "tokenizer_model": "gpt2",
        "token_list": [*tokens, MISTAKE],
        "token_types": [*(special.get(token, 1) for token in tokens), 3],
        "token_merges": [" ".join(each) for each in content["model"]["merges"]],
    }
    return saved(path, **values | ({"tokenizer_pre": kind} if kind else {}))


def saved(path, architecture="llama", **values):
    """Write a file with the tokenizer and hardly any weights."""
    writer = gguf.GGUFWriter(str(path), architecture)
    for add in (writer.add_block_count, writer.add_embedding_length, writer.add_head_count):
        add(1)
    for key, value in values.items():
        getattr(writer, f"add_{key}")(value)
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_have_the_ids_of_the_original(tmp_path, kind):
    tokenizer = original(kind)
    loaded = load_tokenizer(written(tmp_path / "model.gguf", tokenizer, kind, add_bos_token=False))
    expected = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert [loaded(text)["input_ids"] for text in TEXTS] == expected
    assert max(map(max, filter(None, expected))) < len(loaded) <= tokenizer.get_vocab_size() + 1
    again = tokenizer_of(files_of(loaded))
    assert [again(text)["input_ids"] for text in TEXTS] == expected
    assert fingerprint(again) == fingerprint(loaded)


@pytest.mark.parametrize(("kind", "adds"), [("llama-bpe", True), ("gpt-2", False)])
def test_llama_3s_texts_begin_with_a_token_unless_the_file_denies_it(tmp_path, kind, adds):
    tokenizer = original(kind)
    first = tokenizer.token_to_id(CONTROL[3])
    path = written(tmp_path / "model.gguf", tokenizer, kind, bos_token_id=first)
    expected = [first] * adds + tokenizer.encode("Once", add_special_tokens=False).ids
    assert load_tokenizer(path)("Once")["input_ids"] == expected


@pytest.mark.parametrize("kind", [None, "deepseek-coder", "falcon", "default", ""])
def test_a_file_whose_texts_are_split_in_another_way_is_refused(tmp_path, kind):
    path = tmp_path / "model.gguf"
    written(path, original("gpt-2"), kind)
    for refusing in (lambda: load_tokenizer(str(path)), lambda: check_split(path.name, read_header(path).values)):
        with pytest.raises(StartupError, match=r"its tokenizer.ggml.pre is .*, by which DynaTree cannot split texts"):
            refusing()


def test_ends_are_the_tokens_that_a_file_its_template_or_their_names_call_so(tmp_path):
    tokenizer = original("gpt-2")
    assert tokenizer.token_to_id("<|endoftext|>") == 0
    ids = [tokenizer.token_to_id(token) for token in CONTROL]
    path = tmp_path / "model.gguf"
    for values, expected in (
        ({}, {0}),
        ({"eot_token_id": ids[2], "eom_token_id": ids[0]}, {0, ids[2], ids[0]}),
        ({"chat_template": "{{ messages[0].content }}<|im_end|><|end|>"}, {0, ids[1]}),
    ):
        named = load_tokenizer(written(path, tokenizer, "gpt-2", eos_token_id=ids[3], **values))
        assert end_tokens(named, path) == expected


NAMED = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<|end|>", "<|user|>", "<|endoftext|>")


@pytest.fixture(scope="module", name="pieces")
def pieces_fixture():
    """The pieces of a small SentencePiece model, by id; the merge of each has the rank of its id."""
    learned = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    learned.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=list(NAMED), show_progress=False)
    learned.train_from_iterator((*TEXTS, *LINES), trainer)
    vocabulary = learned.get_vocab()
    return sorted(vocabulary, key=vocabulary.get)


def sentencepiece_file(path, pieces, architecture="llama", scores=None, **values):
    """Write a file with a tokenizer of these pieces, whose scores are their ranks if none are given."""
    kinds = {"<unk>": 2} | dict.fromkeys(NAMED[3:259], 6) | dict.fromkeys((*NAMED[1:3], *NAMED[259:]), 3)
    return saved(
        path,
        architecture,
        tokenizer_model="llama",
        token_list=pieces,
        token_scores=scores or [0.0 if piece in NAMED else -float(number) for number, piece in enumerate(pieces)],
        token_types=[kinds.get(piece, 1) for piece in pieces],
        bos_token_id=1,
        eos_token_id=2,
        unk_token_id=0,
        add_bos_token=False,
        **values,
    )


def sentencepiece(pieces, *, rstrip=(), **options):
    """The tokenizer of the checkpoint."""
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    merges = generate_merges(vocabulary, {piece: -number for piece, number in vocabulary.items()})
    tokenizer = LlamaTokenizer(vocab=vocabulary, merges=merges, **options)
    added = [
        AddedToken(each, rstrip=each in rstrip, normalized=False, special=True) for each in NAMED if each[1] in "|/s"
    ]
    tokenizer.add_special_tokens({"additional_special_tokens": added}, replace_extra_special_tokens=False)
    return tokenizer


def check_equal(loaded, original):
    texts = (*TEXTS, *LINES, *(f"{token}\n a{token}  b{token}" for token in ("</s>", *NAMED[259:])))
    for tokenizer in (loaded, tokenizer_of(files_of(loaded))):
        for text in texts:
            ids = original(text, add_special_tokens=False)["input_ids"]
            assert tokenizer(text)["input_ids"] == ids, text
            assert tokenizer.decode(ids) == original.decode(ids), text


@pytest.mark.parametrize("prefix", [True, False, None])
def test_a_sentencepiece_text_begins_with_a_space_unless_the_file_denies_it(tmp_path, pieces, prefix):
    options = {} if prefix is None else {"add_space_prefix": prefix}
    path = sentencepiece_file(tmp_path / "model.gguf", pieces, **options)
    check_equal(load_tokenizer(path), sentencepiece(pieces, add_prefix_space=prefix))


def test_pieces_of_equal_scores_have_the_ranks_of_their_ids(tmp_path, pieces):
    path = sentencepiece_file(tmp_path / "model.gguf", pieces, scores=[-1000.0] * len(pieces))
    check_equal(load_tokenizer(path), sentencepiece(pieces))


def test_white_space_behind_phi_3s_control_tokens_is_dropped(tmp_path, pieces):
    original = sentencepiece(pieces, rstrip=("</s>", "<|end|>", "<|user|>"))
    original.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    original.backend_tokenizer.pre_tokenizer = None
    check_equal(load_tokenizer(sentencepiece_file(tmp_path / "model.gguf", pieces, "phi3")), original)


def test_a_unigram_model_that_a_file_calls_bpe_is_refused(tmp_path, pieces):
    path = sentencepiece_file(tmp_path / "model.gguf", pieces, scores=[-0.5 * number for number in range(len(pieces))])
    with pytest.raises(StartupError, match="its tokenizer is a unigram model of SentencePiece"):
        load_tokenizer(path)
