"""Policies from papers."""
