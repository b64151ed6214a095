"""PyTorch's saved-tensor hooks, and what they do with each saved tensor."""
