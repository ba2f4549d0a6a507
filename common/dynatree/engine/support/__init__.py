"""Decides which models can be served, by their configuration and by probes of small models."""
