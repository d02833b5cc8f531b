"""What runs: jobs, session, sources, sinks, the local broker and the command line. All I/O is here."""
