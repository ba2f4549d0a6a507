"""The KV cache: the arena, its ranges and its size."""
