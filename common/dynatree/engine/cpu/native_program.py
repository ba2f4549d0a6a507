"""A model's forward pass as a program, a list of operations that the kernels run in one call (`native/forward.c`).

In a forward pass over a few tokens, Python and torch's small operations between the linear layers take a tenth of the
time or more, and most of the time in small models. A program avoids them. Families without a program run through
transformers' modules, with the same kernels for the large operations.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from dynatree.engine.cpu.native import DTYPES, address
from dynatree.engine.cpu.native_attention import Shape
from dynatree.engine.cpu.native_experts import Experts, NativeExperts
from dynatree.engine.cpu.native_linear import PANEL, Linear, NativeLinear, fits

_EMBED, _NORM, _LINEAR, _ATTEND, _EXPERTS = range(5)
_ALONE, _PLUS, _TIMES = range(3)
_IDENTITY, _GELU, _GELU_TANH, _SILU, _RELU, _CAPPED = range(6)
_SOFTMAX, _SOFTMAX_CHOSEN, _LOGISTIC = range(3)
_MOST_EXPERTS = 4096  # the scores of a row's experts lie in a thread's working memory
# torch.topk orders equal scores by other steps than `native/experts.c` if a row chooses more experts than this, or if
# there are at least this many experts for each chosen one.
_MOST_CHOSEN, _PARTIAL_SORT = 17, 64
# transformers' names of activation functions
_ACTIVATIONS = {
    "gelu": _GELU,
    "gelu_new": _GELU_TANH,
    "gelu_pytorch_tanh": _GELU_TANH,
    "silu": _SILU,
    "swish": _SILU,
    "relu": _RELU,
}
# Names of transformers' classes: importing Gemma 3's would also import a vision model.
_SCALED = {f"{family}TextScaledWordEmbedding" for family in ("Gemma", "Gemma2", "Gemma3")}
_AROUND_ONE = {f"{family}RMSNorm" for family in ("Gemma", "Gemma2", "Gemma3")}  # their weights are differences from 1
_LATER_GEMMA = ("gemma2", "gemma3_text")


class _Place(ctypes.Structure):
    _fields_ = (
        ("buffer", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("token", ctypes.c_int64),
    )


class _Operation(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int64),
        ("source", ctypes.c_int64),
        ("target", ctypes.c_int64),
        ("other", ctypes.c_int64),
        ("scale", ctypes.c_void_p),
        ("shift", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("parts", ctypes.c_int64),
        ("centered", ctypes.c_int64),
        ("last", ctypes.c_int64),
        ("epsilon", ctypes.c_float),
        ("offset", ctypes.c_float),
        ("factor", ctypes.c_float),
        ("linear", Linear),
        ("query", _Place),
        ("key", _Place),
        ("value", _Place),
        ("layer", ctypes.c_int64),
        ("rotary", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
        ("logits", ctypes.c_int64),
        ("experts", Experts),
    )


class _NoProgramError(Exception):
    """A model has a part that programs do not support."""


@dataclass
class _Writer:
    """Writes a program; a buffer is an index into `widths`, which holds the row width of each buffer."""

    dtype: torch.dtype
    widths: list[int] = field(default_factory=list)
    operations: list[_Operation] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)  # start of each layer in `operations`, and the end of the last one
    kept: list[NativeLinear | torch.Tensor] = field(default_factory=list)  # what only the operations point at

    def layer(self) -> None:
        """Mark the start of a layer, or after the last layer, its end."""
        self.layers.append(len(self.operations))

    def buffer(self, width: int) -> int:
        self.widths.append(width)
        return len(self.widths) - 1

    def embed(self, model: PreTrainedModel, target: int) -> None:
        module: Any = model.get_input_embeddings()
        scaled = type(module).__name__ in _SCALED
        if scaled != model.config.model_type.startswith("gemma") or not (scaled or type(module) is nn.Embedding):
            raise _NoProgramError
        if module.weight.dtype != self.dtype or not module.weight.is_contiguous():
            raise _NoProgramError
        width = self.widths[target]
        table = address(module.weight, self.dtype, module.num_embeddings, width)
        factor = module.embed_scale.to(self.dtype).item() if scaled else 1.0
        self._add(kind=_EMBED, target=target, scale=table, width=width, factor=factor)

    def norm(self, module: Any, source: int, target: int, last: bool = False, other: int = -1) -> None:
        """Add a `LayerNorm`, or any family's `RMSNorm`, of rows or of each head within them, plus a buffer `other`."""
        centered, around_one = type(module) is nn.LayerNorm, type(module).__name__ in _AROUND_ONE
        if not centered and not type(module).__name__.endswith("RMSNorm"):
            raise _NoProgramError
        weight, bias = module.weight, getattr(module, "bias", None)
        if any(each is not None and (each.dtype != self.dtype or not each.is_contiguous()) for each in (weight, bias)):
            raise _NoProgramError
        parts, rest = divmod(self.widths[source], len(weight))
        if rest or self.widths[target] != self.widths[source]:
            raise _NoProgramError
        if other >= 0 and (bias is not None or last or self.widths[other] != self.widths[target]):
            raise _NoProgramError
        self._add(
            kind=_NORM,
            source=source,
            target=target,
            other=other,
            scale=address(weight, self.dtype, -1),
            shift=None if bias is None else address(bias, self.dtype, len(weight)),
            width=len(weight),
            parts=parts,
            centered=centered,
            last=last,
            epsilon=module.eps if centered or around_one else module.variance_epsilon,
            offset=float(around_one),
        )

    def linear(
        self,
        module: Any,
        source: int,
        target: int,
        activation: int = _IDENTITY,
        combination: int = _ALONE,
        other: int = -1,
        part: int = 0,
        parts: int = 1,
        cap: float = 0.0,
    ) -> None:
        """Add a linear layer, or only one of `parts` equal parts of its features."""
        if not isinstance(module, NativeLinear) or module.dtype != self.dtype:
            raise _NoProgramError
        features = self.widths[target]
        if (module.in_features, module.out_features) != (self.widths[source], parts * features):
            raise _NoProgramError
        if other >= 0 and self.widths[other] != self.widths[target]:
            raise _NoProgramError
        if parts > 1 and features % PANEL:  # a part begins and ends with a panel
            raise _NoProgramError
        linear = Linear.from_buffer_copy(module.structure)
        linear.weight += part * (module.weight.nbytes // parts)
        if module.bias is not None:
            linear.bias += part * (module.bias.nbytes // parts)
        linear.features = features
        linear.activation, linear.combination, linear.cap = activation, combination, cap
        self._add(kind=_LINEAR, source=source, target=target, other=other, linear=linear)

    def attend(
        self, query: _Place, key: _Place, value: _Place, target: int, layer: int, rotary: int = 0, sinks: Any = None
    ) -> None:
        where = None
        if sinks is not None:
            numbers = sinks.detach().float()
            self.kept.append(numbers)
            where = address(numbers, torch.float32, self.widths[target] // query.head)  # one of each head
        self._add(
            kind=_ATTEND, target=target, query=query, key=key, value=value, layer=layer, rotary=rotary, sinks=where
        )

    def experts(self, module: Any, router: Any, normalized: bool, source: int, logits: int, target: int) -> None:
        """Add the experts of each row, chosen by its logits, which the router writes into a buffer, to `target`."""
        width = self.widths[source]
        chosen, count = router.top_k, len(router.weight)
        if (
            not isinstance(module, NativeExperts)
            or module.down.dtype != self.dtype
            or router.weight.dtype != self.dtype
        ):
            raise _NoProgramError
        if (module.hidden_dim, module.num_experts) != (width, count) or not fits(router.weight):
            raise _NoProgramError
        if not 0 < chosen <= min(count, _MOST_CHOSEN) or not _PARTIAL_SORT * chosen > count <= _MOST_EXPERTS:
            raise _NoProgramError
        layer = NativeLinear(router.weight.detach(), getattr(router, "bias", None))
        self.kept.append(layer)
        self.linear(layer, source, logits)
        experts = Experts.from_buffer_copy(module.structure)
        experts.chosen, experts.scoring = chosen, _SOFTMAX_CHOSEN if normalized else _SOFTMAX
        self._add_experts(source, logits, target, experts)

    def shared_expert(self, module: Any, gate: Any, activation: int, source: int, logits: int, target: int) -> None:
        """Add an expert that every row has, weighed by the logistic function of its gate's output, to `target`."""
        layers = (module.gate_proj, module.up_proj, module.down_proj)
        if not all(isinstance(each, NativeLinear) and each.dtype == self.dtype for each in layers):
            raise _NoProgramError
        first, up, down = (Linear.from_buffer_copy(each.structure) for each in layers)
        width, middle = self.widths[source], down.inputs
        sizes = [(each.inputs, each.features) for each in (first, up, down)]
        if sizes != [(width, middle), (width, middle), (middle, width)] or width % PANEL or middle % PANEL:
            raise _NoProgramError
        if bytes(first.weights) != bytes(up.weights):  # they share their prepared rows
            raise _NoProgramError
        first.activation, up.combination = activation, _TIMES
        self.linear(gate, source, logits)
        self._add_experts(source, logits, target, Experts(first, up, down, 0, 0, 1, 1, _LOGISTIC))

    def _add_experts(self, source: int, logits: int, target: int, experts: Experts) -> None:
        if self.widths[target] != self.widths[source] or self.widths[logits] != experts.count:
            raise _NoProgramError
        self._add(kind=_EXPERTS, source=source, logits=logits, target=target, other=target, experts=experts)

    def _add(self, **fields: Any) -> None:
        self.operations.append(_Operation(**{"other": -1, **fields}))


Rotary = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class _Parts:
    """The parts of a program besides its operations."""

    shape: Shape
    rotaries: tuple[Rotary, ...]


def _activation(model: PreTrainedModel) -> int:
    config = model.config
    name = config.hidden_activation if config.model_type in _LATER_GEMMA else config.hidden_act
    if name not in _ACTIVATIONS:
        raise _NoProgramError
    return _ACTIVATIONS[name]


def _write_output(model: Any, norm: Any, to: _Writer, x: int, normed: int) -> None:
    """Add the last norm and the output layer."""
    to.layer()
    to.norm(norm, x, normed, last=True)
    config = model.config
    cap = config.final_logit_softcapping if config.model_type in _LATER_GEMMA else None
    activation = _IDENTITY if cap is None else _CAPPED
    to.linear(model.get_output_embeddings(), normed, to.buffer(config.vocab_size), activation, cap=cap or 0.0)


def _write_gpt_neox(model: Any, to: _Writer) -> _Parts:
    config, attention = model.config, model.gpt_neox.layers[0].attention
    hidden, heads = config.hidden_size, config.num_attention_heads
    dim = hidden // heads
    x, normed, attended, summed = (to.buffer(hidden) for _ in range(4))
    qkv, middle = to.buffer(3 * hidden), to.buffer(config.intermediate_size)
    query, key, value = (_Place(qkv, part * dim, 3 * dim, 3 * hidden) for part in range(3))
    to.embed(model, x)
    for index, layer in enumerate(model.gpt_neox.layers):
        to.layer()
        to.norm(layer.input_layernorm, x, normed)
        to.linear(layer.attention.query_key_value, normed, qkv)
        to.attend(query, key, value, attended, index)
        result = summed if config.use_parallel_residual else x
        to.linear(layer.attention.dense, attended, result, combination=_PLUS, other=x)
        to.norm(layer.post_attention_layernorm, x, normed)
        to.linear(layer.mlp.dense_h_to_4h, normed, middle, _activation(model))
        to.linear(layer.mlp.dense_4h_to_h, middle, x, combination=_PLUS, other=result)
    _write_output(model, model.gpt_neox.final_layer_norm, to, x, normed)
    return _Parts(Shape(heads, heads, dim, 0, attention.scaling), (model.gpt_neox.rotary_emb,))


def _add(to: _Writer, linear: Any, norm: Any, source: int, x: int, normed: int) -> None:
    """Add a linear layer's output to `x`, after a norm in families that have one there."""
    if norm is None:
        to.linear(linear, source, x, combination=_PLUS, other=x)
    else:
        to.linear(linear, source, normed)
        to.norm(norm, normed, x, other=x)


def _write_mixture(model: Any, mixture: Any, to: _Writer, normed: int, logits: tuple[int, int], x: int) -> None:
    """Add the output of a mixture's experts to `x`; `logits` are buffers of one logit, and of one for each expert."""
    if hasattr(mixture, "shared_expert"):  # Qwen2-MoE
        to.shared_expert(mixture.shared_expert, mixture.shared_expert_gate, _activation(model), normed, logits[0], x)
    normalized = getattr(model.config, "norm_topk_prob", True)  # Mixtral and gpt-oss have no such field
    router = mixture.router if model.config.model_type == "gpt_oss" else mixture.gate
    to.experts(mixture.experts, router, normalized, normed, logits[1], x)


def _twice(rotary: Rotary, like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of both halves of a head from a rotary embedding that returns those of one half."""
    cosines, sines = (torch.cat((each, each), -1) for each in rotary(like, positions))
    return cosines, sines


def _write_llama(model: Any, to: _Writer) -> _Parts:
    config, attention = model.config, model.model.layers[0].self_attn
    hidden, heads, kv_heads, dim = (
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        attention.head_dim,
    )
    x, normed = to.buffer(hidden), to.buffer(hidden)
    if heads % kv_heads or not attention.is_causal:  # Gemma's encoders see later tokens
        raise _NoProgramError
    if getattr(config, "clip_qkv", None) is not None:  # OLMoE
        raise _NoProgramError
    attended, queries = to.buffer(heads * dim), to.buffer(heads * dim)
    keys, values = to.buffer(kv_heads * dim), to.buffer(kv_heads * dim)
    middle, logits = to.buffer(config.intermediate_size), (to.buffer(1), to.buffer(getattr(config, "num_experts", 0)))
    # kinds of layers that have a rotary embedding each
    kinds = sorted(set(config.layer_types)) if config.model_type == "gemma3_text" else []
    query, key, value = (_Place(each, 0, dim, to.widths[each]) for each in (queries, keys, values))
    to.embed(model, x)
    for index, layer in enumerate(model.model.layers):
        to.layer()
        to.norm(layer.input_layernorm, x, normed)
        to.linear(layer.self_attn.q_proj, normed, queries)
        to.linear(layer.self_attn.k_proj, normed, keys)
        to.linear(layer.self_attn.v_proj, normed, values)
        if hasattr(layer.self_attn, "q_norm"):  # Qwen3, Gemma 3 and OLMoE
            to.norm(layer.self_attn.q_norm, queries, queries)
            to.norm(layer.self_attn.k_norm, keys, keys)
        rotary = kinds.index(config.layer_types[index]) if kinds else 0
        if not getattr(layer.self_attn, "use_rope", True):  # SmolLM3
            rotary = -1
        to.attend(query, key, value, attended, index, rotary, getattr(layer.self_attn, "sinks", None))
        before, middle_norm, after = None, layer.post_attention_layernorm, None
        if config.model_type in _LATER_GEMMA:
            before, middle_norm = layer.post_attention_layernorm, layer.pre_feedforward_layernorm
            after = layer.post_feedforward_layernorm
        _add(to, layer.self_attn.o_proj, before, attended, x, normed)
        to.norm(middle_norm, x, normed)
        if hasattr(layer.mlp, "experts"):
            _write_mixture(model, layer.mlp, to, normed, logits, x)
            continue
        to.linear(layer.mlp.gate_proj, normed, middle, _activation(model))
        to.linear(layer.mlp.up_proj, normed, middle, combination=_TIMES, other=middle)
        _add(to, layer.mlp.down_proj, after, middle, x, normed)
    _write_output(model, model.model.norm, to, x, normed)
    # Gemma 3's attention has the attribute too, but does not use it
    cap = attention.attn_logit_softcapping if config.model_type == "gemma2" else None
    rotary_emb = model.model.rotary_emb
    rotaries = tuple(partial(rotary_emb, layer_type=kind) for kind in kinds) or (rotary_emb,)
    if config.model_type == "gpt_oss":
        rotaries = (partial(_twice, rotary_emb),)
    return _Parts(Shape(heads, kv_heads, dim, 0, attention.scaling, cap or 0.0), rotaries)


def _write_phi3(model: Any, to: _Writer) -> _Parts:
    config, attention = model.config, model.model.layers[0].self_attn
    hidden, heads, kv_heads, dim = (
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        attention.head_dim,
    )
    if heads % kv_heads:
        raise _NoProgramError
    row = (heads + 2 * kv_heads) * dim
    x, normed, attended = to.buffer(hidden), to.buffer(hidden), to.buffer(heads * dim)
    qkv, middle = to.buffer(row), to.buffer(config.intermediate_size)
    query, key, value = (_Place(qkv, first * dim, dim, row) for first in (0, heads, heads + kv_heads))
    to.embed(model, x)
    for index, layer in enumerate(model.model.layers):
        to.layer()
        to.norm(layer.input_layernorm, x, normed)
        to.linear(layer.self_attn.qkv_proj, normed, qkv)
        to.attend(query, key, value, attended, index)
        to.linear(layer.self_attn.o_proj, attended, x, combination=_PLUS, other=x)
        to.norm(layer.post_attention_layernorm, x, normed)
        to.linear(layer.mlp.gate_up_proj, normed, middle, _activation(model), parts=2)
        to.linear(layer.mlp.gate_up_proj, normed, middle, combination=_TIMES, other=middle, part=1, parts=2)
        to.linear(layer.mlp.down_proj, middle, x, combination=_PLUS, other=x)
    _write_output(model, model.model.norm, to, x, normed)
    return _Parts(Shape(heads, kv_heads, dim, 0, attention.scaling), (model.model.rotary_emb,))


# Writers by model_type; a writer uses only the modules that all of its families share, except where it says so.
_WRITERS: dict[str, Callable[[Any, _Writer], _Parts]] = {
    "gemma": _write_llama,
    "gemma2": _write_llama,
    "gemma3_text": _write_llama,
    "gpt_neox": _write_gpt_neox,
    "gpt_oss": _write_llama,
    "llama": _write_llama,
    "ministral": _write_llama,
    "mistral": _write_llama,
    "mixtral": _write_llama,
    "olmoe": _write_llama,
    "phi3": _write_phi3,
    "qwen2": _write_llama,
    "qwen2_moe": _write_llama,
    "qwen3": _write_llama,
    "qwen3_moe": _write_llama,
    "smollm3": _write_llama,
}


@dataclass(frozen=True)
class Program:
    """A model's program.

    Attributes:
        model: Model whose weights the operations point at.
        dtype: Data type of all buffers.
        widths: Row width of each buffer. The last buffer receives the logits.
        operations: `struct operation` of `native/forward.c`, in order.
        layers: Index of each layer's first operation, and of the first operation after all layers.
        shape: Shape of the attention.
        rotaries: Rotary embeddings of the model, which map a tensor of the model's dtype, and positions, to cosines and
            sines.
        kept: Further weights at which the operations point.
    """

    model: PreTrainedModel
    dtype: torch.dtype
    widths: tuple[int, ...]
    operations: ctypes.Array[_Operation]
    layers: tuple[int, ...]
    shape: Shape
    rotaries: tuple[Rotary, ...]
    kept: tuple[NativeLinear | torch.Tensor, ...] = ()


def program_of(model: PreTrainedModel) -> Program | None:
    """Return the program of a model with native linear layers; None for a family or a variant without a program."""
    write = _WRITERS.get(model.config.model_type)
    if write is None:
        return None
    writer = _Writer(model.dtype)
    try:
        parts = write(model, writer)
    except _NoProgramError:
        return None
    parts.shape.dtype = DTYPES[model.dtype]
    _check_places(writer, parts.shape)
    operations = (_Operation * len(writer.operations))(*writer.operations)
    return Program(
        model,
        model.dtype,
        tuple(writer.widths),
        operations,
        tuple(writer.layers),
        parts.shape,
        parts.rotaries,
        tuple(writer.kept),
    )


def _check_places(writer: _Writer, shape: Shape) -> None:
    """Refuse attention whose heads do not lie within the rows of their buffers.

    Raises:
        ValueError: A head lies outside its row.
    """
    for each in writer.operations:
        if each.kind != _ATTEND:
            continue
        places = ((each.query, shape.heads), (each.key, shape.kv_heads), (each.value, shape.kv_heads))
        for place, heads in places:
            row, stop = writer.widths[place.buffer], place.offset + (heads - 1) * place.head + shape.dim
            if place.token != row or stop > row:
                raise ValueError(f"{heads} heads of {shape.dim} dimensions end at {stop}, outside a row of {row}")
        if writer.widths[each.target] != shape.heads * shape.dim:
            raise ValueError(
                f"{shape.heads} heads of {shape.dim} dimensions do not fill a row of {writer.widths[each.target]}"
            )
