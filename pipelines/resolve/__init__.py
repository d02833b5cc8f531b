"""The job: one streaming query from the half and op topics to the tables and the check topic.

May import `schemas`, `transforms`, `kafka`, `storage` and `runtime`.
"""
