"""The core as PyTorch's allocator for CUDA memory: C++ on PyTorch's interface, and `adapter`, which installs it."""
