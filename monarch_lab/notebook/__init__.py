"""Everything that knows Jupyter: magics, cells, output, prompts, tracebacks, cards, the panel's comm.

It works in a plain terminal IPython too: what needs a kernel is left out there, what needs a browser is text.
``extension`` is where to start reading.
"""
