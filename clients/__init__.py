"""The client: sends transactional messages, runs local transactions, answers checks. Services import it from `halfway`.

May import `schemas` and `clients/kafka`.
"""
