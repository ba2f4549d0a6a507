"""The KV cache, its ranges and its size."""
