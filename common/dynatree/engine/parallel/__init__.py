"""Tensor parallelism: one process for each device, of which rank 0 serves and the other ranks follow."""
