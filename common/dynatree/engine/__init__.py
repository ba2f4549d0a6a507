"""The engine: one flat forward pass over any number of sessions, for any supported causal language model."""
