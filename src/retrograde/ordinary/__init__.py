"""Flat memory for the net that you have: ordinary layers, and a function in the place of torch's checkpoint."""
