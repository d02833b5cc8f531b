"""Development on one machine: the local Kafka broker, the class archives, the settings of a command line.

May import `schemas`, `conf`, `kafka`, `runtime` and `resolve`.
"""
