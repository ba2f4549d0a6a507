"""A checkpoint's tensors, read one by one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from dynatree.common.errors import StartupError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class Checkpoint:
    """Tensors by the names that the model has for them, in one dtype.

    Attributes:
        name: For messages.
        identity: Changes with the files and the dtype.
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
        stats = [(each, (folder / each).stat()) for each in sorted(set(files.values()))]
        parts = [str(model.dtype), *(f"{each} {stat.st_size} {stat.st_mtime_ns}" for each, stat in stats)]
        self.identity = hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """Some tensors by name.

        Raises:
            StartupError: The checkpoint lacks one.
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
        return found

    def layer(self, layer: int) -> Mapping[str, Tensor]:
        """The tensors of one layer, by their names in the layer."""
        prefix = f"{self._prefix}.{layer}."
        names = [name for name in self._files if name.startswith(prefix)]
        return {name.removeprefix(prefix): tensor for name, tensor in self.read(names).items()}


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
