"""Training a language model end to end: data, loop, checkpoints, several processes. What `retrograde train` runs."""
