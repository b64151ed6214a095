"""Learns a program from its traces and times: when to plan anew, and what to correct by measurement."""
