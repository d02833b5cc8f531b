"""The producer's side: send transactional messages, run local transactions, answer checks.

May import `schemas`.
"""
