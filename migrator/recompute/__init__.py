"""Finds, tries and runs recomputations of saved tensors."""
