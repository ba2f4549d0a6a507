"""Tests that the fingerprint distinguishes tokenizers that give a text other ids, or ids another text."""

import json
import subprocess
import sys

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

from dynatree import embedded
from dynatree.common.errors import FailedPreconditionError, StartupError
from dynatree.common.model_info import check_same_tokenizer
from dynatree.engine.loading import load_engine
from dynatree.engine.model.tokenizer import files_of, fingerprint, load_tokenizer, tokenizer_of
from dynatree.engine.settings import ModelSettings
from tests.support.model_zoo import save_random_model
from tests.support.tokenizer_zoo import TOKENIZERS

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
SYLLABLES = ["th", "he", "the", "qz", "zx", "qzx"]
BYTES = {token: index for index, token in enumerate(["<s>", *LETTERS, *SYLLABLES])}
MERGES = [("t", "h"), ("h", "e"), ("th", "e"), ("q", "z"), ("z", "x"), ("qz", "x")]
WORDS = {token: index for index, token in enumerate(["[UNK]", "hello", "how", "are", "##s", ",", ".", "!", "?", "'"])}


def bpe(merges=MERGES, normalizer=None, prefix_space=False, bos=False, decoder=None, added=(), **options):
    tokenizer = Tokenizer(models.BPE(vocab=BYTES, merges=merges))
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoder or decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.add_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", **options)


def unigram(scores):
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), *scores.items()], unk_id=0))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def word_piece(cleanup):
    tokenizer = Tokenizer(models.WordPiece(WORDS, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", clean_up_tokenization_spaces=cleanup)


PLAIN = bpe()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (PLAIN, bpe(merges=[MERGES[1], MERGES[0], *MERGES[2:]])),
        (PLAIN, bpe(merges=[*MERGES[:4], MERGES[5], MERGES[4]])),  # of letters that are adjacent in no probe
        (PLAIN, bpe(merges=MERGES[:5])),
        (PLAIN, bpe(bos=True)),
        (PLAIN, bpe(normalizer=normalizers.NFC())),
        (PLAIN, bpe(normalizer=normalizers.NFKC())),
        (PLAIN, bpe(normalizer=normalizers.Lowercase())),
        (PLAIN, bpe(normalizer=normalizers.Strip())),
        (PLAIN, bpe(prefix_space=True)),
        (PLAIN, bpe(decoder=decoders.Fuse())),
        (bpe(added=[AddedToken("<x>")]), bpe(added=[AddedToken("<x>", lstrip=True)])),
        (bpe(added=[AddedToken("<x>")]), bpe(added=[AddedToken("<x>", single_word=True)])),
        (bpe(added=[AddedToken("<x>")]), bpe(added=[AddedToken("<x>", special=True)])),
        (unigram({"a": -1.0, "b": -1.0, "ab": -1.5}), unigram({"a": -1.0, "b": -1.0, "ab": -3.0})),
        (word_piece(cleanup=False), word_piece(cleanup=True)),
    ],
    ids=[
        *(
            "merges",
            "rare merges",
            "fewer merges",
            "bos",
            "NFC",
            "NFKC",
            "lowercase",
            "strip",
            "prefix space",
            "decoder",
        ),
        *("added token strips", "added token is a word", "added token is special", "scores", "clean-up"),
    ],
)
def test_tokenizers_of_one_vocabulary_that_differ_have_other_fingerprints(one, other):
    assert one.get_vocab() == other.get_vocab(), "or the test tests nothing"
    assert fingerprint(one) != fingerprint(other)


def saved(folder):
    """Save a tokenizer; return its fingerprint."""
    tokenizer = bpe(bos=True, normalizer=normalizers.NFC(), added=[AddedToken("<x>", lstrip=True)])
    tokenizer.save_pretrained(folder)
    return fingerprint(tokenizer)


def test_the_fingerprint_survives_saving(tmp_path):
    assert saved(tmp_path) == fingerprint(load_tokenizer(str(tmp_path)))


@pytest.mark.long
def test_the_fingerprint_survives_saving_and_another_process(tmp_path):
    expected = saved(tmp_path)
    code = "import sys; from dynatree.engine.model.tokenizer import *; print(fingerprint(load_tokenizer(sys.argv[1])))"
    printed = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True, timeout=120
    )
    assert printed.stdout.strip() == expected


@pytest.mark.parametrize("make", [*TOKENIZERS.values(), lambda: word_piece(True)], ids=[*TOKENIZERS, "cleanup"])
@pytest.mark.parametrize("template", [None, "{{ messages }}", {"default": "{{ messages }}", "tool_use": "{{ tools }}"}])
def test_the_files_of_a_tokenizer_make_the_same_one(make, template):
    tokenizer = tokenizer_of(files_of(make()))  # as loaded from a checkpoint
    tokenizer.chat_template = template
    again = tokenizer_of(files_of(tokenizer))
    assert fingerprint(again) == fingerprint(tokenizer)
    assert again.chat_template == template
    assert again.added_tokens_decoder == tokenizer.added_tokens_decoder


def test_the_files_keep_parts_that_the_class_of_a_family_would_replace():
    """A GGUF file of Qwen2 gives its class without the normalizer that the class gives itself."""
    tokenizer = Qwen2Tokenizer(vocab=BYTES, merges=MERGES)
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    assert fingerprint(tokenizer_of(files_of(tokenizer))) == fingerprint(tokenizer)


@pytest.mark.parametrize("files", [{}, {"tokenizer.json": b"{"}, {"..": b"x"}], ids=["none", "malformed", "a folder"])
def test_files_of_no_tokenizer(files):
    with pytest.raises(StartupError, match=r"^the target's tokenizer could not be loaded: "):
        tokenizer_of(files)


def test_the_embedded_pair_shares_a_tokenizer():
    target, draft = (load_tokenizer(str(path)) for path in (embedded.target_path(), embedded.draft_path()))
    assert fingerprint(target) == fingerprint(draft)


def test_a_draft_with_other_merges_is_refused(tmp_path):
    target, draft = (save_random_model(tmp_path / name, "gpt2", seed=1) for name in ("target", "draft"))
    path = draft / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["model"]["merges"].reverse()
    path.write_text(json.dumps(content), encoding="utf-8")
    infos = [load_engine(ModelSettings(str(folder), sessions=1)).info for folder in (draft, target)]
    assert load_tokenizer(str(draft)).get_vocab() == load_tokenizer(str(target)).get_vocab()
    with pytest.raises(FailedPreconditionError, match="draft model draft and target model target have different tok"):
        check_same_tokenizer(*infos)
