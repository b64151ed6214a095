"""Offloads groups of saved tensors from HBM and prefetches them, as the plan says."""
