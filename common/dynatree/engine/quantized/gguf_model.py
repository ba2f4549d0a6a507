"""Loads a model from a GGUF file: quantised weights are repacked, and never rounded again.

The configuration, the tokenizer and the names of the tensors are as transformers reads them from the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from dynatree.common.errors import StartupError
from dynatree.engine.model.gguf_header import BLOCKS, GGUFTensor, read_header
from dynatree.engine.model.skeleton import skeleton
from dynatree.engine.quantized.layers import layer_of
from dynatree.engine.weights.gguf_blocks import repacked
from dynatree.engine.weights.quantized_weight import QuantizedWeight

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_OUTPUT, _TABLE = "output.weight", "token_embd.weight"


@torch.inference_mode()
def load_gguf(path: Path, config: PretrainedConfig, dtype: torch.dtype, native: bool) -> PreTrainedModel:
    """Load a model.

    Args:
        path: The file.
        config: Its configuration, as transformers reads it.
        dtype: Data type of activations, and of weights that are not quantised.
        native: Whether the project's own kernels compute the model.

    Raises:
        StartupError: The file lacks a tensor of the model, has one that the model lacks, or one of another shape.
    """
    return _Loading(path, config, dtype, native).model()


class _Loading:
    def __init__(self, path: Path, config: PretrainedConfig, dtype: torch.dtype, native: bool) -> None:
        self._name = path.name
        self._header = read_header(path)
        self._data = np.memmap(path, np.uint8, "r")
        self._dtype, self._native = dtype, native
        self._model = skeleton(config, dtype)
        architecture = self._header.values["general.architecture"]
        processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
        self._processor: Any = processor(config=config.to_dict())  # type: ignore[no-untyped-call]
        self._names: dict[str, str] = get_gguf_hf_weights_map(self._model, self._processor)  # by names of the file

    def model(self) -> PreTrainedModel:
        quantised = []
        tied = bool(self._model.config.tie_word_embeddings)
        places = [(each, self._place(each)) for each in self._header.tensors if not (tied and each.name == _OUTPUT)]
        stored = {f"{path}.{last}" for _, (path, last) in places}
        missing = [name for name, _ in self._model.named_parameters() if name not in stored]
        if missing:
            raise self._refusal(f"it lacks the tensor of {missing[0]}")
        for tensor, (path, last) in places:
            module = self._model.get_submodule(path)
            order = self._order(tensor) if tensor.kind not in _FLOATS and len(tensor.shape) == 2 else None
            if last == "weight" and type(module) is nn.Linear and order is not None:
                if tensor.shape != module.weight.shape:
                    raise self._misfit(tensor, tensor.shape, module.weight.shape)
                quantised.append((tensor, path, order))
            else:
                self._set(tensor, module, last)
        for tensor, path, order in quantised:  # once the biases are loaded
            self._replace(path, self._quantised(tensor, order))
        if tied:
            self._tie()
        return self._model

    def _place(self, tensor: GGUFTensor) -> tuple[str, str]:
        """Return the path of the module that holds a tensor, and the tensor's name there."""
        name = self._names.get(tensor.name)
        if name is None:
            raise self._refusal(f"{self._model.config.model_type} models have no place for its tensor {tensor.name}")
        owner, _, last = name.rpartition(".")
        return owner, last

    def _set(self, tensor: GGUFTensor, module: nn.Module, last: str) -> None:
        """Load a tensor as floating-point numbers."""
        if tensor.kind in _FLOATS:
            values = self._raw(tensor).view(_FLOATS[tensor.kind]).view(tensor.shape).float()
        else:
            values = self._quantised(tensor, None).dequantized().view(tensor.shape)
        processed = self._processed(tensor, values.numpy())
        if processed.name is None:
            raise self._refusal(f"its tensor {tensor.name} holds several experts, which are not read from GGUF files")
        loaded = torch.from_numpy(np.ascontiguousarray(processed.weights)).to(self._dtype)
        wanted = getattr(module, last)
        if wanted.shape != loaded.shape:
            raise self._misfit(tensor, loaded.shape, wanted.shape)
        setattr(module, last, nn.Parameter(loaded, requires_grad=False))

    def _processed(self, tensor: GGUFTensor, weights: np.ndarray[Any, Any]) -> Any:
        """Return a tensor's numbers in the order in which transformers keeps them, with its name."""
        try:
            return self._processor.process(
                weights=weights, name=tensor.name, tensor_key_mapping=self._names, parsed_parameters={"tensors": {}}
            )
        except (ValueError, ArithmeticError) as error:
            raise self._refusal(f"its tensor {tensor.name} does not fit its configuration: {error}") from None

    def _order(self, tensor: GGUFTensor) -> Tensor | None:
        """Return the order of rows in which transformers keeps a weight, or None if it is not such an order."""
        rows = np.arange(tensor.shape[0], dtype=np.int64)[:, None]
        processed = self._processed(tensor, rows)
        order = np.asarray(processed.weights)
        same = processed.name == tensor.name and order.shape == rows.shape
        return torch.from_numpy(order[:, 0].copy()) if same and np.array_equal(np.sort(order, 0), rows) else None

    def _quantised(self, tensor: GGUFTensor, order: Tensor | None) -> QuantizedWeight:
        values, size = BLOCKS[tensor.kind]
        inputs = tensor.shape[-1]
        raw = self._raw(tensor).view(-1, inputs // values, size)
        try:
            return repacked(raw if order is None else raw[order], tensor.kind)
        except ValueError as error:
            raise self._refusal(f"its tensor {tensor.name}: {error}") from None

    def _raw(self, tensor: GGUFTensor) -> Tensor:
        return torch.from_numpy(self._data[tensor.start : tensor.start + tensor.bytes].copy())

    def _replace(self, path: str, weight: QuantizedWeight) -> None:
        """Replace the linear layer at a path by one of a quantised weight."""
        layer = self._model.get_submodule(path)
        assert isinstance(layer, nn.Linear)
        self._model.set_submodule(path, layer_of(weight, layer.bias, self._dtype, self._native))

    def _tie(self) -> None:
        """Let the output layer read the embedding table; a quantised table as it is in the file."""
        table = next((each for each in self._header.tensors if each.name == _TABLE), None)
        output = self._model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if table is not None and table.kind not in _FLOATS and type(output) is nn.Linear:
            path = next(path for path, each in self._model.named_modules() if each is output)
            self._replace(path, self._quantised(table, None))
        else:
            self._model.tie_weights()

    def _misfit(self, tensor: GGUFTensor, shape: Sequence[int], expected: Sequence[int]) -> StartupError:
        return self._refusal(f"its tensor {tensor.name} is {list(shape)}, expected {list(expected)}")

    def _refusal(self, reason: str) -> StartupError:
        return StartupError(f"model {self._name} cannot be served: {reason}")
