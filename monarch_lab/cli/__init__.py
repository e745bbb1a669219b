"""``monarch-lab``: what a shell can do with the meshes of its user. Never loads torch or Jupyter.

main.py        the words of the command line to a sub-command, errors to one sentence and an exit status
commands.py    the table of sub-commands
"""
