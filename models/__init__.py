"""BERT for pretraining, with layers of PyTorch or of Tempo."""
