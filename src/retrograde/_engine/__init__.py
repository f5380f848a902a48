"""One training step: `run`, then `forward`, then `backward` and `recompute` (docs/engine.md)."""
