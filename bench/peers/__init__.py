"""Other task queues beside ours, each run by a Python of its own: see `bench/tasks.py`.

`NAME.txt` is what it has installed: arq wants redis < 6 and taskiq-redis redis >= 7, so each has its own.
"""
