"""What everybody here speaks of: traces, plans, links and times. Plain data, without torch."""
