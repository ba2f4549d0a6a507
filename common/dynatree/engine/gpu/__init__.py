"""Forward passes with a fixed number of rows over fixed buffers: replayed on a GPU, and batch-invariant in 16 bits."""
