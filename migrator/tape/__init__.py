"""Records the operators that a program runs, in C++, and runs them again.

=============== =====================================================================
`recorder`      `load` it; `Recorder.begin` and `stop` a record
`closure`       recomputes tensors: the operators that made them, and their inputs
`clock`         what operators take a device
`substitutes`   copies that operators read in the place of storages
`check`         checks the recorder with the PyTorch that is installed
`compiled`      keeps compiled code off the record
`native`        the recorder itself, built for that PyTorch
=============== =====================================================================
"""
