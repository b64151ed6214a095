"""Queries of the program itself: its modules, parameters, optimizers and process groups."""
