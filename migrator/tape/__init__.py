"""Records the operators that a program runs, in C++, and runs them again.

=============== =====================================================================
`recorder`      `load` it; `Recorder.begin` and `end` a record
`tape`          what a record holds, as plain data
`operators`     the operators among that, and their values
`closure`       recomputes tensors: the operators that made them, and their inputs
`check`         checks the recorder with the PyTorch that is installed
`compiled`      keeps compiled code off the tape
`native`        the recorder itself, built for that PyTorch
=============== =====================================================================
"""
