"""Unmodified PyTorch programs; a package so that the benchmarks can measure the same models."""
