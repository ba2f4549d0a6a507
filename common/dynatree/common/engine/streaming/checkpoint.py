"""A checkpoint's tensors, read one by one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from dynatree.common.engine.not_finite import check_weights
from dynatree.common.errors import StartupError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SAMPLES = 16  # of each tensor
_SAMPLE_BYTES = 512


class Checkpoint:
    """Tensors by the names that the model has for them, in one dtype.

    Attributes:
        name: For messages.
    """

    def __init__(self, folder: Path, name: str, model: PreTrainedModel, prefix: str) -> None:
        """Find the tensors.

        Args:
            folder: That holds safetensors files.
            name: For messages.
            model: Whose they are; in its dtype they are read.
            prefix: Of the layers' names in the model: `prefix.N.` begins those of layer N.

        Raises:
            StartupError: There are no safetensors files.
        """
        self.name = name
        self._folder = folder
        self._dtype = model.dtype
        self._prefix = prefix
        try:
            if (folder / _INDEX).exists():
                files: dict[str, str] = json.loads((folder / _INDEX).read_text())["weight_map"]
            else:
                with safe_open(folder / _SINGLE, "pt") as file:
                    files = dict.fromkeys(file.keys(), _SINGLE)
        except (OSError, KeyError, ValueError) as error:
            raise StartupError(f"model {name}: layers are streamed from safetensors files, and it has none") from error
        named = _names_in(model, files)
        self._files = {ours: (files[theirs], theirs) for theirs, ours in named.items()}

    def identity(self) -> str:
        """What changes with the dtype, and with the files: their names, sizes, times, and samples of every tensor.

        Times alone are not enough: archives, images and copies keep or unify them.
        """
        parts = hashlib.sha256(str(self._dtype).encode())
        for name in sorted({file for file, _ in self._files.values()}):
            stat = (self._folder / name).stat()
            parts.update(f"\n{name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
            for sample in _samples(self._folder / name):
                parts.update(sample)
        return parts.hexdigest()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """Some tensors by name.

        Raises:
            StartupError: The checkpoint lacks one, or one is not finite.
        """
        missing = [name for name in names if name not in self._files]
        if missing:
            raise StartupError(
                f"model {self.name}: its layers cannot be streamed, because its checkpoint does not hold "
                f"{missing[0]} as the model has it"
            )
        found = {}
        for path in sorted({self._files[name][0] for name in names}):
            with safe_open(self._folder / path, "pt") as file:
                for name in names:
                    if self._files[name][0] == path:
                        found[name] = file.get_tensor(self._files[name][1]).to(self._dtype)
        check_weights(self.name, found.items())
        return found

    def layer(self, layer: int) -> Mapping[str, Tensor]:
        """The tensors of one layer, by their names in the layer."""
        prefix = f"{self._prefix}.{layer}."
        names = [name for name in self._files if name.startswith(prefix)]
        return {name.removeprefix(prefix): tensor for name, tensor in self.read(names).items()}


def _samples(path: Path) -> Iterator[bytes]:
    """A safetensors file's header, and bytes of each of its tensors, from its first to its last."""
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        size = int.from_bytes(file.read(8), "little")
        header = file.read(size)
        yield header
        for tensor in json.loads(header).values():
            begin, end = tensor.get("data_offsets", (0, 0))  # metadata have none
            for sample in range(_SAMPLES):
                at = begin + (end - begin - _SAMPLE_BYTES) * sample // (_SAMPLES - 1)
                yield os.pread(file.fileno(), min(_SAMPLE_BYTES, end - begin), 8 + size + max(at, begin))


def _names_in(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """What a model calls the tensors of its checkpoint; without those that it makes of others."""
    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    state = model.state_dict()
    found = {}
    for name in names:
        ours, converted = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if converted is None:
            found[name] = ours
    return found
