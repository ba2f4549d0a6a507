"""Decides which models can be served exactly, by the configuration and by the attention that the layers request."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from dynatree.common.errors import StartupError
from dynatree.engine.adapters.registry import ADAPTED, RECURRENT, mixers
from dynatree.engine.forward.attention import AttentionCall
from dynatree.engine.forward.flat_forward import FlatForward
from dynatree.engine.forward.requested_mask import locality_of
from dynatree.engine.forward.scores import Scores
from dynatree.engine.kv.kv_cache import KVShape
from dynatree.engine.kv.locality import GLOBAL, Locality
from dynatree.engine.recurrent.memory import RecurrentSize
from dynatree.engine.recurrent.scan import Scan

# Kinds of layers that call the attention function, which refuses masks that it does not compute.
ATTENDING = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
# Kinds of layers in families with a recurrent adapter: those that compute each token by itself, and all without keys
# and values. A layer of the kind "hybrid" attends and recurs.
ALONE = frozenset({"mlp", "moe"})
WITHOUT_KEYS = ALONE | {"linear_attention", "conv"}
RECORDED_TOKENS = 4


def check_family(config: PretrainedConfig) -> None:
    """Refuse a family whose layers compute attention themselves instead of calling the registered function.

    It is called only after loading or probing has failed, to explain the failure.

    Raises:
        StartupError: The family does not use the attention interface.
    """
    family = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    adapted = config.model_type in ADAPTED | RECURRENT
    if family is not None and not adapted and not getattr(family, "_supports_attention_backend", True):
        raise StartupError(f"{config.model_type} models do not go through transformers' attention interface")


def check_config(config: PretrainedConfig) -> None:
    """Refuse unsupported features that the configuration names; the probes find the remaining ones.

    Raises:
        StartupError: The model is an encoder-decoder, or has layers of an unknown kind.
    """
    if config.is_encoder_decoder:
        raise StartupError(f"{config.model_type} is an encoder-decoder; DynaTree serves decoder-only models")
    known = ATTENDING | WITHOUT_KEYS | {"hybrid"} if config.model_type in RECURRENT else ATTENDING
    others = sorted(set(getattr(config, "layer_types", None) or ()) - known)
    if others:
        raise StartupError(f"{config.model_type} has {', '.join(others)} layers, which DynaTree does not compute")


def recurs(config: PretrainedConfig) -> bool:
    """Whether a model of a configuration, which `check_config` accepts, has recurrent layers."""
    return bool(set(getattr(config, "layer_types", None) or ()) - ATTENDING - ALONE)


class KVShapeRecorder:
    """Records the layers' attention and recurrence in one forward pass over a chain of tokens.

    It implements `Attending` by causal attention, and `Recurring`.

    Args:
        context_length: Length of the longest served sequence, in tokens.
    """

    def __init__(self, context_length: int) -> None:
        self._context_length = context_length
        self._heads: dict[int, tuple[int, int]] = {}  # query heads and kv_heads of each layer
        self._head_dim = 0
        self._localities: dict[int, Locality] = {}
        self._of_masks: list[tuple[Tensor, Locality]] = []  # layers of a kind share a mask
        self._features: set[str] = set()
        self._sizes: dict[tuple[int, str], RecurrentSize] = {}  # of each scan of each layer

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Compute causal attention among the tokens of the forward pass; see `Attending.attend`."""
        if layer in self._heads:
            raise StartupError(f"it attends more than once in layer {layer}")
        self._heads[layer] = (query.shape[0], key.shape[0])
        self._head_dim = max(self._head_dim, key.shape[2], value.shape[2])
        self._features |= {"capped scores"} if scores.cap is not None else set()
        self._features |= {"attention sinks"} if scores.sinks is not None else set()
        grouped = query.shape[0] != key.shape[0]
        return scaled_dot_product_attention(
            query[None], key[None], value[None], is_causal=True, scale=scores.scale, enable_gqa=grouped
        )[0].transpose(0, 1)

    def scan(self, layer: int, scan: Scan, tokens: Sequence[Tensor]) -> Tensor:
        """Compute a scan over the tokens of the forward pass; see `Recurring.scan`."""
        if (layer, scan.name) in self._sizes:
            raise StartupError(f"it computes {scan.name} more than once in layer {layer}")
        state = scan.start()
        outputs, records = scan.compute(*tokens, scan.none, None, state)
        record_bytes = sum(each[0].nbytes for each in records)
        self._sizes[layer, scan.name] = RecurrentSize(scan.fold(state, records).nbytes, record_bytes)
        self._features.add("recurrent layers")
        return outputs

    def request(self, layer: int, mask: Tensor | None, window: int | None) -> None:
        """Record the locality of a layer.

        Args:
            layer: The layer's index.
            mask: Mask that the model passes to its attention.
            window: Sliding window that it passes beside the mask. transformers' eager and SDPA attentions ignore it,
                and FlashAttention obeys it.

        Raises:
            StartupError: The mask is of another kind, or shows more or fewer tokens than the window.
        """
        found = GLOBAL if mask is None else self._locality_of(mask)
        if window is not None and window < self._context_length and found.window != window:
            raise StartupError(
                f"its attention gets a sliding window of {window} tokens and a mask that differs, so that its tokens "
                "depend on transformers' attention implementation"
            )
        self._features |= {"sliding windows"} if found.window is not None else set()
        self._features |= {"chunks"} if found.chunk is not None else set()
        self._localities[layer] = found

    def kv_shape(self, layers: int, alone: Collection[int] = ()) -> KVShape:
        """Return the shape that all layers fit into.

        Args:
            layers: Number of layers.
            alone: Indices of layers that compute each token by itself.

        Raises:
            StartupError: A layer neither attends nor recurs, or heads cannot be repeated to equal numbers.
        """
        recurrent = {layer for layer, _ in self._sizes}
        if {*self._heads, *recurrent, *alone} != set(range(layers)):
            raise StartupError(
                f"{len(self._heads)} of its {layers} layers attend through transformers' attention interface; the "
                "others may keep recurrent state"
            )
        most = max((kv_heads for _, kv_heads in self._heads.values()), default=1)
        if any(most % kv_heads or heads % most for heads, kv_heads in self._heads.values()):
            counts = ", ".join(f"{heads} and {kv_heads}" for heads, kv_heads in sorted(set(self._heads.values())))
            raise StartupError(f"its layers differ in their query and key heads ({counts})")
        indices = tuple(sorted(self._heads))
        localities = tuple(self._localities[layer] for layer in indices)
        if all(each == GLOBAL for each in localities):
            localities = ()
        return KVShape(
            len(indices),
            most,
            self._head_dim,
            localities,
            tuple(sorted(self._features)),
            indices if len(indices) < layers else (),
            self.recurrent_size(),
        )

    def recurrent_size(self) -> RecurrentSize | None:
        """Return the size of what all scans keep; None without any."""
        sizes = self._sizes.values()
        states, records = (sum(getattr(each, name) for each in sizes) for name in ("state_bytes", "record_bytes"))
        return RecurrentSize(states, records) if sizes else None

    def _locality_of(self, mask: Tensor) -> Locality:
        for known, locality in self._of_masks:
            if known is mask:
                return locality
        self._of_masks.append((mask, locality_of(mask, self._context_length)))
        return self._of_masks[-1][1]


