"""Writes down what one period of a program did: its trace."""
