"""Moving frames between known peers, and what the operating system does for us about processes.

platform.py     pidfd, subreaper, parent-death signal, /proc: all that is one system's alone
directory.py    the mesh's private directory and the sockets bound in it
frames.py       multi-frame messages that an interrupt cannot cut in two
stream.py       length-prefixed messages over a pipe or socket pair
doorbell.py     wakes a thread that sits in a poll
worker_link.py  a worker's end: orders, control, reports

No torch, no Jupyter, and no imports here: the guard starts from this package without site-packages.
"""
