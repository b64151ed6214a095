"""Learns a program from its traces and its times: when to plan, what to correct, which of two plans is faster."""
