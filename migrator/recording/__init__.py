"""Records what one iteration of a program did: its trace."""
