"""The growth of token trees by the draft model."""
