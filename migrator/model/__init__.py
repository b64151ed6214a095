"""The data model that all parts share: traces, plans, links and times. Plain data, without torch."""
