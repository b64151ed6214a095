"""Workloads, the demo, and what side-by-side measurements need; see README.md."""
