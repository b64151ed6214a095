"""C++ that is compiled on the user's machine, at its first use, against the headers of the installed PyTorch."""
