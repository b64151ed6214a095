"""Connects the parts of the migrator over the iterations of a program."""
