"""Additions that lose nothing, sketches, and the CUDA kernels for both."""
