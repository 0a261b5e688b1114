"""What the tests of several folders, ``soak`` and ``benchmarks`` share."""
