"""Moving frames between known peers, and what the operating system does for us about processes.

platform.py     pidfd, subreaper, parent-death signal, /proc: all that is one system's alone
directory.py    the mesh's private directory and the sockets bound in it
frames.py       multi-frame messages that an interrupt cannot cut in two
stream.py       length-prefixed messages over a pipe or socket pair
doorbell.py     wakes a thread that sits in a poll
worker_link.py  a worker's end: orders, control, reports
keys.py         CURVE key pairs; the invitation a host joins with
curve.py        CURVE sockets and the mesh's password; the list of keys that are let in
door.py         the two sockets of a local mesh: who may connect, whose word is whose
hub.py          the supervisor's end of the links to its hosts; its rules are roster.py
dialer.py       an agent's end; its rules are dialing.py
link_socket.py  what both ask of their socket
events.py       what the owner of an end hears
complaints.py   when to log what strangers send
faults.py       faults on purpose, at named points

No torch, no Jupyter, and no imports here: the guard starts from this package without site-packages.
"""
