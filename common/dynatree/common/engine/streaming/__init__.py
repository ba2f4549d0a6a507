"""Targets that are larger than the memory: layers that are read from the disk while the layers before them compute."""
