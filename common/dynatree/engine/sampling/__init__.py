"""The choice of tokens from logits, and its noise."""
