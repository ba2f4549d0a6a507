"""Loads weights from a GGUF file: quantised weights are repacked, or dequantised.

The tokenizer and the names of the tensors are as transformers reads them from the file, and so is the configuration
except for the families of `gguf_config.py`.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from dynatree.common.errors import StartupError
from dynatree.engine.cpu.native_experts import NativeExperts, is_fused
from dynatree.engine.cpu.quantized_linear import QuantizedLinear
from dynatree.engine.forward.not_finite import check_weights
from dynatree.engine.model.checkpoint import kept_dtypes, samples_of, saved_buffers
from dynatree.engine.model.gguf_header import BLOCKS, GGUFTensor, read_header
from dynatree.engine.model.rope_factors import tensors_of_factors
from dynatree.engine.quantized.layers import layer_of
from dynatree.engine.weights.gguf_blocks import repacked
from dynatree.engine.weights.quantized_weight import QuantizedWeight, format_names

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_OUTPUT, _TABLE = "output.weight", "token_embd.weight"
# Architectures that transformers cannot convert, and others that llama.cpp stores in the same way: Gemma's norms plus
# 1, and SmolLM3's queries and keys in another order.
_STORED_AS = {"gemma": "gemma2", "smollm3": "llama"}
# Weights of a layer's experts in a model, and their parts in a file.
_EXPERTS = re.compile(r"(?:.+\.)?layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)")
_PARTS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}


@dataclass(frozen=True)
class _Placed:
    """A tensor of the file and its place in the model.

    Attributes:
        tensor: The tensor.
        name: Name of its weight in the model.
        kept: Whether a linear layer or experts take it, whose weight stays quantised.
    """

    tensor: GGUFTensor
    name: str
    kept: bool


class _Outline:
    """The names of a model's weights, without its inner modules.

    For each module within a model, transformers would make the whole table of names again, which takes seconds.
    """

    def __init__(
        self, config: PretrainedConfig, weights: Mapping[str, Tensor], children: Mapping[str, _Outline]
    ) -> None:
        self.config = config
        self._weights = weights
        self._children = children

    def state_dict(self) -> Mapping[str, Tensor]:
        return self._weights

    def named_children(self) -> Iterable[tuple[str, _Outline]]:
        return self._children.items()


class GGUFFile:
    """The tensors of a GGUF file; implements `QuantizedFiles`.

    Attributes:
        name: Name of the file, for messages.
    """

    def __init__(self, path: Path, model: PreTrainedModel, native: bool) -> None:
        """Find the place of every tensor in the model.

        Args:
            path: The file.
            model: Model from `skeleton` of the file's configuration. Its dtype is that of activations, and of weights
                that are not quantised.
            native: Whether quantised weights stay so, for the project's own kernels; else they are dequantised.

        Raises:
            StartupError: The file lacks a tensor of the model, has one that the model lacks, or one of another shape.
        """
        self.name = path.name
        self._path = path
        self._native = native
        self._model_type, self._dtype = model.config.model_type, model.dtype
        self._dtypes = kept_dtypes(model)
        self._buffers = saved_buffers(model)
        self._tied = bool(model.config.tie_word_embeddings)
        header = read_header(path)
        self._data = np.memmap(path, np.uint8, "r")
        architecture = header.values["general.architecture"]
        processor = TENSOR_PROCESSORS.get(_STORED_AS.get(architecture, architecture), TensorProcessor)
        self._processor: Any = processor(config=model.config.to_dict())  # type: ignore[no-untyped-call]
        inner = _Outline(model.config, model.base_model.state_dict(), {})
        outer = _Outline(model.config, model.state_dict(), {model.base_model_prefix: inner})
        self._names: dict[str, str] = get_gguf_hf_weights_map(outer, self._processor, architecture)
        self._experts = {  # names in the file of the parts of each of the experts' weights
            name: [f"blk.{found[1]}.ffn_{part}_exps.weight" for part in _PARTS[found[2]]]
            for name, _ in model.named_parameters()
            if (found := _EXPERTS.fullmatch(name))
        }
        self._names |= {part: name for name, parts in self._experts.items() for part in parts}
        elsewhere = tensors_of_factors(model.config) | ({_OUTPUT} if self._tied else set())
        self._tensors = {each.name: each for each in header.tensors}
        self._quantised_experts = self._find_quantised_experts(model)
        self._placed = [self._place(each, model) for each in header.tensors if each.name not in elsewhere]
        there = {each.name for each in self._placed}
        there -= {name for name, parts in self._experts.items() if not set(parts) <= self._tensors.keys()}
        every = (*dict(model.named_parameters()), *self._buffers)
        missing = [name for name in every if name not in there]
        if missing:
            raise self._refusal(f"it lacks the tensor of {missing[0]}")

    @property
    def formats(self) -> str:
        """See `QuantizedFiles.formats`; a table that the output layer does not read is dequantised."""
        kept = (each.tensor for each in self._placed if each.kept or (self._tied and each.tensor.name == _TABLE))
        return format_names(each.kind for each in kept if each.kind not in _FLOATS)

    def identity(self) -> str:
        """Return a hash of the dtype, of the file's name, size and time, and of samples of every tensor."""
        stat = self._path.stat()
        parts = hashlib.sha256(f"{self._dtype} {self.name} {stat.st_size} {stat.st_mtime_ns}".encode())
        with self._path.open("rb", buffering=0) as file:
            for each in self._placed:
                parts.update(f"\n{each}\n".encode())
                for sample in samples_of(file, each.tensor.start, each.tensor.start + each.tensor.bytes):
                    parts.update(sample)
        return parts.hexdigest()

    def bytes_of(self, module: nn.Module, prefix: str = "") -> int:
        """See `QuantizedFiles.bytes_of`."""
        size = sum(self._bytes(each.tensor, each.kept) for each in self._placed if each.name.startswith(prefix))
        table = self._table
        return size + (self._bytes(table, kept=True) if table is not None and not prefix else 0)

    @torch.inference_mode()
    def fill(self, module: nn.Module, prefix: str = "") -> None:
        """See `WeightFiles.fill`."""
        linear = []
        for each in self._placed:
            path, _, last = each.name.removeprefix(prefix).rpartition(".")
            if not each.name.startswith(prefix) or each.name in self._experts:
                continue
            owner = module.get_submodule(path)
            if each.name in self._buffers:
                setattr(owner, last, self._floats(each))
            elif not getattr(owner, last).is_meta:
                continue
            elif each.kept:
                linear.append((path, each.tensor))
            else:
                setattr(owner, last, nn.Parameter(self._floats(each), requires_grad=False))
        for path in {name.rpartition(".")[0] for name in self._experts if name.startswith(prefix)}:
            self._fill_experts(module, path, path.removeprefix(prefix))
        for path, tensor in linear:  # once the biases are loaded
            self._replace(module, path, self._quantised(tensor, self._order(tensor)))
        if isinstance(module, PreTrainedModel) and self._tied:
            self._tie(module)

    def _place(self, tensor: GGUFTensor, model: PreTrainedModel) -> _Placed:
        name = self._names.get(tensor.name)
        if name is None:
            raise self._refusal(f"{self._model_type} models have no place for its tensor {tensor.name}")
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        if name in self._experts:
            experts, features, inputs = getattr(module, last).shape
            self._check_shape(tensor, tensor.shape, (experts, features // len(self._experts[name]), inputs))
            return _Placed(tensor, name, path in self._quantised_experts)
        in_order = len(tensor.shape) == 2 and self._order(tensor) is not None
        shape = tensor.shape if in_order else self._processed(tensor, np.zeros(tensor.shape, np.float32)).shape
        self._check_shape(tensor, shape, getattr(module, last).shape)
        kept = in_order and tensor.kind not in _FLOATS and last == "weight" and type(module) is nn.Linear
        return _Placed(tensor, name, kept)

    def _check_shape(self, tensor: GGUFTensor, shape: Sequence[int], expected: Sequence[int]) -> None:
        if list(shape) != list(expected):
            raise self._refusal(f"its tensor {tensor.name} is {list(shape)}, expected {list(expected)}")

    def _find_quantised_experts(self, model: PreTrainedModel) -> set[str]:
        """Return the paths of the experts that stay quantised: their gate and up projections are of one type."""
        found: dict[str, bool] = {}
        for name, parts in self._experts.items():
            path = name.rpartition(".")[0]
            kinds = {self._tensors[part].kind if part in self._tensors else "F32" for part in parts}
            kept = len(kinds) == 1 and not kinds & _FLOATS.keys() and is_fused(model.get_submodule(path))
            found[path] = kept and found.get(path, True)
        return {path for path, kept in found.items() if kept}

    def _fill_experts(self, module: nn.Module, path: str, own: str) -> None:
        """Load the experts of a layer, which are at `path` in the model and at `own` in the module."""
        experts: Any = module.get_submodule(own)
        if isinstance(experts, NativeExperts) or not experts.down_proj.is_meta:
            return
        parts = {name: [self._tensors[part] for part in self._experts[f"{path}.{name}"]] for name in _PARTS}
        if self._native and path in self._quantised_experts:
            count = len(experts.down_proj)
            gate_up, down = (self._expert_layer(each, count) for each in parts.values())
            module.set_submodule(own, NativeExperts(gate_up, down, count))
            return
        for name, each in parts.items():
            loaded = torch.cat([self._values(part).to(self._dtype) for part in each], 1)
            check_weights(self.name, [(f"{path}.{name}", loaded)])
            setattr(experts, name, nn.Parameter(loaded, requires_grad=False))

    def _expert_layer(self, parts: Sequence[GGUFTensor], count: int) -> QuantizedLinear:
        """Return one layer of the parts of `count` experts: all parts of the first expert, then those of the next."""
        tensors = (self._blocks(part) for part in parts)
        blocks = torch.cat([each.view(count, -1, *each.shape[1:]) for each in tensors], 1).flatten(0, 1)
        return QuantizedLinear(self._repacked(blocks, parts[0]), None, self._dtype)

    def _floats(self, placed: _Placed) -> Tensor:
        """Read a tensor as transformers keeps it."""
        processed = self._processed(placed.tensor, self._values(placed.tensor).numpy())
        loaded = torch.from_numpy(np.ascontiguousarray(processed)).to(self._dtypes[placed.name])
        check_weights(self.name, [(placed.name, loaded)])
        return loaded

    def _values(self, tensor: GGUFTensor) -> Tensor:
        """Return a tensor in float32, as it is in the file."""
        if tensor.kind in _FLOATS:
            return self._raw(tensor).view(_FLOATS[tensor.kind]).view(tensor.shape).float()
        return self._quantised(tensor, None).dequantized().view(tensor.shape)

    def _processed(self, tensor: GGUFTensor, values: NDArray[Any]) -> NDArray[Any]:
        """Return values of a tensor as transformers keeps them."""
        processed = self._process(tensor, values)
        if processed.name is None:
            raise self._refusal(f"its tensor {tensor.name} is in a layout that is not read from GGUF files")
        return np.asarray(processed.weights)

    def _process(self, tensor: GGUFTensor, values: NDArray[Any]) -> Any:
        """Return values of a tensor as transformers keeps them, with its name."""
        try:
            return self._processor.process(
                weights=values, name=tensor.name, tensor_key_mapping=self._names, parsed_parameters={"tensors": {}}
            )
        except (ValueError, ArithmeticError) as error:
            raise self._refusal(f"its tensor {tensor.name} does not fit its configuration: {error}") from None

    def _order(self, tensor: GGUFTensor) -> Tensor | None:
        """Return the order of rows in which transformers keeps a weight, or None if it is not such an order."""
        rows = np.arange(tensor.shape[0], dtype=np.int64)[:, None]
        processed = self._process(tensor, rows)
        order = np.asarray(processed.weights)
        same = processed.name == tensor.name and order.shape == rows.shape
        return torch.from_numpy(order[:, 0].copy()) if same and np.array_equal(np.sort(order, 0), rows) else None

    def _quantised(self, tensor: GGUFTensor, order: Tensor | None) -> QuantizedWeight:
        blocks = self._blocks(tensor)
        return self._repacked(blocks if order is None else blocks[order], tensor)

    def _repacked(self, blocks: Tensor, tensor: GGUFTensor) -> QuantizedWeight:
        try:
            return repacked(blocks, tensor.kind)
        except ValueError as error:
            raise self._refusal(f"its tensor {tensor.name}: {error}") from None

    def _blocks(self, tensor: GGUFTensor) -> Tensor:
        """Return the blocks of a quantised tensor, uint8 `[features, blocks, bytes]`."""
        values, size = BLOCKS[tensor.kind]
        return self._raw(tensor).view(-1, tensor.shape[-1] // values, size)

    def _raw(self, tensor: GGUFTensor) -> Tensor:
        return torch.from_numpy(self._data[tensor.start : tensor.start + tensor.bytes].copy())

    def _replace(self, module: nn.Module, path: str, weight: QuantizedWeight) -> None:
        """Replace the linear layer at a path by one of a quantised weight."""
        layer = module.get_submodule(path)
        assert isinstance(layer, nn.Linear)
        module.set_submodule(path, layer_of(weight, layer.bias, self._dtype, self._native))

    @property
    def _table(self) -> GGUFTensor | None:
        """The embedding table, if the output layer reads it as the file has it, quantised."""
        tensors = (each.tensor for each in self._placed if each.tensor.name == _TABLE)
        table = next(tensors, None)
        shared = table is not None and table.kind not in _FLOATS and self._tied and self._native
        return table if shared else None

    def _tie(self, model: PreTrainedModel) -> None:
        """Let the output layer read the embedding table; a quantised table as it is in the file."""
        output = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if self._table is not None and type(output) is nn.Linear:
            path = next(path for path, each in model.named_modules() if each is output)
            self._replace(model, path, self._quantised(self._table, None))
        else:
            model.tie_weights()

    def _bytes(self, tensor: GGUFTensor, kept: bool) -> int:
        count = math.prod(tensor.shape)
        return int(count * _bits_of(tensor.kind) / 8) if kept and self._native else count * self._dtype.itemsize

    def _refusal(self, reason: str) -> StartupError:
        return StartupError(f"model {self.name} cannot be served: {reason}")


@cache
def _bits_of(kind: str) -> float:
    """Return the bits that a weight of a quantised type takes in memory, with its share of the scales."""
    values, size = BLOCKS[kind]
    return 8 * repacked(torch.zeros(1, 1, size, dtype=torch.uint8), kind).bytes / values
