"""Counts what was done, and writes down what happened when."""
