"""The drop-in classes beside the classes of the packages that they replace: `make test-peers`."""
