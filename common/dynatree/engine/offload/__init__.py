"""Targets that are larger than the memory: layers that are fetched while the layers before them compute."""
