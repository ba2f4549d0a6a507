"""Tests the matching of two tokenizers' tokens, and the draft's context in its own tokens."""

from __future__ import annotations

import math
import random
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from tokenizers import normalizers
from transformers import PreTrainedTokenizerBase

from dynatree import embedded
from dynatree.common.errors import StartupError
from dynatree.common.sampling import Sampling
from dynatree.common.tree import ROOT
from dynatree.draft.growth.drafter import Drafter
from dynatree.draft.growth.shared_tokens import SharedTokens
from dynatree.draft.policies.growing_tree import GrowingTree, Proposal, TrieNode
from dynatree.draft.serve_ngrams import NoModel
from dynatree.draft.text.translated_context import TranslatedContext
from dynatree.draft.text.translation import NONE, Translation
from dynatree.engine.kv.kv_range import KVRange
from dynatree.engine.model.tokenizer import load_tokenizer
from tests.support.other_tokenizers import Letters
from tests.support.tokenizer_zoo import TEXTS, TOKENIZERS, byte_level, bytes_of, gemma, llama_2

EMBEDDED = load_tokenizer(str(embedded.target_path()))
KINDS = ("byte level", "llama 2", "phi 3", "gemma", "unigram")
PLAIN = {name: text for name, text in TEXTS.items() if name != "Latin"}  # that one has added tokens, which begin words


def text_of(context: TranslatedContext) -> bytes:
    """The bytes of the draft's tokens, without those that its tokenizer puts before a text."""
    translation = context.translation
    data = b"".join(translation.draft_bytes[id_] for id_ in context.token_ids[len(translation.prefix) :])
    return data.removeprefix(b" ") if translation.adds_space else data


@pytest.mark.parametrize("kind", KINDS)
def test_a_context_is_the_drafts_encoding_of_the_text(kind: str) -> None:
    """Whole, and token by token, so that texts end inside of characters and words."""
    draft = TOKENIZERS[kind]()
    translation = Translation.of(EMBEDDED, draft, len(draft))
    for text in PLAIN.values():
        ids = EMBEDDED(text)["input_ids"]
        encoded = [*translation.prefix, *draft(text, add_special_tokens=False)["input_ids"]]
        assert TranslatedContext(translation, ids).token_ids == encoded
        context = TranslatedContext(translation, ids[:1])
        for count in range(1, len(ids)):
            before = list(context.token_ids)
            counterpart = translation.draft_id(ids[count])
            same = context.push(ids[count : count + 1])
            assert context.token_ids[:same] == [*before, counterpart][:same]
            assert context.token_ids[: same + 1] != [*before, counterpart][: same + 1] or same == len(before) + 1
            assert text_of(context) == b"".join(translation.bytes_of(id_) for id_ in ids[: count + 1])
        assert context.token_ids == encoded


def test_a_context_that_grows_keeps_its_tokens_up_to_the_last_word() -> None:
    draft = byte_level()
    translation = Translation.of(EMBEDDED, draft, len(draft))
    context = TranslatedContext(translation, EMBEDDED("many words. " * 200)["input_ids"])
    before = list(context.token_ids)
    for id_ in EMBEDDED(" hello")["input_ids"]:
        context.push([id_])
    assert context.token_ids[: len(before) - 1] == before[:-1]


def test_tokens_are_matched_one_to_one_by_their_bytes() -> None:
    for target, draft in ((EMBEDDED, gemma()), (gemma(), byte_level())):
        translation = Translation.of(target, draft, len(draft))
        special = {*target.all_special_ids}
        pairs = [(id_, other) for id_, other in enumerate(translation.draft_ids) if other != NONE]
        assert len({other for _, other in pairs}) == len(pairs) > 100
        for id_, other in pairs:
            assert id_ == target.eos_token_id or (
                id_ not in special and translation.target_bytes[id_] == translation.draft_bytes[other]
            )
        assert translation.draft_id(target.eos_token_id) == draft.eos_token_id
    fallback = Translation.of(gemma(), EMBEDDED, 300)
    assert max(fallback.draft_ids) < 300  # the draft embeds no more
    letter = gemma().convert_tokens_to_ids("a")
    assert bytes_of(gemma(), letter) == b"a"
    assert fallback.draft_id(letter) != NONE
    assert fallback.draft_id(gemma().convert_tokens_to_ids("<0x61>")) == NONE  # the letter has its counterpart
    assert fallback.draft_id(10**6) == NONE  # padding


def test_special_tokens_stand_in_the_context_by_name() -> None:
    target, draft = byte_level(), llama_2()
    translation = Translation.of(target, draft, len(draft))
    mark, begin = target.convert_tokens_to_ids(["<|im_start|>", "<s>"])
    assert translation.draft_id(mark) == NONE
    a = target("a", add_special_tokens=False)["input_ids"]
    context = TranslatedContext(translation, [begin, *a, mark, *a])
    own = [draft.convert_tokens_to_ids(name) for name in ("<s>", "<|im_start|>")]
    encoded = draft("a", add_special_tokens=False)["input_ids"]
    assert context.token_ids == [own[0], *encoded, own[1], *encoded]
    nameless = TranslatedContext(Translation.of(target, EMBEDDED, len(EMBEDDED)), [begin, mark])
    assert nameless.token_ids == [EMBEDDED.bos_token_id]  # a draft reads at least one token
    again = [*context.token_ids, NONE]
    assert context.push([mark]) == len(again) - 1
    assert context.token_ids == [*again[:-1], own[1]]


