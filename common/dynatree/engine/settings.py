"""Settings of the model to load; they need no torch, so that a command line is checked at once."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from dynatree.common.errors import StartupError
from dynatree.common.limits import MAX_SESSIONS

DTYPES = ("float32", "bfloat16", "float16")
WEIGHTS = {"int8": 8, "int4": 4}  # bits of `--weights`
_SELF = "self"


def copied(draft_model: str) -> str | None:
    """Return the weights of the target's own copy, if `--draft-model` names the copy: "int4" of "self:int4".

    Raises:
        StartupError: There is no copy with such weights.
    """
    name, _, weights = draft_model.partition(":")
    if name != _SELF:
        return None
    if weights not in WEIGHTS:
        words = " or ".join(f"{_SELF}:{each}" for each in WEIGHTS)
        raise StartupError(f"--draft-model {draft_model} names no copy of the target; expected {words}")
    return weights


def is_gguf(model: str) -> bool:
    """Whether a model is a file, and so a GGUF file by any name; its first bytes are checked when it is read."""
    return Path(model).is_file()


@dataclass(frozen=True)
class ModelSettings:
    """The model to load and how to load it.

    Attributes:
        model: A hub name or a local path.
        device: A torch device, or "auto" for the first GPU if any.
        dtype: One of `DTYPES`, or "auto" for the checkpoint's own.
        weights: A key of `WEIGHTS`, to which weights of linear layers are rounded, or "auto" for the checkpoint's own.
        sessions: Sequences that can be open at once.
        kv_tokens: Slots of the KV cache; None means the sessions' largest need, limited by the memory.
        max_context: Longest sequence that is served, in tokens, at most the model's context length if the model chooses
            tokens; None means the model's context length.
        speculative_slots: KV slots of each session for uncommitted tokens.
        prefix_cache: Whether recurrent layers keep states of ended sessions.
        fixed_rows: Row counts that forward passes are padded to, and captured for on a GPU. A single count makes
            tokens independent of the tree, the batch and its other sessions. An empty tuple means no padding. None
            means the device's default: no padding on a CPU, and on a GPU the count that its measured costs suggest.
        fixed_rows_file: File that keeps this count across starts; None means one in the user's cache folder.
            Refused where no count is measured.
        measured_rows: Rows of the largest forward pass whose cost is measured; 0 means no measurement.
        chooses_tokens: Whether the model is a target, whose generation_config is adopted or refused. The
            generation_config of a draft model does not matter, because a draft only guesses.
        threads: Number of CPU threads; None means torch's default.
        resident_layers: Number of layers that stay in memory; the other layers are offloaded. None means all layers,
            if they fit.
        layer_cache: Folder of the layer caches; None means the user's cache folder.
        tensor_parallel: Number of devices over which every layer is split.
        copy: The model's own copy, which drafts in another process of this machine once this model serves. Memory is
            left for it.

    Raises:
        StartupError: Two settings exclude each other.
    """

    model: str
    device: str = "auto"
    dtype: str = "auto"
    weights: str = "auto"
    sessions: int = MAX_SESSIONS
    kv_tokens: int | None = None
    max_context: int | None = None
    speculative_slots: int = 256
    prefix_cache: bool = True
    fixed_rows: tuple[int, ...] | None = None
    fixed_rows_file: Path | None = None
    measured_rows: int = 0
    chooses_tokens: bool = True
    threads: int | None = None
    resident_layers: int | None = None
    layer_cache: Path | None = None
    tensor_parallel: int = 1
    copy: ModelSettings | None = None

    def __post_init__(self) -> None:
        if self.weights != "auto":
            self._check_weights()
        if self.tensor_parallel > 1:
            self._check_parallel()

    def _check_weights(self) -> None:
        if is_gguf(self.model) and self.chooses_tokens:
            name = self.model.rpartition("/")[2]
            raise StartupError(
                f"model {name} is a GGUF file, which has its own precision: it cannot be rounded to {self.weights}"
            )
        if self.tensor_parallel > 1:
            raise StartupError(f"--weights {self.weights} and --tensor-parallel do not go together")

    def _check_parallel(self) -> None:
        if is_gguf(self.model):
            raise StartupError("--tensor-parallel: the weights of a GGUF file are not split; expected a folder")
        if find_spec("accelerate") is None:
            raise StartupError("--tensor-parallel needs the package accelerate: pip install 'dynatree[parallel]'")
        others = (
            ("--resident-layers", self.resident_layers is not None),
            ("--layer-cache", self.layer_cache is not None),
            ("--fixed-rows", bool(self.fixed_rows)),
            ("--fixed-rows-file", self.fixed_rows_file is not None),
        )
        for option, given in others:
            if given:
                raise StartupError(f"--tensor-parallel and {option} cannot be combined")
        if self.device not in ("auto", "cpu", "cuda"):
            raise StartupError(f"--tensor-parallel uses the first devices of a machine, but --device is {self.device}")
