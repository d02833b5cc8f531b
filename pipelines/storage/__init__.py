"""What lies on disk or in an object store: Delta tables, checkpoint, state, compaction.

May import `schemas`.
"""
