"""The method itself: guides, forms of the KL and the trainer. Knows nothing of profiles."""
