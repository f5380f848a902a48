"""Measuring. The core never imports this."""
