"""The process that runs tensor ops, one for each device.

main.py         the loop: orders in, reports out
engine.py       cells (ref -> value), the op stream, failures
definitions.py  what the kernel defined, by number
calls.py        entries made into straight-line code that checks its prediction
learning.py     a first run, described for the controller
backward.py     backward passes and which leaves they touched
callbacks.py    functions of the kernel that a graph comes to
functions.py    graph nodes of the kernel's autograd.Functions
gradient_walks.py   gradients one by one
groups.py       process groups of mesh dims, formed at first use
collectives.py  reduce, with its adjoints
randomness.py   one seed for all ranks, variation on request
output.py       prints of user code
debugger.py     pdb whose terminal is the notebook cell
failures.py     exceptions as data
show.py         values as text, for displays

User code runs on the main thread (so that SIGINT, pdb and faulthandler behave); a reader thread hears control
messages meanwhile.
"""
