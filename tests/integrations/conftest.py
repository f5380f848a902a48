def pytest_ignore_collect(config):
    """Unless it is asked for, by `make test-integrations`, nothing here is even imported."""
    return None if config.option.markexpr == "integrations" else True
