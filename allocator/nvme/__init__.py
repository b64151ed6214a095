"""The ``nvme`` tier: a store of page groups in files on fast local disks.

`store` splits an extent into stripes (`stripe`) over several directories and checks what comes back (`checksum`);
`requests` runs them, reads first; `volume` keeps the accounts of one directory; a `backend` (`posix`, `kvikio`) is
its file.
"""