@pytest.mark.parametrize("kind", ["word piece", "words", "suffixes"])
def test_a_tokenizer_whose_tokens_are_not_the_texts_bytes_is_refused(kind: str) -> None:
    other: PreTrainedTokenizerBase = TOKENIZERS[kind]()
    for pair, role in (((other, EMBEDDED), "target"), ((EMBEDDED, other), "draft")):
        with pytest.raises(StartupError, match=f"the {role} model's tokenizer cannot be matched"):
            Translation.of(*pair, len(pair[1]))


def test_bytes_that_are_no_text() -> None:
    """Broken characters, among words, become tokens of one byte, and text after them is text again."""
    choose = random.Random(0)
    single = {
        data: id_ for id_, data in enumerate(Translation.of(EMBEDDED, EMBEDDED, 2048).target_bytes) if data[1:] == b""
    }
    for draft in (gemma(), byte_level(), llama_2()):
        translation = Translation.of(EMBEDDED, draft, len(draft))
        for _ in range(20):
            data = bytes(choose.choice(b"ab c\xe2\x82\xac\xf0\x9f\xff") for _ in range(60))
            known = [single[bytes([byte])] for byte in data if bytes([byte]) in single]
            cuts = [1, *sorted(choose.sample(range(2, len(known)), 5)), len(known)]
            context = TranslatedContext(translation, known[:1])
            for start, stop in pairwise(cuts):
                context.push(known[start:stop])
            assert text_of(context) == b"".join(translation.bytes_of(id_) for id_ in known)


def test_a_normaliser_that_changes_the_text() -> None:
    """The context is the draft's own encoding; the ends of changed words alone are unknown."""
    draft = byte_level()
    draft.backend_tokenizer.normalizer = normalizers.NFC()
    translation = Translation.of(EMBEDDED, draft, len(draft))
    text = "the cafe\u0301 said " * 20
    context = TranslatedContext(translation, EMBEDDED("x")["input_ids"])
    for id_ in EMBEDDED(text)["input_ids"]:
        context.push([id_])
    assert text_of(context).decode() == "x" + unicodedata.normalize("NFC", text)
    assert context.push(EMBEDDED("he")["input_ids"]) > len(context.token_ids) - 20


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_the_mass_of_tokens_that_are_not_shared_is_lost(temperature: float) -> None:
    shared = SharedTokens.of(Letters.translation("abcd", "dcaz"), torch.device("cpu"))
    logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    found, known = shared.logits(logits, Sampling(temperature=temperature))
    expected = (logits / (temperature or 1.0)).log_softmax(-1)[:, [2, 3, 1, 0]]
    expected[:, 1] = -math.inf
    torch.testing.assert_close((found / (temperature or 1.0)).log_softmax(-1) + known, expected)


def test_below_a_token_that_the_draft_lacks_nothing_is_proposed() -> None:
    shared = SharedTokens.of(Letters.translation("abcd", "dcaz"), torch.device("cpu"))
    tree = GrowingTree(TrieNode(0), [0])
    nodes = [tree.add(ROOT, Proposal(0, -1.0)), tree.add(ROOT, Proposal(1, -1.0))]
    nodes.append(tree.add(nodes[1], Proposal(2, -1.0)))
    for node in nodes:
        tree.node(node).proposals = (Proposal(1, -0.5), Proposal(3, -1.0))
    shared.restrict(tree, nodes)
    assert [tree.node(node).proposals for node in nodes] == [(Proposal(3, -1.0),), (), ()]


@pytest.mark.parametrize(
    ("spelt", "prompt", "context"), [((b"abcde", b"f"), [0] * 20, 200), ((b"", b"f"), [0] * 40 + [1] * 20, 60)]
)
def test_a_cached_prefix_fits_into_the_range_that_is_reserved(
    spelt: tuple[bytes, bytes], prompt: list[int], context: int
) -> None:
    """The range is sized by the target's tokens, of which the draft's encoding may have more or fewer."""

    class Model(NoModel):
        context_length = context

        def reserve(self, slots: int, prompt_ids: Sequence[int], principal: str) -> tuple[KVRange | None, int]:
            assert len(prompt_ids) <= slots, "the prefix cache copies up to as many slots"
            return super().reserve(slots, prompt_ids, principal)

    translation = replace(Letters.translation("gh", "abcdef"), target_bytes=spelt)
    drafter = Drafter(Model(), 4, translation=translation)
    session = drafter.open(prompt, Sampling(), vocab_size=2, limit=len(prompt) + 1)
    assert drafter.reach(session) <= 0, "the draft model does not read it either"
