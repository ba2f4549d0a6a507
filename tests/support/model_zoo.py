"""Small models with random weights for the tests, saved to disk and loaded as real models are."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from dynatree import embedded

VOCAB_SIZE = 2048
CONTEXT = 160


def _configurations() -> dict[str, PretrainedConfig]:
    common = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": CONTEXT, "bos_token_id": 0, "eos_token_id": 0}
    narrow = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
    return {
        "gpt_neox": GPTNeoXConfig(**common, **narrow, use_parallel_residual=True),
        "gpt_neox_sequential": GPTNeoXConfig(**common, **narrow, use_parallel_residual=False),
        "llama": LlamaConfig(**common, **narrow, num_key_value_heads=2),
        "qwen2": Qwen2Config(**common, **narrow, num_key_value_heads=1),
        "qwen3": Qwen3Config(**common, **narrow, num_key_value_heads=2, head_dim=24),
        # with tied embeddings, these two would follow most tokens by the same one, whatever the seed
        "gemma": GemmaConfig(**common, **narrow, num_key_value_heads=1, head_dim=24, tie_word_embeddings=False),
        "phi3": Phi3Config(**common, **narrow, num_key_value_heads=2, pad_token_id=0),
        "smollm3": SmolLM3Config(
            **common,
            **narrow,
            num_key_value_heads=2,
            pad_token_id=0,
            no_rope_layers=[1, 0] * 4,
            tie_word_embeddings=False,
        ),
        "gpt2": GPT2Config(
            vocab_size=VOCAB_SIZE, n_positions=CONTEXT, n_embd=64, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0
        ),
        "mixtral": MixtralConfig(**common, **narrow, num_key_value_heads=4, num_local_experts=4, num_experts_per_tok=2),
        "qwen3_moe": Qwen3MoeConfig(
            **common,
            **narrow,
            num_key_value_heads=2,
            head_dim=32,
            moe_intermediate_size=64,
            num_experts=8,
            num_experts_per_tok=3,
            norm_topk_prob=True,
        ),
        "olmoe": OlmoeConfig(
            **common, **narrow, num_key_value_heads=2, pad_token_id=0, num_experts=8, num_experts_per_tok=3
        ),
        "qwen2_moe": Qwen2MoeConfig(
            **common,
            **narrow,
            num_key_value_heads=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=192,
            num_experts=12,
            num_experts_per_tok=4,
        ),
    }


MIXTURES = ("mixtral", "qwen3_moe", "olmoe", "qwen2_moe")
ARCHITECTURES = tuple(name for name in _configurations() if name not in MIXTURES)
_SAVED: dict[str, dict[str, bytes]] = {}  # the files of each model, by name


def save_random_model(folder: Path, architecture: str, seed: int, **changes: object) -> Path:
    """Save a model of `architecture` with random weights and the embedded pair's tokenizer.

    The weights' spread is three times the usual, so that greedy text varies and the top two logits stand apart.
    """

    def save(folder: Path) -> None:
        config = _configurations()[architecture]
        for name, value in changes.items():
            assert hasattr(config, name), name
            setattr(config, name, value)
        torch.manual_seed(seed)
        config.initializer_range = 0.06
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        save_tokenizer(folder)

    return _saved(folder, repr((architecture, seed, sorted(changes.items()))), save)


def save_tokenizer(folder: Path) -> None:
    """Save the embedded pair's tokenizer beside a model."""

    def save(folder: Path) -> None:
        PreTrainedTokenizerFast.from_pretrained(embedded.target_path()).save_pretrained(folder)

    _saved(folder, "tokenizer", save)


def save_noisy_copy(folder: Path, model: Path, seed: int, noise: float = 0.1) -> Path:
    """Save a draft that often guesses right: the weights of `model`, plus noise of `noise` times their spread."""

    def save(folder: Path) -> None:
        copy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        add_noise(copy, seed, noise)
        copy.save_pretrained(folder)
        PreTrainedTokenizerFast.from_pretrained(model).save_pretrained(folder)

    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(model.iterdir())))
    return _saved(folder, f"{digest.hexdigest()} {seed} {noise}", save)


def add_noise(model: PreTrainedModel, seed: int, noise: float = 0.1) -> None:
    """Add noise of `noise` times the spread of each weight."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            spread = weight.std(correction=0)  # 0 for norms and biases, which stay unchanged
            weight += noise * spread * torch.randn(weight.shape, generator=generator)


def _saved(folder: Path, key: str, save: Callable[[Path], None]) -> Path:
    """Write a model's files into `folder`; a process makes the files of each key only once."""
    if key not in _SAVED:
        with TemporaryDirectory() as made:
            save(Path(made))
            _SAVED[key] = {path.name: path.read_bytes() for path in Path(made).iterdir()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in _SAVED[key].items():
        (folder / name).write_bytes(data)
    return folder
