"""From a bare Python to a running command: environment, machine, work copies, test suites."""
