"""The operator's tools: settle, replay, status, doctor.

May import `schemas`, `transforms/views`, `kafka` and `storage`.
"""
