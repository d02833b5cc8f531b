"""What the process runs on: Spark's session, its JVM, JARs, Java, paths, signals, garbage collector, server of metrics.

May import `schemas` and `conf`.
"""
