"""The pair that is measured: the shipped models grown to Pythia's shapes, both in this process, and the prompts.

Engines, verifier, drafter and policies are the services' own; what is missing are their processes and sockets.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from dynatree import embedded
from dynatree.bench.prompts import cut_text, load_tokenizer
from dynatree.bench.shipped_pair.grow import SHAPES, GrownShape, grow
from dynatree.common.limits import MAX_SESSIONS, MAX_TREE_NODES
from dynatree.draft.growth.draft_model import EngineDraftModel
from dynatree.draft.growth.drafter import Drafter
from dynatree.draft.target.target import Target
from dynatree.engine.engine import Engine
from dynatree.engine.gpu.fixed_rows import with_default_rows, with_fixed_rows
from dynatree.engine.loading import load_engine, with_forward_costs
from dynatree.engine.settings import ModelSettings
from dynatree.engine.support.probe import check_outputs
from dynatree.replay.recording import load
from dynatree.verify.verifier import Verifier

ROOT = Path(__file__).resolve().parents[2]
PROMPT_TOKENS = 128
# The services' own numbers; their modules need packages that a GPU machine may lack.
TARGET_MEASURED_ROWS = 256  # verify.settings.AUTO_ROWS
DRAFT_MEASURED_ROWS = 6  # draft.serve_draft.MEASURED_ROWS

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """How much is measured, and of what.

    Attributes:
        shapes: That target and draft are grown to.
        dtype: Of both.
        sessions: Open at once, by part.
        fixed_rows: Of the target; None: what its costs suggest.
        draft_rows: Of the draft; None: its default.
        prompts: Of the speeds.
        new_tokens: Of each of these.
        long_tokens: New ones, of the one long completion.
        equality_prompts: Of the equality.
        equality_tokens: New ones, of each of these.
        prompt_lengths: Of the prompts whose reading is timed.
        rounds: That are profiled.
        tiny: Whether it is no measurement, but a trial of the session itself.
    """

    shapes: tuple[GrownShape, GrownShape]
    dtype: torch.dtype
    sessions: Mapping[int, int]
    fixed_rows: tuple[int, ...] | None
    draft_rows: tuple[int, ...] | None
    prompts: int
    new_tokens: int
    long_tokens: int
    equality_prompts: int
    equality_tokens: int
    prompt_lengths: tuple[int, ...]
    rounds: int
    tiny: bool = False


FULL = Sizes(
    shapes=(SHAPES["pythia-2.8b"], SHAPES["pythia-70m"]),
    dtype=torch.bfloat16,
    sessions={1: MAX_SESSIONS, 2: MAX_SESSIONS, 3: 32},
    fixed_rows=None,
    draft_rows=None,
    prompts=10,
    new_tokens=100,
    long_tokens=1500,
    equality_prompts=20,
    equality_tokens=200,
    prompt_lengths=(128, 512, 1900),
    rounds=20,
)
TINY = Sizes(
    shapes=(
        GrownShape(embedded.target_path(), hidden_size=320, layers=5, heads=4, vocab_size=2056),
        GrownShape(embedded.draft_path(), hidden_size=128, layers=3, heads=2, vocab_size=2056),
    ),
    dtype=torch.float32,
    sessions={1: 4, 2: 4, 3: 4},
    fixed_rows=(32,),
    draft_rows=(32,),
    prompts=2,
    new_tokens=12,
    long_tokens=24,
    equality_prompts=2,
    equality_tokens=12,
    prompt_lengths=(20, 70),
    rounds=3,
    tiny=True,
)


@dataclass(frozen=True)
class Pair:
    """A target and a draft that work together, as two services would."""

    verifier: Verifier
    drafter: Drafter
    target: Target

    @classmethod
    def of(cls, target: Engine, draft: Engine) -> Pair:
        """The pair of two engines on which no session is open."""
        known_ids = max(draft.tokenizer.get_vocab().values()) + 1
        return cls(
            Verifier(target, MAX_TREE_NODES),
            Drafter(EngineDraftModel(draft), MAX_TREE_NODES),
            Target.of(target.info, draft.info, known_ids, ahead=False),
        )


class Models:
    """The pair's checkpoints, grown once a machine, and its engines, loaded once a process.

    Args:
        sizes: What they are.
        device: "cuda" or "cpu".
        folder: Where the checkpoints are, or are to be.
        sessions: Open at once.

    Attributes:
        seconds: What growing and loading took, by its name.
    """

    def __init__(self, sizes: Sizes, device: str, folder: Path, sessions: int) -> None:
        self.sizes = sizes
        self.device = device
        self.sessions = sessions
        self.seconds: dict[str, float] = {}
        self._folder = folder

    @property
    def loaded(self) -> bool:
        """Whether the engines are there."""
        return "target" in vars(self) and "draft" in vars(self)

    @cached_property
    def folders(self) -> tuple[Path, Path]:
        """The checkpoints of target and draft; grown where they are missing."""
        folders = (self._folder / "target", self._folder / "draft")
        for shape, folder in zip(self.sizes.shapes, folders, strict=True):
            if not folder.exists():
                began = time.perf_counter()
                unfinished = folder.with_suffix(".part")
                unfinished.mkdir(parents=True, exist_ok=True)
                grow(shape, unfinished, self.sizes.dtype)
                unfinished.rename(folder)
                self.seconds[f"growing {folder.name}"] = time.perf_counter() - began
        return folders

    @cached_property
    def eager(self) -> Engine:
        """The target with forwards of any size, without graphs, on the same weights and KV cache as `target`."""
        return self._load(self.folders[0], MAX_TREE_NODES, chooses_tokens=True)

    @cached_property
    def target(self) -> Engine:
        """The target as its service would load it."""
        engine, rows = self.eager, self.sizes.fixed_rows
        longest = engine.info.context_length + MAX_TREE_NODES
        began = time.perf_counter()
        if rows is None:
            engine = with_default_rows(engine, self.sessions, longest)
        else:
            engine = with_fixed_rows(engine, rows, self.sessions, longest)
        self.seconds["choosing and capturing the target's rows"] = time.perf_counter() - began
        with torch.inference_mode():
            check_outputs(engine, engine.info.context_length)
        return self._with_costs(engine, TARGET_MEASURED_ROWS if rows is None else max(rows))

    @cached_property
    def draft(self) -> Engine:
        """The draft as its service would load it."""
        engine = self._load(self.folders[1], 2 * MAX_TREE_NODES, chooses_tokens=False, fixed_rows=self.sizes.draft_rows)
        return self._with_costs(engine, DRAFT_MEASURED_ROWS)

    @cached_property
    def pair(self) -> Pair:
        """Both."""
        return Pair.of(self.target, self.draft)

    def free(self) -> None:
        """Give the device's memory back."""
        for name in ("pair", "target", "draft", "eager"):
            vars(self).pop(name, None)
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def _load(
        self,
        folder: Path,
        speculative_slots: int,
        *,
        chooses_tokens: bool,
        fixed_rows: tuple[int, ...] | None = (),
    ) -> Engine:
        began = time.perf_counter()
        engine = load_engine(
            ModelSettings(
                str(folder),
                device=self.device,
                sessions=self.sessions,
                speculative_slots=speculative_slots,
                fixed_rows=fixed_rows,
                chooses_tokens=chooses_tokens,
            )
        )
        self.seconds[f"loading {folder.name}"] = time.perf_counter() - began
        return engine

    def _with_costs(self, engine: Engine, rows: int) -> Engine:
        began = time.perf_counter()
        engine = with_forward_costs(engine, rows)
        self.seconds[f"measuring {engine.info.name}"] = time.perf_counter() - began
        return engine


