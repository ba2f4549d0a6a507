"""Replacement of the draft model while the service runs."""
