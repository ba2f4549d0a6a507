"""A model's files: where they are, its tokenizer, size, fingerprint and defaults."""
