"""The operator's tools: settle, replay, status, doctor.

May import `schemas`, `clients/reading`, `transforms/views`, `kafka`, `relay` and `storage`.
"""
