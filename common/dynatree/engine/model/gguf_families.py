"""The families whose configurations are read from GGUF files here, and what each has beyond the others.

A value that a file does not name is llama.cpp's own for the family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

THETA = 10000.0  # base of the rotary embedding


class Values:
    """The values of a file by their keys without the name of the architecture.

    Attributes:
        read: The keys that were asked for.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.read: set[str] = set()

    def __call__(self, key: str, default: Any = None) -> Any:
        """Return a value, or the default where the file does not name it."""
        self.read.add(key)
        return self._values.get(key, default)

    def needed(self, key: str) -> Any:
        """Return a value that every file of the family has.

        Raises:
            LookupError: This one does not; the error names the key.
        """
        if key not in self._values:
            raise LookupError(key)
        return self(key)

    def has(self, key: str, value: object) -> bool:
        """Whether the file has this value; the key counts as read only then."""
        return key in self._values and self._values[key] == value and self(key) == value


Fields = dict[str, Any]  # of a configuration


def _none(fields: Fields, values: Values) -> Fields:
    return {}


def _phi3(fields: Fields, values: Values) -> Fields:
    """Files from before August 2024 do not name the window, which models with a context of 4,096 tokens have."""
    rotated = values("rope.dimension_count", fields["head_dim"])
    window = values("attention.sliding_window", 2047 if fields["max_position_embeddings"] == 4096 else 0)
    return {
        "rope_parameters": fields["rope_parameters"] | {"partial_rotary_factor": rotated / fields["head_dim"]},
        "sliding_window": window or None,
        "original_max_position_embeddings": values(
            "rope.scaling.original_context_length", fields["max_position_embeddings"]
        ),
    }


def _gemma2(fields: Fields, values: Values) -> Fields:
    window = values("attention.sliding_window", 4096)
    return {
        "sliding_window": window or fields["max_position_embeddings"],  # transformers makes its mask in any case
        "layer_types": None if window else ["full_attention"] * fields["num_hidden_layers"],
        "attn_logit_softcapping": values("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": values("final_logit_softcapping", 30.0) or None,
        "query_pre_attn_scalar": _query_scale(fields, layers=46),
    }


def _gemma3(fields: Fields, values: Values) -> Fields:
    """Every sixth layer sees all tokens, and only there is the rotary embedding scaled."""
    window = values("attention.sliding_window")
    period = max(values("attention.sliding_window_pattern", 6), 1) if window else 1
    layers = range(1, fields["num_hidden_layers"] + 1)
    full, near = dict(fields["rope_parameters"]), {"rope_type": "default"}
    if values.has("rope.scaling.type", "linear"):
        full |= {"rope_type": "linear", "factor": values("rope.scaling.factor", 1.0)}
    return {
        "sliding_window": window or fields["max_position_embeddings"],  # transformers makes its mask in any case
        "layer_types": ["sliding_attention" if each % period else "full_attention" for each in layers],
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": near | {"rope_theta": values("rope.freq_base_swa", THETA)},
        },
        "final_logit_softcapping": values("final_logit_softcapping") or None,
        "query_pre_attn_scalar": _query_scale(fields, layers=62),
    }


def _mixtral(fields: Fields, values: Values) -> Fields:
    return {
        "num_local_experts": values.needed("expert_count"),
        "num_experts_per_tok": values.needed("expert_used_count"),
    }


def _qwen3_moe(fields: Fields, values: Values) -> Fields:
    woken = values.needed("expert_used_count")
    width = values("expert_feed_forward_length") or fields["intermediate_size"] // max(woken, 1)
    experts = {"num_experts": values.needed("expert_count"), "num_experts_per_tok": woken}
    return experts | {"moe_intermediate_size": width, "norm_topk_prob": values("expert_weights_norm", True)}


def _qwen2_moe(fields: Fields, values: Values) -> Fields:
    shared = values("expert_shared_feed_forward_length") or fields["intermediate_size"]
    own = {"shared_expert_intermediate_size": shared, "norm_topk_prob": values("expert_weights_norm", False)}
    return _qwen3_moe(fields, values) | own


def _query_scale(fields: Fields, layers: int) -> int:
    """Return the number by whose root Gemma 2 and 3 divide scores, which no file names.

    It is the size of a head, except in the models of 27 billion parameters. As llama.cpp does, these are recognised by
    their number of layers.
    """
    whole: int = fields["hidden_size"] // fields["num_attention_heads"]
    return whole if fields["num_hidden_layers"] == layers else fields["head_dim"]


def family_of(values: Mapping[str, Any]) -> str | None:
    """Return the key of `FAMILIES` of a file with these values, or None if transformers reads its configuration.

    Mixtral's architecture is Llama's, with experts.
    """
    architecture: str = values["general.architecture"]
    family = "mixtral" if architecture == "llama" and values.get("llama.expert_count") else architecture
    return family if family in FAMILIES else None


# For each of llama.cpp's architectures, transformers' type and the function of its further fields.
FAMILIES: dict[str, tuple[str, Callable[[Fields, Values], Fields]]] = {
    "gemma": ("gemma", _none),
    "gemma2": ("gemma2", _gemma2),
    "gemma3": ("gemma3_text", _gemma3),
    "mixtral": ("mixtral", _mixtral),
    "phi3": ("phi3", _phi3),
    "qwen2moe": ("qwen2_moe", _qwen2_moe),
    "qwen3": ("qwen3", _none),
    "qwen3moe": ("qwen3_moe", _qwen3_moe),
    "smollm3": ("smollm3", _none),
}
