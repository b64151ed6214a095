"""A program as it is, under tiers at several budgets, and beside other ways to save memory."""
