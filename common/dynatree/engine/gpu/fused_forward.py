"""Forward passes with few, fused kernels, for model families whose layers the project implements.

transformers' modules launch about 25 kernels for each layer over few rows, and a small kernel takes at least
2 microseconds even in a graph. Here a layer takes 9 or 11 kernels: torch's matrix products of the linear layers, and
fused kernels between them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from dynatree.engine.forward.attention import Attending
from dynatree.engine.forward.flat_forward import FlatForward
from dynatree.engine.forward.scores import Scores
from dynatree.engine.gpu.tree_attention import padded
from dynatree.engine.kv.kv_cache import KVShape

# transformers' names of activation functions, by their `kind` in the kernel
_ACTIVATIONS = {"gelu": 0, "gelu_new": 1, "gelu_pytorch_tanh": 1, "silu": 2, "swish": 2, "relu": 3}
_BLOCK = 1024
_WARPS = 8
_SMALL_WARPS = 1


class FusedForward:
    """Replaces `FlatForward` for a model of a family in `FAMILIES` with the usual parts (`can_fuse`)."""

    def __init__(self, model: Any) -> None:
        config = model.config
        self._model = model
        self.vocab_size: int = config.vocab_size
        self._layers = FAMILIES[config.model_type]
        self._kind = _ACTIVATIONS[config.hidden_act]
        rotary = model.gpt_neox.rotary_emb if config.model_type == "gpt_neox" else model.model.rotary_emb
        places = torch.arange(config.max_position_embeddings, device=model.device)[None]
        cosines, sines = rotary(torch.empty(1, 1, dtype=model.dtype, device=model.device), places)
        self._cosines, self._sines = cosines[0].contiguous(), sines[0].contiguous()  # [positions, rotary size]

    def __call__(
        self, token_ids: Tensor, positions: Tensor, attending: Attending, keep: Tensor | None = None
    ) -> Tensor:
        """See `FlatForward.__call__`."""
        normed = self._layers(self, token_ids[0], positions[0], attending)
        logits: Tensor = self._model.get_output_embeddings()(normed if keep is None else normed[keep])
        return logits

    def gpt_neox(self, token_ids: Tensor, positions: Tensor, attending: Attending) -> Tensor:
        """Return the hidden states after the final norm, `[rows, hidden]`."""
        model = self._model.gpt_neox
        x = embedding(token_ids, model.embed_in.weight)
        attended: Tensor | None = None
        fed: Tensor | None = None
        for index, layer in enumerate(model.layers):
            parallel = layer.use_parallel_residual
            after = layer.post_attention_layernorm
            if parallel:
                x, normed, for_mlp = _add_and_norm(x, fed, attended, layer.input_layernorm, after)
            else:
                x, normed, _ = _add_and_norm(x, fed, None, layer.input_layernorm)
            heads, dim = self._model.config.num_attention_heads, layer.attention.head_size
            qkv = layer.attention.query_key_value(normed).view(-1, heads, 3, dim)
            query, key, value = qkv.permute(2, 1, 0, 3)  # [heads, rows, dim] each
            attended = self._attend(index, query, key, value, positions, attending, layer.attention.scaling)
            attended = layer.attention.dense(attended)
            if not parallel:
                x, for_mlp, _ = _add_and_norm(x, attended, None, after)
            fed = layer.mlp.dense_4h_to_h(self._activate(layer.mlp.dense_h_to_4h(for_mlp)))
            if not parallel:
                attended = None
        return _add_and_norm(x, fed, attended, model.final_layer_norm)[1]

    def llama(self, token_ids: Tensor, positions: Tensor, attending: Attending) -> Tensor:
        """Return the hidden states after the final norm, `[rows, hidden]`."""
        model = self._model.model
        x = embedding(token_ids, model.embed_tokens.weight)
        added: Tensor | None = None
        for index, layer in enumerate(model.layers):
            attention, mlp = layer.self_attn, layer.mlp
            x, normed, _ = _add_and_norm(x, added, None, layer.input_layernorm)
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            query, key, value = (
                each(normed).view(len(normed), -1, attention.head_dim).transpose(0, 1) for each in projections
            )
            attended = self._attend(index, query, key, value, positions, attending, attention.scaling)
            x, normed, _ = _add_and_norm(x, attention.o_proj(attended), None, layer.post_attention_layernorm)
            added = mlp.down_proj(self._activate(mlp.gate_proj(normed), mlp.up_proj(normed)))
        return _add_and_norm(x, added, None, model.norm)[1]

    def _attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        attending: Attending,
        scale: float,
    ) -> Tensor:
        """Rotate queries and keys by their positions, and return the attention output, `[rows, heads * dim]`."""
        torch.ops.dynatree.rotate(query, key, self._cosines, self._sines, positions)
        return attending.attend(layer, query, key, value, Scores(scale)).flatten(1)

    def _activate(self, gate: Tensor, other: Tensor | None = None) -> Tensor:
        output: Tensor = torch.ops.dynatree.activate(gate, other, self._kind)
        return output


FAMILIES: dict[str, Callable[[FusedForward, Tensor, Tensor, Attending], Tensor]] = {
    "gpt_neox": FusedForward.gpt_neox,
    "llama": FusedForward.llama,
    "mistral": FusedForward.llama,
    "qwen2": FusedForward.llama,
}


RowsForward: TypeAlias = FlatForward | FusedForward


def forward_of(model: PreTrainedModel, shape: KVShape) -> RowsForward:
    """Return a model's forward pass over rows: fused on a GPU if the model is supported."""
    return FusedForward(model) if model.device.type == "cuda" and can_fuse(model) else FlatForward(model, shape)


