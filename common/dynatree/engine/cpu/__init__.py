"""Forward passes on a CPU by compiled kernels."""
