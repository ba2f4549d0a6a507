"""The tokenizers of GGUF files where transformers would make another one than the checkpoint's own.

A byte-level tokenizer splits a text before BPE, as `tokenizer.ggml.pre` says. transformers splits like GPT-2 if it does
not know that name, composes no characters, takes no token whole that BPE would not reach, and gives some control tokens
ids of their own. The names are llama.cpp's (`llama_vocab::impl::load`). A SentencePiece tokenizer merges by the lengths
of pieces where a file has no scores, begins a text with a space also where a file denies it, and keeps the white space
behind Phi-3's control tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase
from transformers.integrations.gguf import reader
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.tokenization_utils_base import generate_merges

from dynatree.common.errors import StartupError

_GPT2 = frozenset({"gpt-2", "mpt", "olmo", "phi-2"})
_DIGITS = frozenset({"command-r", "refact", "smollm", "starcoder"})  # each digit is apart, and the rest like GPT-2's
_LIKE = {"stablelm2": "qwen2"}
_COMPOSED = frozenset({"command-r", "deepseek-r1-qwen", "qwen2", "qwen35"})  # whose texts are in Unicode's form NFC
# These take a part whole if it is a token. Their texts begin with the token bos unless the file denies it.
_WHOLE = frozenset({"falcon-h1", "falcon3", "lfm2", "llama-bpe", "llama-v3", "llama3", "midm-2.0", "pixtral", "tekken"})
_KNOWN = _GPT2 | _DIGITS | _LIKE.keys() | GGUF_PRE_TOKENIZER_SPLITS.keys()
_BYTE_LEVEL, _SENTENCEPIECE = "gpt2", "llama"
_SPACE = "\u2581"  # stands for a space in SentencePiece's tokens
_TURNS = ("<end_of_turn>", "<|end|>", "<|eom_id|>", "<|eot_id|>", "<|im_end|>")  # which end an assistant's turn
_TEXTS = ("<|end_of_text|>", "<|endoftext|>")
_PHI3_UNSTRIPPED = frozenset({"<unk>", "<s>", "<|endoftext|>"})  # behind which white space counts
_USUAL, _CONTROL, _USER_DEFINED = 1, 3, 4


def check_split(name: str, values: Mapping[str, Any]) -> None:
    """Refuse a file whose texts are split in a way that is not known.

    Args:
        name: Name of the file.
        values: Values of its header.

    Raises:
        StartupError: The way is not known.
    """
    kind = values.get("tokenizer.ggml.pre")
    if values.get("tokenizer.ggml.model") == _BYTE_LEVEL and kind not in _KNOWN:
        raise StartupError(
            f"model {name} cannot be served: its tokenizer.ggml.pre is {kind!r:.40}, by which DynaTree cannot split "
            "texts; the checkpoint's own folder can be served"
        )


def mend(tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Change the tokenizer that transformers has made of a file to the checkpoint's own.

    Raises:
        StartupError: The file's texts are split in a way that is not known, or its tokenizer is a unigram model.
    """
    values, _ = reader.read_gguf_metadata(str(path), ("tokenizer.ggml.tokens",))
    model = values.get("tokenizer.ggml.model")
    if model == _SENTENCEPIECE:
        _mend_sentencepiece(tokenizer, path.name, values)
    elif model == _BYTE_LEVEL:
        check_split(path.name, values)
        _mend_byte_level(tokenizer, values)


