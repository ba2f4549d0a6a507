"""Adapters of families whose attention does not go through transformers' attention interface, one file a family."""
