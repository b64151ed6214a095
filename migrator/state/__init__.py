"""Brings optimizer state that lies in DRAM through a buffer in HBM, slice by slice, while the optimizer steps."""
