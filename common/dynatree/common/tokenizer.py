"""Tokenizers: loading, and the fingerprint by which two services know that they share one."""

from __future__ import annotations

import hashlib
import json

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dynatree.common.errors import StartupError
from dynatree.common.model_files import check_path

# Texts whose ids tell tokenizers apart. The fingerprint covers them: a change here changes every fingerprint.
PROBES = (
    "",
    " ",
    "a",
    " a",
    "Hello, world! How are you today?",
    "  two leading and two trailing spaces  ",
    "a  b   c    d\te\t\tf\n\ng\r\nh\u00a0i\u3000j\u200bk",
    "\n\n    indented\n\tmore\n",
    "don't I'll we've they're it's o'clock — “quoted” ‘single’ …",
    "UPPER lower Title camelCase snake_case kebab-case",
    "1 12 123 1234 12345 3.14159 1,000,000 0x1F 1e-9 2026-11-22 10:30",
    "def f(x: int) -> list[str]:\n    return [str(x) for _ in range(3)]  # a comment\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] * 2; } // end",
    '{"key": [1, 2.5, null, true], "path": "C:\\\\dir\\\\file"}',
    "<s> </s> <pad> <unk> <|endoftext|> <|im_start|>user <|im_end|> [CLS] [SEP] [INST] <0x0A>",
    "https://example.org/a/b?c=d&e=%20f#g user@example.org",
    "café naïve Ångström",  # composed
    "cafe\u0301 nai\u0308ve A\u030angstro\u0308m",  # the same, decomposed
    "\ufb01ne \u2460 \uff21\uff22\uff23 x\u00b2 \u00bd",  # compatibility forms
    "Straße İstanbul ŒUVRE ǅ",
    "Съешь ещё этих мягких французских булок",
    "Η γρήγορη αλεπού",
    "这是一个句子。日本語の文章です。한국어 문장입니다.",
    "مرحبا بالعالم שלום עולם",
    "नमस्ते दुनिया สวัสดีชาวโลก",
    "🙂 👩\u200d👩\u200d👧\u200d👦 🇪🇺 ❤\ufe0f",
    "\u0000\u0001\u007f\ufeff\ufffd",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" + "!?.,;:" * 4,
    "the of and to in is that it was for on are as with his they be at one have this from or had by",
    "internationalisation antidisestablishmentarianism Donaudampfschifffahrt",
)


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a hub name or local path.

    Raises:
        StartupError: There is none, or it cannot be read.
    """
    check_path(model)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and its backends' own types here
        raise StartupError(f"no tokenizer could be loaded for model {model!r}: {first_line(error)}") from error
    return tokenizer


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256, in hexadecimal, over everything that decides which ids a text has and which text ids have.

    That is the sorted (token, id) pairs with added tokens, a BPE model's merges or a unigram model's scores, and what
    the tokenizer makes of fixed texts: their ids, with the special tokens that it adds, and the text of these ids. The
    texts show normalisation, the cutting into words, special tokens and decoding. These count by their effect: one
    behaviour can be written down in several ways.
    """
    digest = hashlib.sha256()

    def add(part: object) -> None:
        digest.update(json.dumps(part, ensure_ascii=True).encode() + b"\n")

    add(sorted(tokenizer.get_vocab().items()))
    add(_merges_or_scores(tokenizer))
    # every added token inside words, beside spaces, and with its letters' case changed
    added = [f"a{token}b {token} c\n{token.swapcase()}" for token in sorted(tokenizer.get_added_vocab())]
    for text in (*PROBES, *added):
        ids = [int(token) for token in tokenizer(text, verbose=False)["input_ids"]]
        add([ids, tokenizer.decode(ids, skip_special_tokens=True)])
    return digest.hexdigest()


def _merges_or_scores(tokenizer: PreTrainedTokenizerBase) -> object:
    """The parts of a fast tokenizer's model that no probe covers: a BPE's merges, a unigram's tokens with scores."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    model = json.loads(backend.to_str())["model"]
    scores = model["vocab"] if isinstance(model.get("vocab"), list) else None
    return [model.get("merges"), scores]


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
