"""Models and loops of other libraries: `make test-integrations`."""
