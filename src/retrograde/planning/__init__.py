"""How much memory a training step takes, told without running it: `retrograde plan` is made of this. Needs torch alone."""
