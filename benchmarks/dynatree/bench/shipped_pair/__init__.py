"""The scripts that made the shipped pair."""
