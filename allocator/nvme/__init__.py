"""The ``nvme`` tier: a store of page groups in files on fast local disks.

`store` splits an extent into stripes (`stripe`) over several directories, and checks what is read (`checksum`).
`requests` runs the reads and writes in threads, reads first. `volume` counts what is taken of one directory's file. A
`backend` (`posix`, `kvikio`) is that file.

GPU memory goes to a drive through host memory, or directly by GPUDirect Storage. `facts` reads what the machine can do,
`speeds` and `time_way` measure the ways, `ways` and `decide` choose one, and `choose` opens the files by it.
"""
