"""For trainers that log by themselves: what tiers does, in the user's own logger. Nothing else needs a callback."""
