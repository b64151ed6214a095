"""Plans of a trace side by side, without a GPU: what each policy comes to, why, and as a picture.

`compare` makes and simulates them, `explain` tells of one site, `plot` draws. Pure functions of plain data.
"""
