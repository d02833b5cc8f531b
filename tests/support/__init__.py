"""What tests, the chaos run, the fuzz run and benchmarks share. May import no test module and no conftest."""
