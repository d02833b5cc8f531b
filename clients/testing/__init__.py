"""What a service's own tests use in place of Kafka and the job. Services import it from `halfway.testing`.

May import `clients`, `clients/aio`, `clients/kafka`, `transforms`, `schemas`.
"""
