"""Small tokenizers of the kinds that models use, and texts in many scripts."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dynatree import embedded

TEXTS = {
    "Latin": "Well, he didn't say “naïve café” — it was 5 °C, and Ångström's  Straße.\n\tThe end ...",
    "Cyrillic": "Съешь ещё этих мягких французских булок, да выпей чаю.",
    "Greek": "Η γρήγορη αλεπού πηδά πάνω από τον σκύλο· ναι;",
    "Arabic": "مرحبا بالعالم، كيف حالك اليوم؟",
    "Hebrew": "שלום עולם, מה שלומך היום?",
    "Hindi": "नमस्ते दुनिया, यह एक छोटा वाक्य है।",
    "Thai": "สวัสดีชาวโลก นี่คือประโยคสั้นๆ",
    "Chinese": "这是一个句子。今天天气很好,我们去公园。",
    "Japanese": "日本語の文章です。カタカナとひらがな、漢字。",
    "Korean": "한국어 문장입니다. 오늘 날씨가 좋네요.",
    "emoji": "🙂🙂 👩\u200d👩\u200d👧\u200d👦 🇪🇺 ❤\ufe0f 👍🏽 ok",
}
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁the", "▁he", "▁a", "▁", "▁▁", "the", "he", "said", "▁said", "的", "▁日本", "é", "ещё", "\n", "\ufffd", "।"]
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,;:!?'\"-"


def _fast(tokenizer: Tokenizer, **special: str) -> PreTrainedTokenizerBase:
    special = special or {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    fast.add_tokens([AddedToken(text, normalized=False) for text in ("naïve café", "né", "<tool>")])
    return fast


def embedded_pair() -> PreTrainedTokenizerBase:
    """The embedded pair's own byte-level tokenizer."""
    return AutoTokenizer.from_pretrained(embedded.target_path())


def byte_level() -> PreTrainedTokenizerBase:
    """Byte-level, as SmolLM2's, Llama 3's and Qwen's: single digits, and tokens that begin or end inside characters."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS.values(), trainer)
    return _fast(tokenizer)


def _byte_fallback(decoder: list[decoders.Decoder], normalizer: normalizers.Normalizer) -> PreTrainedTokenizerBase:
    tokens = list(dict.fromkeys([*SPECIAL, *BYTES, "▁", *LETTERS, "th", "sa", "id", *WORDS]))
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("▁", "▁"), ("h", "e"), ("s", "a"), ("i", "d")]
    merges += [("sa", "id"), ("▁", "said")]
    vocabulary = {token: id_ for id_, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), *decoder])
    return _fast(tokenizer)


def llama_2() -> PreTrainedTokenizerBase:
    """Byte fallback; encoding prepends a space and a special token, and decoding drops the space again."""
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = _byte_fallback([decoders.Fuse(), decoders.Strip(" ", 1, 0)], spaces)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return tokenizer


def phi_3() -> PreTrainedTokenizerBase:
    """Byte fallback without a prepended space, but decoding drops a leading space; as in Mistral's third version."""
    return _byte_fallback([decoders.Fuse(), decoders.Strip(" ", 1, 0)], normalizers.Replace(" ", "▁"))


def gemma() -> PreTrainedTokenizerBase:
    """Byte fallback; encoding prepends nothing, and decoding drops nothing."""
    return _byte_fallback([decoders.Fuse()], normalizers.Replace(" ", "▁"))


def unigram() -> PreTrainedTokenizerBase:
    """Unigram with a metaspace and byte fallback."""
    tokens = list(dict.fromkeys([*SPECIAL, *BYTES, "▁", *LETTERS, *WORDS]))
    tokenizer = Tokenizer(models.Unigram([(token, -len(BYTES) / len(token)) for token in tokens], 0, True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return _fast(tokenizer)


def word_piece(clean_up: bool) -> PreTrainedTokenizerBase:
    """WordPiece, whose `decode` puts a space before each word and removes some if `clean_up` is set."""
    words = [
        "[UNK]",
        *LETTERS,
        *(f"##{letter}" for letter in LETTERS),
        *["the", "said", "##aid", "'s", "n't", "日", "ещё"],
    ]
    tokenizer = Tokenizer(models.WordPiece({word: id_ for id_, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    fast = _fast(tokenizer, unk_token="[UNK]")
    fast.clean_up_tokenization_spaces = clean_up
    return fast


def words() -> PreTrainedTokenizerBase:
    """Whole words without a decoder, so that decoding puts spaces between them."""
    tokenizer = Tokenizer(models.WordLevel({word: id_ for id_, word in enumerate([*SPECIAL, *LETTERS])}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return _fast(tokenizer)


def suffixes() -> PreTrainedTokenizerBase:
    """BPE whose words end in a suffix, as in the first GPT's tokenizer."""
    words = [*SPECIAL, *LETTERS, *(f"{letter}</w>" for letter in LETTERS), "said</w>", "the</w>", "th"]
    tokenizer = Tokenizer(
        models.BPE({word: id_ for id_, word in enumerate(words)}, [], unk_token="<unk>", end_of_word_suffix="</w>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    return _fast(tokenizer)


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "embedded": embedded_pair,
    "byte level": byte_level,
    "llama 2": llama_2,
    "phi 3": phi_3,
    "gemma": gemma,
    "unigram": unigram,
    "word piece": lambda: word_piece(clean_up=False),
    "tidy word piece": lambda: word_piece(clean_up=True),
    "words": words,
    "suffixes": suffixes,
    "bytes": ByT5Tokenizer,
}


def bytes_of(tokenizer: PreTrainedTokenizerBase, id_: int) -> bytes:
    """The bytes that a token of a tokenizer with byte fallback adds in the middle of a text."""
    token = tokenizer.convert_ids_to_tokens(id_)
    if token in BYTES:
        return bytes.fromhex(token[3:5])
    return b"" if token is None or id_ in tokenizer.all_special_ids else token.replace("▁", " ").encode()
