"""What is kept in the service's own database: a row for each transaction, which answers its checks, and bookmarks.

May import `clients`, `clients/reading`, `schemas`.
"""
