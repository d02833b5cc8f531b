"""The client for asyncio: the same records, verdicts and checks, and nothing in the event loop that waits.

May import `clients`, `clients/kafka`, `schemas`.
"""
