"""The operator's tools: settle, replay, erase, status, doctor, quarantined records, messages of a catalog.

May import `schemas`, `clients/reading`, `transforms/views`, `kafka`, `relay` and `storage`.
"""
