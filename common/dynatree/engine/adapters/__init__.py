"""Adapters of families that do not use transformers' attention interface, and of those with recurrent layers."""
