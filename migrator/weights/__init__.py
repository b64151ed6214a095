"""Streams weights that lie in DRAM through a buffer in HBM, ahead of the operators that read them."""
