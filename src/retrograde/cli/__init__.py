"""The `retrograde` command. The core never imports this."""
