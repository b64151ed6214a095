"""Holds the parts together over the periods of a program."""
