"""The tests; a package so that `tests.programs` is importable whatever else is installed."""
