"""The ``nvme`` tier: a store of page groups in files on fast local disks.

`store` splits an extent into stripes over several directories and checks what comes back; `requests` runs
the stripes, reads first; `volume` keeps the accounts of one directory; a `backend` (`posix`, `kvikio`) is its
file.
"""
