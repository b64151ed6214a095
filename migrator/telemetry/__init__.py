"""Counters, what the groups of a device do, and the timeline of what happened when."""
