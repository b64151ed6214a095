"""What the policies share: inactive intervals, booked lanes, what follows from a choice. Pure functions on plain data.

`intervals` (when storages lie idle) and `layers` (a trace as a chain of layers) say what there is to choose from;
`booking` what lanes and HBM bear; `draft` and `decisions` make a plan one decision at a time, `levers` and `search`
many at once; `effects` tells what a choice brings about, and `schedule` when the moves of a plan happen.
"""
