"""The job: one streaming query from the half and op topics to the tables and the check topic.

May import `kafka`, `storage`, `runtime` and `transforms`.
"""
