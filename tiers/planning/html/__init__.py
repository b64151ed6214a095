"""A run as one HTML file, with figures by matplotlib (extra ``plot``).

A file per figure: a pure function from plain data to a section of the page. `report` has their order.
"""
