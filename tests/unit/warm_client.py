"""Stands in for a program that `tests/unit/warm.py` forks: hands its files over, and ends as that one does."""

import json
import os
import signal
import socket
import sys

_, address, *words = sys.argv
request = json.dumps([words, dict(os.environ), os.getcwd()]).encode()
ours, theirs = socket.socketpair()
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 << 20)
    server.connect(address)
    socket.send_fds(server, [request], [0, 1, 2, theirs.fileno()])
theirs.close()
for descriptor in (0, 1, 2):  # whoever reads or writes them waits for the program alone
    os.close(descriptor)
told = ours.makefile()
told.readline()
status = int(told.readline())
if status < 0:
    if -status not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
