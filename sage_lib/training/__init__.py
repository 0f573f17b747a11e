"""The two training stages."""
