"""Loads and copies tokenizers, and computes the fingerprint by which two services verify that they share one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dynatree.common.errors import StartupError
from dynatree.engine.model.files import architecture_of, check_path, checkpoint_of
from dynatree.engine.settings import is_gguf

# Architectures of GGUF files for which AutoTokenizer has no other class. It would read the file once more, for seconds,
# or refuse it.
_GENERAL = frozenset({"gemma", "gemma2", "gemma3", "llama", "phi3", "qwen2moe", "qwen3", "qwen3moe", "smollm3"})
# Texts whose ids distinguish tokenizers. They are part of the fingerprint, so a change here changes every fingerprint.
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
    """Load the tokenizer of a hub name or local path.

    Raises:
        StartupError: The tokenizer is missing or cannot be read.
    """
    check_path(model)
    loader: Any = AutoTokenizer
    options: dict[str, Any] = {"mistral_format": False}  # whether or not mistral-common is installed
    if architecture_of(model) in _GENERAL:
        loader, options = PreTrainedTokenizerFast, {}
    try:
        tokenizer: PreTrainedTokenizerBase
        tokenizer = loader.from_pretrained(**checkpoint_of(model), **options, trust_remote_code=False)
        if is_gguf(model):
            from dynatree.engine.model.gguf_tokenizer import mend  # with transformers' reader, which imports torch

            mend(tokenizer, Path(model))
    except StartupError:
        raise
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and its backends' own types here
        raise StartupError(f"no tokenizer could be loaded for model {model!r}: {first_line(error)}") from error
    return tokenizer


def files_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    """Return the contents of a tokenizer's files by name; `tokenizer_of` makes the same tokenizer of them."""
    with TemporaryDirectory(prefix="dynatree-") as folder:
        tokenizer.save_pretrained(folder, save_jinja_files=False)  # else chat templates may be in a folder below
        if tokenizer.is_fast:  # a family's class may replace parts of tokenizer.json, as Qwen2's does the normalizer
            config = Path(folder) / "tokenizer_config.json"
            plain = json.loads(config.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
            config.write_text(json.dumps(plain), encoding="utf-8")
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def tokenizer_of(files: Mapping[str, bytes]) -> PreTrainedTokenizerBase:
    """Load the tokenizer whose files these are.

    Raises:
        StartupError: They are not the files of a tokenizer, or it needs a package that is not installed.
    """
    with TemporaryDirectory(prefix="dynatree-") as folder:
        try:
            for name, data in files.items():
                (Path(folder) / name).write_bytes(data)
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:  # as in `load_tokenizer`
            raise StartupError(f"the target's tokenizer could not be loaded: {first_line(error)}") from error
        return tokenizer


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256, in hexadecimal, of everything that decides the ids of a text and the text of ids.

    It covers the sorted (token, id) pairs with added tokens, and a BPE model's merges or a unigram model's scores. It
    also covers the results for fixed texts: their ids, with the special tokens that the tokenizer adds, and the decoded
    text of these ids. The texts reveal normalisation, pre-tokenization, special tokens and decoding. These are compared
    by their effect, because the same behaviour can be configured in several ways.
    """
    digest = hashlib.sha256()

    def add(part: object) -> None:
        digest.update(json.dumps(part, ensure_ascii=True).encode() + b"\n")

    add(sorted(tokenizer.get_vocab().items()))
    add(_merges_or_scores(tokenizer))
    # every added token inside a word, between spaces, and with swapped case
    added = [f"a{token}b {token} c\n{token.swapcase()}" for token in sorted(tokenizer.get_added_vocab())]
    for text in (*PROBES, *added):
        ids = [int(token) for token in tokenizer(text, verbose=False)["input_ids"]]
        add([ids, tokenizer.decode(ids, skip_special_tokens=True)])
    return digest.hexdigest()


def _merges_or_scores(tokenizer: PreTrainedTokenizerBase) -> object:
    """Return the parts of a fast tokenizer's model that no probe covers: BPE merges, or unigram tokens with scores."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    model = json.loads(backend.to_str())["model"]
    scores = model["vocab"] if isinstance(model.get("vocab"), list) else None
    return [model.get("merges"), scores]


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, with the next one after a colon, or its type if it has no text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
