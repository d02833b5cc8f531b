"""Views for people, computed from state, tables and topics: pending transactions, audit, the story of one transaction.

May import `schemas` and `transforms`.
"""
