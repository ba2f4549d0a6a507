"""Grammars: what they allow after each token."""
