"""Adapters of families whose attention does not go through transformers' attention interface, or with recurrent layers."""
