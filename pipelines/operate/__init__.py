"""What an operator does: settle, replay, status, doctor.

May import `kafka`, `storage`, `runtime` and `transforms`.
"""
