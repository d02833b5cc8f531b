"""What runs: all I/O of the job, its commands and the local development tools.

May import `cli`.
"""
