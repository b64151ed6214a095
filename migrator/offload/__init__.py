"""Takes groups of saved tensors out of HBM and brings them back, as the plan says."""
