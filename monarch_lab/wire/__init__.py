"""What travels between our processes: data only. No sockets, no torch, no Jupyter.

shape.py        n-dimensional slices of ranks
supervision.py  kernel <-> agent
engine.py       kernel <-> worker
codec.py        structs to bytes and back, checked
snapshot.py     what the browser is told
"""
