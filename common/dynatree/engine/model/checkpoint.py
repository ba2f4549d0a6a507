"""Reads the tensors of a checkpoint one by one."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    rename_source_key,
)

from dynatree.common.errors import StartupError
from dynatree.engine.forward.not_finite import check_weights
from dynatree.engine.model.composite import KEY_MAPPING

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SAMPLES = 16  # samples of each tensor
_SAMPLE_BYTES = 512
_COMPARED_ROWS = 4096  # of two tensors at a time
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # by their names in safetensors files
_SCALES = r"\.(weight_scale(_inv|_2)?|weight_packed|qweight|qzeros|weight\.absmax)$"


class Checkpoint:
    """The tensors of a checkpoint by the model's parameter names; implements `WeightFiles`.

    Attributes:
        name: Name of the model, for messages.
    """

    def __init__(self, folder: Path, name: str, model: PreTrainedModel) -> None:
        """Find the tensors.

        Args:
            folder: Folder with the safetensors files.
            name: Name of the model, for messages.
            model: Model that the tensors belong to, which also gives the dtype. As in `from_pretrained`, it keeps no
                tied weights that have different values in the files, whatever its configuration says.

        Raises:
            StartupError: There are no safetensors files.
        """
        self.name = name
        self._folder = folder
        self._dtype = model.dtype
        self._dtypes = kept_dtypes(model)
        self._buffers = saved_buffers(model)
        self._optional = [*(model._keys_to_ignore_on_load_missing or ())]
        files = files_of(folder, name)
        named = names_in(model, files)
        self._files = {ours: (files[theirs], theirs) for theirs, ours in named.items()}
        for name, other in list(model.all_tied_weights_keys.items()):
            if name in self and other in self and not self._are_equal(name, other):
                del model.all_tied_weights_keys[name]
                owner, _, last = name.rpartition(".")
                weight = torch.empty_like(model.get_parameter(name))
                setattr(model.get_submodule(owner), last, nn.Parameter(weight, requires_grad=False))

    def identity(self) -> str:
        """Return a hash of the dtype, of the files' names, sizes and times, and of samples of every tensor.

        Times alone are not enough, because archives, images and copies keep or unify them. A file of the hub is a link
        to a file that is named by a hash of its content, and has that name in place of its time: each download has
        another time.
        """
        parts = hashlib.sha256(str(self._dtype).encode())
        for name in sorted({file for file, _ in self._files.values()}):
            path = (self._folder / name).resolve()
            stat = path.stat()
            version = path.name if path.parent.name == "blobs" else stat.st_mtime_ns
            parts.update(f"\n{name} {stat.st_size} {version}\n".encode())
            for sample in _samples(self._folder / name):
                parts.update(sample)
        return parts.hexdigest()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def fill(self, module: nn.Module, prefix: str = "") -> None:
        """See `WeightFiles.fill`."""
        buffers = {name: each for name, each in self._buffers.items() if name.startswith(prefix)}
        wanted = {prefix + name: each for name, each in module.named_parameters() if each.is_meta} | buffers
        for name, tensor in self.read([name for name in wanted if name in self]).items():
            if tensor.shape != wanted[name].shape:
                shapes = f"{list(tensor.shape)}, expected {list(wanted[name].shape)}"
                raise StartupError(f"model {self.name} cannot be served: its tensor {name} is {shapes}")
            owner, _, last = name.removeprefix(prefix).rpartition(".")
            own = tensor.clone()
            value = own if name in buffers else nn.Parameter(own, requires_grad=False)
            setattr(module.get_submodule(owner), last, value)
        if isinstance(module, PreTrainedModel):
            module.tie_weights(recompute_mapping=False)
        missing = [prefix + name for name, each in module.named_parameters() if each.is_meta]
        missing += [name for name in buffers if name not in self and not self._may_lack(name)]
        if missing:
            raise StartupError(
                f"model {self.name}: its layers cannot be offloaded, because its checkpoint does not contain "
                f"{missing[0]} in the form that the model uses"
            )

    def _are_equal(self, one: str, other: str) -> bool:
        """Whether two tensors have the same shape and, in the dtype of the first, the same values."""
        if self.shape(one) != self.shape(other):
            return False
        (path, first), (other_path, second) = self._files[one], self._files[other]
        dtype = self._dtypes.get(one, self._dtype)
        with safe_open(self._folder / path, "pt") as file, safe_open(self._folder / other_path, "pt") as other_file:
            rows, other_rows = file.get_slice(first), other_file.get_slice(second)
            return all(
                torch.equal(rows[at : at + _COMPARED_ROWS].to(dtype), other_rows[at : at + _COMPARED_ROWS].to(dtype))
                for at in range(0, self.shape(one)[0], _COMPARED_ROWS)
            )

    def _may_lack(self, name: str) -> bool:
        """Whether transformers, too, computes a tensor that the checkpoint lacks."""
        return any(re.search(each, name) for each in self._optional)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read floating-point tensors by name, in the dtype in which transformers keeps them.

        Raises:
            StartupError: A tensor holds integers, or is not finite.
        """
        found = {}
        for name, tensor in self.stored(names).items():
            if not tensor.is_floating_point():
                raise StartupError(f"model {self.name} cannot be served: its tensor {name} holds {tensor.dtype}")
            found[name] = tensor.to(self._dtypes.get(name, self._dtype))
        check_weights(self.name, found.items())
        return found

    def stored(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors by name as they are in the files."""
        found = {}
        wanted = list(names)
        for path in sorted({self._files[name][0] for name in wanted}):
            with safe_open(self._folder / path, "pt") as file:
                for name in wanted:
                    if self._files[name][0] == path:
                        found[name] = file.get_tensor(self._files[name][1])
        return found

    def shape(self, name: str) -> list[int]:
        """Return the shape of a tensor, without reading it."""
        path, theirs = self._files[name]
        with safe_open(self._folder / path, "pt") as file:
            shape: list[int] = file.get_slice(theirs).get_shape()
        return shape


def kept_dtypes(model: PreTrainedModel) -> dict[str, torch.dtype]:
    """Return the dtype in which transformers keeps each tensor of a model: the model's, or float32 for some."""
    plan: dict[str, torch.dtype] = model._get_dtype_plan(model.dtype)
    kept = {name: each.dtype for name, each in model.state_dict().items()}
    if plan:
        pattern = build_glob_alternation(list(plan))[0]
        kept |= {name: torch.float32 for name in kept if pattern.search(name)}
    return kept


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a module that a checkpoint holds, such as the biases of some routers."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {name: each for name, each in module.state_dict().items() if name not in parameters}


def files_of(folder: Path, name: str) -> dict[str, str]:
    """Return the file of each tensor of a checkpoint.

    Raises:
        StartupError: There are no safetensors files.
    """
    try:
        if (folder / _INDEX).exists() and not (folder / _SINGLE).exists():  # as transformers chooses
            files: dict[str, str] = json.loads((folder / _INDEX).read_text())["weight_map"]
            return files
        with safe_open(folder / _SINGLE, "pt") as file:
            return dict.fromkeys(file.keys(), _SINGLE)
    except (OSError, KeyError, ValueError) as error:
        raise StartupError(f"model {name} has no safetensors files, the only format that is read") from error


def stored_dtype(folder: Path, name: str) -> torch.dtype | None:
    """Return the dtype of a checkpoint's first floating-point tensor; None if there is none in 16 or 32 bits.

    transformers takes it where a configuration names no dtype.

    Raises:
        StartupError: There are no safetensors files.
    """
    first = min(files_of(folder, name).values(), default=_SINGLE)
    with safe_open(folder / first, "pt") as file:
        kinds = (_FLOATS.get(file.get_slice(each).get_dtype()) for each in file.keys())  # noqa: SIM118
        return next((kind for kind in kinds if kind is not None), None)


def check_scales(name: str, tensors: Iterable[str]) -> None:
    """Refuse tensors of quantised weights in a checkpoint whose configuration names no quantization.

    Raises:
        StartupError: There are such tensors. Without them, the weights would be other numbers.
    """
    scales = [each for each in tensors if re.search(_SCALES, each)]
    if scales:
        raise StartupError(
            f"model {name} cannot be served: its checkpoint has {min(scales)}, but its config.json has no "
            "quantization_config that uses it"
        )


def _samples(path: Path) -> Iterator[bytes]:
    """Yield a safetensors file's header, then samples of each tensor, spread from its first byte to its last."""
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        size = int.from_bytes(file.read(8), "little")
        header = file.read(size)
        yield header
        for tensor in json.loads(header).values():
            begin, end = tensor.get("data_offsets", (0, 0))  # metadata have none
            yield from samples_of(file, 8 + size + begin, 8 + size + end)


def samples_of(file: BinaryIO, begin: int, end: int) -> Iterator[bytes]:
    """Yield samples of the bytes from `begin` to `end` of a file, spread from the first to the last."""
    for sample in range(_SAMPLES):
        at = begin + (end - begin - _SAMPLE_BYTES) * sample // (_SAMPLES - 1)
        yield os.pread(file.fileno(), min(_SAMPLE_BYTES, end - begin), max(at, begin))


def names_in(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Map names in the checkpoint to names in the model, without tensors that the model converts from several."""
    transforms = get_model_conversion_mapping(model, KEY_MAPPING)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    state = model.state_dict()
    found = {}
    for name in names:
        ours, converted = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if converted is None:
            found[name] = ours
    return found
