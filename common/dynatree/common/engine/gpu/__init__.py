"""Forwards of a fixed number of rows, whose contents are buffers: what a GPU replays, and what is exact in 16 bits."""
