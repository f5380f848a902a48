"""What everything else stands on: trees of tensors, the modules of a function, torch's private names."""