def _mend_sentencepiece(tokenizer: Any, name: str, values: dict[str, Any]) -> None:
    """Mend the order of merges, the first space, and the white space behind Phi-3's control tokens.

    A piece's score is its rank. Where llama.cpp's converter had no scores, all are equal, and the ids are the ranks.
    """
    architecture: str = values["general.architecture"]
    if architecture.startswith("gemma"):
        return
    kinds = values.get("tokenizer.ggml.token_type") or []
    scores = values.get("tokenizer.ggml.scores") or []
    usual = {score for score, kind in zip(scores, kinds, strict=False) if kind == _USUAL}
    has_merges = "tokenizer.ggml.merges" in values
    if not has_merges and any(score % 1 for score in usual):
        raise StartupError(f"model {name} cannot be served: its tokenizer is a unigram model of SentencePiece")
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    if not has_merges and len(usual) == 1:
        vocabulary = content["model"]["vocab"]
        merges = generate_merges(vocabulary, {token: -number for token, number in vocabulary.items()})
        content["model"]["merges"] = [list(pair) for pair in merges]
    if architecture == "phi3":
        for token in content["added_tokens"]:
            token["rstrip"] = token["content"] not in _PHI3_UNSTRIPPED
    mended = Tokenizer.from_str(json.dumps(content))
    if values.get("tokenizer.ggml.add_space_prefix") is False:
        mended.normalizer = normalizers.Replace(" ", _SPACE)
        mended.pre_tokenizer = None
        mended.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer._tokenizer = mended


def _mend_byte_level(tokenizer: Any, values: dict[str, Any]) -> None:
    kind = values["tokenizer.ggml.pre"]
    mended = Tokenizer.from_str(json.dumps(_with_own_tokens(json.loads(tokenizer.backend_tokenizer.to_str()), values)))
    if kind in _DIGITS:
        mended.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif kind in _LIKE:
        mended.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[_LIKE[kind]]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    if kind in _COMPOSED:
        mended.normalizer = normalizers.NFC()
    if kind in _WHOLE:
        mended.model.ignore_merges = True
    tokenizer._tokenizer = mended
    for name, token in tokenizer.special_tokens_map.items():
        if isinstance(token, str) and mended.token_to_id(token) is None:
            setattr(tokenizer, name, None)
    if kind in _WHOLE and "tokenizer.ggml.add_bos_token" not in values and tokenizer.bos_token is not None:
        tokenizer.add_bos_token = True
    if tokenizer.bos_token is not None:
        tokenizer.update_post_processor()


def end_tokens(tokenizer: PreTrainedTokenizerBase, path: Path) -> set[int]:
    """Return the tokens that end a completion besides `tokenizer.ggml.eos_token_id`.

    A file names them, its chat template ends turns with them, or they end texts by their names, as in llama.cpp. The
    generation_config of a folder has them too.
    """
    values, _ = reader.read_gguf_metadata(str(path))
    named = {values.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eot", "eom")}
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    added = tokenizer.get_added_vocab()
    ends = {*_TEXTS, *(token for token in _TURNS if token in template)}
    return {each for each in named if isinstance(each, int)} | {added[token] for token in ends if token in added}


def _with_own_tokens(content: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a tokenizer.json in which each control and user-defined token of a file has its own id.

    llama.cpp marks a few usual tokens as control tokens by mistake. Real ones have brackets, or bytes only.
    """
    tokens: list[str] = values["tokenizer.ggml.tokens"]
    kinds: list[int] = values.get("tokenizer.ggml.token_type") or []
    vocabulary: dict[str, int] = content["model"]["vocab"]
    names = {number: token for token, number in vocabulary.items()}
    ids = {token: number for number, token in enumerate(tokens)}
    added = {each["id"]: each for each in content["added_tokens"] if each["id"] < len(tokens)}
    for number, (token, kind) in enumerate(zip(tokens, kinds, strict=False)):
        own = (token.startswith("<") and token.endswith(">")) or kind == _USER_DEFINED or names.get(number) == token
        if number in added or kind not in (_CONTROL, _USER_DEFINED) or not own:
            continue
        if names.get(number) != token:
            spelt = names.get(number, token)
            vocabulary.pop(spelt, None)
            if spelt in ids:  # a usual token, whose id the other one has taken
                vocabulary[spelt] = ids[spelt]
            vocabulary[token] = number
        whole = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        added[number] = {"id": number, "content": token, **whole, "special": kind == _CONTROL}
    content["added_tokens"] = [added[number] for number in sorted(added)]
    return content
