"""What runs: all I/O of the job, its commands and the local development tools.

May import `transforms`, `clients`, `schemas` and `conf`; which room imports which is in docs/architecture.md.
"""
