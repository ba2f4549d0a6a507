"""The pair that is measured: the shipped models grown to Pythia's shapes, both in this process, and the prompts.

Engines, verifier, drafter and policies are the services' own; what is missing are their processes and sockets.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from keeping import ROOT

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

PROMPT_TOKENS = 128
# The services' own numbers; their modules need packages that a GPU machine may lack.
TARGET_MEASURED_ROWS = 256  # verify.settings.AUTO_ROWS
DRAFT_MEASURED_ROWS = 6  # draft.serve_draft.MEASURED_ROWS

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """How much is measured, and of what; `tiny` is no measurement, but a trial of the session itself."""

    shapes: tuple[GrownShape, GrownShape]  # of target and draft
    dtype: torch.dtype
    sessions: Mapping[int, int]  # open at once, by part
    fixed_rows: tuple[int, ...] | None  # of the target; None: what its costs suggest
    draft_rows: tuple[int, ...] | None  # None: the draft's default
    prompts: int  # of speeds
    new_tokens: int
    equality_prompts: int
    equality_tokens: int
    tiny: bool = False


FULL = Sizes(
    shapes=(SHAPES["pythia-2.8b"], SHAPES["pythia-70m"]),
    dtype=torch.bfloat16,
    sessions={1: MAX_SESSIONS, 2: MAX_SESSIONS, 3: 32},
    fixed_rows=None,
    draft_rows=None,
    prompts=10,
    new_tokens=100,
    equality_prompts=20,
    equality_tokens=200,
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
    equality_prompts=2,
    equality_tokens=12,
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
    """The pair's checkpoints in a folder, grown once a machine, and its engines, loaded once a process.

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
                with self._timed(f"growing {folder.name}"):
                    unfinished = folder.with_suffix(".part")
                    unfinished.mkdir(parents=True, exist_ok=True)
                    grow(shape, unfinished, self.sizes.dtype)
                    unfinished.rename(folder)
        return folders

    @cached_property
    def eager(self) -> Engine:
        """The target with forwards of any size, without graphs, on the same weights and KV cache as `target`."""
        return self._load(self.folders[0], MAX_TREE_NODES, chooses_tokens=True, fixed_rows=())

    @cached_property
    def target(self) -> Engine:
        """The target as its service would load it."""
        eager, rows = self.eager, self.sizes.fixed_rows
        sizes = self.sessions, eager.info.context_length + MAX_TREE_NODES
        with self._timed("choosing and capturing the target's rows"), torch.inference_mode():
            engine = with_default_rows(eager, *sizes) if rows is None else with_fixed_rows(eager, rows, *sizes)
            check_outputs(engine, engine.info.context_length)
        with self._timed("measuring the target"):
            return with_forward_costs(engine, TARGET_MEASURED_ROWS if rows is None else max(rows))

    @cached_property
    def draft(self) -> Engine:
        """The draft as its service would load it."""
        rows = self.sizes.draft_rows
        engine = self._load(self.folders[1], 2 * MAX_TREE_NODES, chooses_tokens=False, fixed_rows=rows)
        with self._timed("measuring the draft"):
            return with_forward_costs(engine, DRAFT_MEASURED_ROWS)

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

    def _load(self, folder: Path, speculative_slots: int, **settings: Any) -> Engine:
        given = {"device": self.device, "sessions": self.sessions, "speculative_slots": speculative_slots}
        with self._timed(f"loading {folder.name}"):
            return load_engine(ModelSettings(str(folder), **given, **settings))

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - began, 2)


def prompts(count: int) -> list[tuple[str, Prompt]]:
    """So many prompts, each with its source.

    First the recorded ones of books, of which those of the book that the pair was not trained on come first, then
    windows of the project's own documents.
    """
    recording = load(ROOT / "benchmarks" / "replay" / "books.npz")
    sources = [each["file"].removesuffix(".txt") for each in recording.header["texts"]]
    runs = sorted(recording.runs, key=lambda run: run.text)
    of_books = [(sources[run.text], run.prompt_ids[:PROMPT_TOKENS]) for run in runs]
    pages = sorted((ROOT / "docs" / "explanation").glob("*.md"))
    text = "\n\n".join(page.read_text() for page in pages)
    windows = cut_text(text, max(count, 8), PROMPT_TOKENS, load_tokenizer(embedded.NAME).encode)
    return [*of_books, *(("docs/explanation", window) for window in windows)][:count]
