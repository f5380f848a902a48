def pytest_ignore_collect(config):
    """Unless it is asked for, by `make test-peers`, nothing here is even imported."""
    return None if config.option.markexpr == "peers" else True
