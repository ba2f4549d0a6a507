"""Presets that run the papers' tables and figures, and print the papers' numbers beside the measured ones."""
