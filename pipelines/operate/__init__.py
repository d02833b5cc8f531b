"""The operator's tools: settle, replay, status, doctor.

May import `kafka`, `storage`, `runtime` and `transforms`.
"""
