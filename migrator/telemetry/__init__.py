"""Counters, and the timeline of what happened when."""
