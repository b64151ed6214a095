"""The layout of a step's blocks on pages: what is predicted from the last steps, and where each block goes.

`periods` runs after each step and decides. It asks `sequence` what the next step will request, `packing` for an address
for each request, `kinds` which kinds of steps recur, `evaluations` whether an evaluation came after the step, and
`residence` and `demotion` which state and weights move to DRAM. `lifetimes` and `groups` serve the migrator: they cut
saved tensors that die together into groups that move together.
"""
