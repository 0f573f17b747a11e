"""Measured files in; tables and figures out."""