@dataclass(frozen=True)
class Text:
    """Prompts of one source."""

    source: str
    prompts: tuple[Prompt, ...]


def prompts(count: int, length: int = PROMPT_TOKENS) -> list[tuple[str, Prompt]]:
    """So many prompts, each with its source.

    First the recorded ones of books, of which those of the book that the pair was not trained on come first, then
    windows of the project's own documents.
    """
    texts = [*_of_books(), _of_documents(max(count, 8), length)]
    pairs = [(text.source, prompt[:length]) for text in texts for prompt in text.prompts]
    return pairs[:count]


def _of_books() -> list[Text]:
    recording = load(ROOT / "benchmarks" / "replay" / "books.npz")
    sources = [each["file"].removesuffix(".txt") for each in recording.header["texts"]]
    return [
        Text(source, tuple(run.prompt_ids for run in recording.runs if run.text == number))
        for number, source in enumerate(sources)
    ]


def _of_documents(count: int, length: int) -> Text:
    folder = ROOT / "docs" / "explanation"
    text = "\n\n".join(path.read_text() for path in sorted(folder.glob("*.md")))
    encode = load_tokenizer(embedded.NAME).encode
    return Text("docs/explanation", cut_text(text, count, length, encode))


def long_prompt(length: int) -> Prompt:
    """One of the project's documents, as long as it needs to be."""
    return _of_documents(1, length).prompts[0]
