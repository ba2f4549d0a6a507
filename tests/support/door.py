"""Check whether a model is refused or served with the right tokens."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedModel

from dynatree.common.errors import StartupError
from dynatree.engine.cpu.native_runner import NativeRunner
from dynatree.engine.engine import Engine
from dynatree.engine.forward.segment import Segment
from dynatree.engine.loading import load_engine
from dynatree.engine.model.composite import loader_of
from dynatree.engine.settings import ModelSettings
from tests.support.model_zoo import save_tokenizer

PROMPT, NEIGHBOUR, NEW = 150, 200, 6
# The two best tokens are a near-tie if their logits differ by less than this many roundings of the largest logit.
NEAR_TIE = 8.0


@dataclass(frozen=True)
class Served:
    """The result for a model.

    Attributes:
        refusal: Reason why the model is not served; None if it is served.
        wrong: Number of compared tokens that differ from the model's own.
        compared: Number of next tokens compared, near-ties left out.
        native: Whether a native program computes it.
    """

    refusal: str | None
    wrong: int = 0
    compared: int = 0
    native: bool = False


def saved(model: PreTrainedModel, folder: Path) -> Path:
    """Save the model as a checkpoint with the embedded pair's tokenizer."""
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@torch.inference_mode()
def served(folder: Path, dtype: str, **settings: object) -> Served:
    """Serve a checkpoint, and compare its next tokens behind a long prompt, alone and beside a longer neighbour."""
    try:
        engine = load_engine(ModelSettings(str(folder), dtype=dtype, sessions=3, **settings))
    except StartupError as error:
        return Served(str(error))
    loader = loader_of(AutoConfig.from_pretrained(folder))
    plain = loader.from_pretrained(folder, dtype=engine.model.dtype, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)
    vocab = plain.config.get_text_config().vocab_size
    context = engine.info.context_length
    length = min(PROMPT + NEW, context)
    tokens = torch.randint(1, vocab, (length,), generator=generator).tolist()
    other = torch.randint(1, vocab, (min(NEIGHBOUR, context),), generator=generator).tolist()
    expected = plain(torch.tensor([tokens]), use_cache=False).logits[0].float()
    wrong = compared = 0
    for neighbour in (None, other):
        got = _decoded(engine, tokens, length - NEW, neighbour).float()
        margin = expected.topk(2).values
        ties = margin[:, 0] - margin[:, 1] < NEAR_TIE * torch.finfo(engine.model.dtype).eps * expected.abs().max()
        differs = got.argmax(-1) != expected.argmax(-1)
        wrong += int((differs & ~ties).sum())
        compared += int((~ties).sum())
    return Served(None, wrong, compared, isinstance(engine.runner, NativeRunner))


def _decoded(engine: Engine, tokens: list[int], prompt: int, neighbour: list[int] | None) -> torch.Tensor:
    """Logits after every token: the prompt in one pass, then one token per pass; a neighbour shares the first two."""
    kv = engine.kv_cache.reserve(len(tokens))
    other = engine.kv_cache.reserve(len(neighbour)) if neighbour else None
    assert kv is not None
    cuts = [0, prompt, *range(prompt + 1, len(tokens) + 1)]
    logits = []
    for step, (start, stop) in enumerate(pairwise(cuts)):
        segments = [Segment(kv, start, tokens[start:stop], range(start, stop))]
        if neighbour and other and step < 2:
            half = len(neighbour) // 2
            begin, end = (0, half) if step == 0 else (half, len(neighbour))
            segments.insert(0, Segment(other, begin, neighbour[begin:end], range(begin, end)))
        logits.append(engine.forward(segments)[-1])
    engine.kv_cache.release(kv)
    if other:
        engine.kv_cache.release(other)
    return torch.cat(logits)
