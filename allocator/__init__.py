"""The lowest layer: memory of all tiers, and where each block of it lies.

`pages` is PyTorch's allocator on our own pages, `layout` decides where the blocks of the next step go, and `native` is
the C++ core beneath. `host` and `nvme` are the tiers below HBM. `extensions` compiles C++ at its first use.

tier        a memory: ``hbm``, ``dram`` (pinned, mapped by the GPU) or ``nvme``
page        2 MiB, the unit of accounting and alignment in memory tiers (a disk is aligned to 4 KiB); the core maps 1 to
            8 of them at once, the more the larger the budget
extent      a run of bytes inside one capacity: an offset and a length, found by an `ExtentMap`
arena       an extent map over memory; hands out blocks (`allocator.host.dram`)
store       an extent map over files; moves blocks to and from them (`allocator.nvme`)

This layer takes plain typed values: it knows no config file, no environment and no command line, and it imports neither
``migrator`` nor ``tiers``. Importing the package itself costs nothing.
"""