def can_fuse(model: PreTrainedModel) -> bool:
    """Whether `FusedForward` supports the model's family and its parts."""
    if model.config.model_type not in FAMILIES or model.config.hidden_act not in _ACTIVATIONS:
        return False
    norms = [each for name, each in model.named_modules() if name.endswith("norm")]
    return all(type(each) is nn.LayerNorm or type(each).__name__.endswith("RMSNorm") for each in norms)


def _add_and_norm(
    x: Tensor, first: Tensor | None, second: Tensor | None, norm: Any, other: Any = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of the rows `[rows, hidden]`, its norm by `norm`, and its norm by `other`, if given."""
    given = [each for each in (norm, other) if each is not None]
    epsilons = [each.eps if type(each) is nn.LayerNorm else each.variance_epsilon for each in given]
    summed, normed = torch.ops.dynatree.add_and_norm(
        x,
        [each for each in (first, second) if each is not None],
        [each.weight for each in given],
        [each.bias for each in given if getattr(each, "bias", None) is not None],
        epsilons,
        type(norm) is nn.LayerNorm,
    )
    return (summed if first is not None else x), normed[0], normed[-1]


@torch.library.custom_op("dynatree::add_and_norm", mutates_args=())
def _add_and_norm_op(
    x: Tensor,
    addends: list[Tensor],
    scales: list[Tensor],
    shifts: list[Tensor],
    epsilons: list[float],
    centered: bool,
) -> tuple[Tensor, Tensor]:
    from dynatree.engine.gpu import fused_kernels as kernels

    rows, width = x.shape
    shifted = len(shifts) > 0
    summed, normed = torch.empty_like(x), x.new_empty(len(scales), rows, width)
    first, last = (addends[0], addends[-1]) if addends else (x, x)
    shifts = shifts or scales  # unused without `shifted`
    kernels.add_and_norm[(rows,)](
        *(x, first, last, summed, scales[0], shifts[0], normed[0], scales[-1], shifts[-1], normed[-1]),
        *(width, epsilons[0], epsilons[-1]),
        addends=len(addends),
        norms=len(scales),
        centered=centered,
        shifted=shifted,
        columns_block=padded(width),
        num_warps=_WARPS,
        enable_fp_fusion=False,
    )
    return summed, normed


@_add_and_norm_op.register_fake
def _(x: Tensor, _: list[Tensor], scales: list[Tensor], *__: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(len(scales), *x.shape)


@torch.library.custom_op("dynatree::rotate", mutates_args={"query", "key"})
def _rotate_op(query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor, positions: Tensor) -> None:
    from dynatree.engine.gpu import fused_kernels as kernels

    half = cosines.shape[1] // 2
    kernels.rotate[(query.shape[1], query.shape[0] + key.shape[0])](
        *(query, key, cosines, sines, positions, *query.stride()[:2], *key.stride()[:2], query.shape[0]),
        half=half,
        padded_half=padded(half),
        num_warps=_SMALL_WARPS,
        enable_fp_fusion=False,
    )


@torch.library.custom_op("dynatree::activate", mutates_args=())
def _activate_op(gate: Tensor, other: Tensor | None, kind: int) -> Tensor:
    from dynatree.engine.gpu import fused_kernels as kernels

    output = torch.empty_like(gate)
    kernels.activate[(-(-gate.numel() // _BLOCK),)](
        *(gate, gate if other is None else other, output, gate.numel()),
        kind=kind,
        times=other is not None,
        block=_BLOCK,
        num_warps=_WARPS,
        enable_fp_fusion=False,
    )
    return output


@_activate_op.register_fake
def _(gate: Tensor, *_: object) -> Tensor:
    return torch.empty_like(gate)
