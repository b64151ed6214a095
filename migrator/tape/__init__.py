"""What operators a program runs, step by step: recorded in C++ while they run, and run again where that is wanted.

=============== =====================================================================
`recorder`      `load` it; `Recorder.begin` and `end` a record
`tape`          what a record holds, as plain data
`closure`       makes tensors again: the operators that made them, and what from
`check`         whether it can be believed, with the PyTorch that is installed
`compiled`      of what is compiled nothing is recorded
`native`        the recorder itself, built for that PyTorch
=============== =====================================================================
"""
