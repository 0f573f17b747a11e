"""The method itself: guides, anchors and the trainer. Knows nothing of profiles."""
