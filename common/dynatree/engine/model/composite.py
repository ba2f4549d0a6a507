"""The language model of a composite checkpoint, in which it stands beside a vision model.

The language model is served alone, as a model of its own family. The loader reads no weights of other parts.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

from dynatree.common.errors import StartupError

# Whether the thread suppresses the report of a load.
_WITHOUT_REPORT: ContextVar[bool] = ContextVar("_WITHOUT_REPORT", default=False)
# Composite families that give a text the same logits as their language models alone. Others may not: PaliGemma shows
# each token of a prompt the later ones.
_WITH_ANY = frozenset({"idefics3", "internvl", "llava", "llava_next", "llava_onevision", "mistral3", "smolvlm"})
COMPOSITES = _WITH_ANY | {
    *("exaone4_5", "gemma3", "gemma4", "gemma4_unified", "llama4", "qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe"),
    *("qwen3_vl", "qwen3_vl_moe"),
}
# Language models of `_WITH_ANY` whose logits are those of an output layer alone. A composite model would not scale the
# logits of Granite or Cohere.
_PLAIN = frozenset({"llama", "ministral3", "mistral", "qwen2", "qwen3", "qwen3_moe"})
# Language models without a class of their own, and the families that compute the same: the three rotary positions of a
# text's token are equal.
_SAME = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
# Names of tensors in composite checkpoints -> names in the language model, as `key_mapping` of transformers.
KEY_MAPPING = {
    r"^(model\.)?language_model\.lm_head\.": "lm_head.",
    r"^(model\.)?(language_model|text_model)\.(model\.)?": "model.",
}


def text_config_of(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of a composite model's language model; any other configuration is returned unchanged.

    Raises:
        StartupError: The composite model may compute more than its language model.
    """
    if config.is_encoder_decoder or config.get_text_config() is config:
        return config
    text = copy.deepcopy(config.get_text_config())
    if config.model_type not in COMPOSITES or (config.model_type in _WITH_ANY and text.model_type not in _PLAIN):
        raise StartupError(
            f"{config.model_type} is a composite model, and it is not known whether its language model of "
            f"{text.model_type} alone gives the same tokens"
        )
    if text.model_type in _SAME:
        values = text.to_dict()
        rope = {name: each for name, each in values["rope_parameters"].items() if not name.startswith("mrope")}
        if text.model_type == "qwen3_vl_moe_text":
            values["norm_topk_prob"] = True  # its routers always normalise
        text = CONFIG_MAPPING[_SAME[values.pop("model_type")]](**values | {"rope_parameters": rope})
    for name in ("dtype", "eos_token_id", "quantization_config", "tie_word_embeddings"):  # as transformers reads them
        value = getattr(config, name, None)
        if value is not None:
            setattr(text, name, value)
    return text


def loader_of(config: PretrainedConfig) -> Any:
    """Return the class by which transformers loads a whole checkpoint with its language model's output layer."""
    return AutoModelForImageTextToText if config.model_type in COMPOSITES else AutoModelForCausalLM


@contextmanager
def without_report() -> Iterator[None]:
    """Suppress transformers' table of the tensors that the model has no place for, such as a vision model's.

    Other threads keep their reports, and transformers' verbosity, which all threads share, stays as it is.
    """
    logging.getLogger("transformers.modeling_utils").addFilter(_is_wanted)
    token = _WITHOUT_REPORT.set(True)
    try:
        yield
    finally:
        _WITHOUT_REPORT.reset(token)


def _is_wanted(record: logging.LogRecord) -> bool:
    return not (_WITHOUT_REPORT.get() and "LOAD REPORT" in record.getMessage())
