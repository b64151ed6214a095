"""Holds the parts together over the iterations of a program."""