@torch.inference_mode()
def recurrent_size_of(model: PreTrainedModel) -> RecurrentSize | None:
    """Return the size of what the recurrent layers of a model from `skeleton` keep; None without any."""
    recorder = KVShapeRecorder(0)
    call = AttentionCall(recorder, recurring=recorder)
    width = model.config.get_text_config().hidden_size
    rows = torch.zeros(1, RECORDED_TOKENS, width, dtype=model.dtype, device="meta")
    for mixer in mixers(model):
        copy.deepcopy(mixer).to("meta")(rows, dynatree_call=call)  # some have buffers elsewhere
    return recorder.recurrent_size()


def record_kv_shape(model: PreTrainedModel, context_length: int) -> KVShape:
    """Find the shape of the keys and values, and what each layer sees of them, by one forward pass over a few tokens.

    In this forward pass, the model builds its own masks and passes all its arguments to the attention function, which
    refuses any that it does not support.

    Args:
        model: Model that was loaded to call the registered attention function.
        context_length: Length of the longest served sequence, in tokens.

    Raises:
        StartupError: The model cannot run on the registered attention function.
    """
    recorder = KVShapeRecorder(context_length)
    positions = torch.arange(RECORDED_TOKENS, device=model.device)
    # the tokens kept are named, as in other forward passes: given a number of them, Gemma 4 changes its masks
    FlatForward(model, None, recorder.request)(positions[None], positions[None], recorder, positions, recorder)
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ()
    return recorder.kv_shape(config.num_hidden_layers, [layer for layer, kind in enumerate(kinds) if kind in ALONE])
