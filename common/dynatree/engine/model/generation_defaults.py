"""The fields of a checkpoint's generation_config that decide tokens: adopted, or refused by name.

`generate()` without arguments follows the generation_config, and DynaTree's greedy output equals it. So every field
that changes greedy tokens is either adopted or refused. Three groups need neither:

- Fields that matter only in sampling, beam search or assistance (`do_sample`, `temperature`, `top_k`, ...). Requests
  are greedy unless they ask for sampling; a checkpoint never makes a request sample.
- Lengths (`max_length`, `max_new_tokens`), which every request sets for itself.
- Fields that choose a compiler, an output format, or a cache that keeps keys and values unchanged.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from dynatree.common.errors import StartupError
from dynatree.common.sampling import MAX_PENALTY

ADOPTED = frozenset({"eos_token_id", "repetition_penalty"})
WITHOUT_EFFECT = frozenset(
    {
        # lengths
        *("max_length", "max_new_tokens"),
        # sampling
        *("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
        # beam search; without num_beams there is none
        *("early_stopping", "length_penalty", "diversity_penalty", "num_beam_groups", "num_return_sequences"),
        # assistance, which changes no greedy token
        *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind"),
        *("target_lookbehind", "assistant_ensemble_weight", "speculation_type", "use_mtp"),
        # caches and speed
        *("use_cache", "cache_config", "max_cache_len", "low_memory", "compile_config"),
        *("disable_compile", "continuous_batching_config", "prefill_chunk_size"),
        # output formats and other token ids
        *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
        *("pad_token_id", "bos_token_id", "decoder_start_token_id", "transformers_version"),
    }
)
# Values, besides None, False and empty lists, with which `generate()` does not change logits or stopping.
NEUTRAL: dict[str, float] = {
    "num_beams": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "guidance_scale": 1.0,
    "penalty_alpha": 0.0,
}
_ROUNDED_CACHE = "quantized"  # a `cache_implementation`; the others keep all bits of keys and values


def adopt_generation_config(model: PreTrainedModel, where: str | Path) -> None:
    """Give a model from `skeleton` the generation_config of its folder or hub name, or of its config.json's fields.

    `from_pretrained` does the same.
    """
    others: dict[str, Any] = {"config_file_name": "config.json", "_from_model_config": True}
    for options in ({}, others):
        with suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(where, **options)
            return


@dataclass(frozen=True)
class GenerationDefaults:
    """Defaults that requests inherit from the target's checkpoint.

    Attributes:
        eos_token_ids: The tokens that end a completion.
        repetition_penalty: Penalty of requests that do not set it; 1 has no effect.
    """

    eos_token_ids: frozenset[int] = frozenset()
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, config: GenerationConfig | None) -> GenerationDefaults:
        """Return the defaults that a generation_config sets.

        Raises:
            StartupError: The generation_config sets an unsupported field that changes greedy tokens, or a penalty out
                of range.
        """
        if config is None:
            return cls()
        known = vars(GenerationConfig())  # type: ignore[no-untyped-call]
        refused = sorted(name for name in known if _changes_tokens(name, getattr(config, name, None)))
        if refused:
            raise StartupError(
                f"its generation_config sets {', '.join(refused)}, which changes the tokens of generate() and which "
                "DynaTree does not compute; remove it from generation_config.json to serve the model"
            )
        ids = config.eos_token_id
        penalty = 1.0 if config.repetition_penalty is None else config.repetition_penalty
        if not isinstance(penalty, (int, float)) or not 0.0 < penalty <= MAX_PENALTY:
            raise StartupError(
                f"its generation_config sets repetition_penalty to {penalty!r}, expected a number in "
                f"(0, {MAX_PENALTY:g}]"
            )
        return cls(
            eos_token_ids=frozenset(ids if isinstance(ids, list) else () if ids is None else (ids,)),
            repetition_penalty=float(penalty),
        )


def _changes_tokens(name: str, value: object) -> bool:
    """Whether this value of a field changes greedy tokens in an unsupported way; an unknown field is assumed to."""
    if name.startswith("_") or name in ADOPTED or name in WITHOUT_EFFECT:
        return False
    if name == "cache_implementation":
        return value == _ROUNDED_CACHE
    neutral = value is None or value is False or value == [] or (name in NEUTRAL and value == NEUTRAL[name])
    return not neutral
