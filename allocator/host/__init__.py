"""Host memory: the ``dram`` tier's pages, and what this process may take of the node's memory.

`dram` hands out blocks of pinned memory; `mappings` gets that memory from the system, by way of `pinning`, and `keeper`
is the thread that grows and shrinks it. `ledger` is shared by all processes of the node and counts what each holds of a
tier; `room` asks what the system has left; `claims` takes DRAM from both for the blocks of GPUs that HBM has no room
for.
"""
