"""Configuration, data loading and the training loop."""
