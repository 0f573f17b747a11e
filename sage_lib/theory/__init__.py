"""Exact results on small token trees."""
