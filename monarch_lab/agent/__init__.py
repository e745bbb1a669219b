"""The process that starts, watches and ends the workers of one host. It never loads torch or IPython.

main.py          the loop: orders in, child events out
children.py      what it knows of each worker, and how workers end
ending.py        everything below the agent ends; nothing is left
zygote.py        a process with torch imported and nothing run; forks workers
worker_entry.py  a forked child becomes a worker
host.py          another agent: of a host of the supervision library; host_core.py its rules, host_loop.py the loop,
                 command.py starts a process, relay.py its connections, stderr_tails.py the end of what it printed
guard.py         outlives kernel and agent by a moment, and clears up after either
"""
